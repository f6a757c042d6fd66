#!/usr/bin/env bash
# Runs the tests, installing what they need, or with --ignored those that take minutes each. With the fail points that the crash tests arm.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
build=(--workspace --locked --features transship/fail-points)
cargo build "${build[@]}"

# Guest memory: gone whatever ends the tests.
memory=/dev/shm
[ -d "$memory" ] || memory=${TMPDIR:-/tmp}
TRANSSHIP_SCRATCH=$(mktemp -d "$memory/transship-test-XXXXXX")
TRANSSHIP_BIN=$(realpath "${CARGO_TARGET_DIR:-target}/debug/transship")
export TRANSSHIP_SCRATCH TRANSSHIP_BIN
trap 'rm -rf "$TRANSSHIP_SCRATCH"' EXIT

# Intel's QATzip, to compare with. It comes from Debian's mirror; without a network its tests are left out.
if [ -z "${TRANSSHIP_QATZIP_PACKAGES:-}" ]; then
    if scripts/qatzip-packages.sh .guest/qatzip; then
        TRANSSHIP_QATZIP_PACKAGES=$(realpath .guest/qatzip)
        export TRANSSHIP_QATZIP_PACKAGES
    else
        echo "test: without Debian 13's QATzip packages: the tests that compare with Intel's library skip themselves" >&2
    fi
fi

# Older and newer QEMUs than the one that is installed, from there too.
if [ -z "${TRANSSHIP_QEMUS:-}" ]; then
    if scripts/qemu-versions.sh 7.2 .guest/qemus/7.2 && scripts/qemu-versions.sh 11.1 .guest/qemus/11.1; then
        TRANSSHIP_QEMUS=$(realpath .guest/qemus)
        export TRANSSHIP_QEMUS
    else
        echo "test: without QEMU 7.2 and 11.1: the tests that need those versions skip themselves" >&2
    fi
fi

# One that fails must not hide the others.
failed=
run() {
    cargo test "${build[@]}" --no-fail-fast "$@" || failed=1
}
if [ "${1:-}" = --ignored ]; then
    run --test '*' -- --ignored --test-threads 1
    [ -z "$failed" ]
    exit
fi
run --lib --bins
# Those that start guests wait for them half of the time, and take all cores the other half: two at once.
run --test '*' -- --test-threads 2
run --doc
[ -z "$failed" ]
