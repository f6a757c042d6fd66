#!/usr/bin/env bash
# Runs the tests, installing what they need, or with --ignored those that take long. With the fail points that the crash tests arm.
# A test that lacks something passes without having looked, and is named at the end; with TRANSSHIP_TESTS_COMPLETE=1 it fails.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
# What a build is kept for to make the next one quicker makes the first one a fifth slower.
if [ ! -d "${CARGO_TARGET_DIR:-target}/debug/incremental" ]; then
    export CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
fi

# What some tests compare with, from Debian's mirror: Intel's QATzip, an older and a newer QEMU than the one that is installed, the
# libvirt of Debian 12, and other processes that are devices of a guest. The build goes on beside it: unpacking them takes one processor.
[ -n "${TRANSSHIP_QATZIP_PACKAGES:-}" ] || scripts/qatzip-packages.sh .guest/qatzip &
qatzip=$!
[ -n "${TRANSSHIP_QEMUS:-}" ] || { scripts/qemu-versions.sh 7.2 .guest/qemus/7.2 && scripts/qemu-versions.sh 11.1 .guest/qemus/11.1; } &
qemus=$!
[ -n "${TRANSSHIP_LIBVIRTS:-}" ] || scripts/libvirt-versions.sh 9.0 .guest/libvirts/9.0 &
libvirts=$!
back_ends() {
    scripts/back-ends.sh passt .guest/back-ends/passt
    scripts/back-ends.sh virtiofsd .guest/back-ends/virtiofsd
    if [ "${1:-}" = --ignored ]; then
        scripts/back-ends.sh passt-2025 .guest/back-ends/passt-2025
        scripts/back-ends.sh testpmd .guest/back-ends/testpmd
    fi
}
[ -n "${TRANSSHIP_BACK_ENDS:-}" ] || back_ends "$@" &
back_ends=$!
# The policy of a host on which SELinux confines QEMU; only a test that takes long wants it.
[ "${1:-}" != --ignored ] || scripts/selinux-policy.sh .guest/selinux &
policy=$!

build=(--workspace --locked --features transship/fail-points)
# With the tests: what only they ask of a dependency would otherwise have it built again, and what stands on it.
cargo build "${build[@]}" --bins --tests || { kill "$qatzip" "$qemus" "$libvirts" "$back_ends" "$policy" 2>/dev/null; exit 1; }

# Guest memory: gone whatever ends the tests.
memory=/dev/shm
[ -d "$memory" ] || memory=${TMPDIR:-/tmp}
TRANSSHIP_SCRATCH=$(mktemp -d "$memory/transship-test-XXXXXX")
TRANSSHIP_LACKS=$(mktemp)
TRANSSHIP_BIN=$(realpath "${CARGO_TARGET_DIR:-target}/debug/transship")
export TRANSSHIP_SCRATCH TRANSSHIP_LACKS TRANSSHIP_BIN

# Huge pages for the tests that want a few; those that want an exact number see to that by themselves.
pool=/proc/sys/vm/nr_hugepages
pool_before=
if [ -w "$pool" ]; then
    pool_before=$(cat "$pool")
    if [ "$pool_before" -lt 128 ]; then
        echo 128 >"$pool" || true
    fi
fi

beside=
others=
end() {
    [ -z "$beside" ] || kill -- "-$beside" || true
    rm -rf "$TRANSSHIP_SCRATCH" "$TRANSSHIP_LACKS" "$others"
    if [ -n "$pool_before" ]; then
        echo "$pool_before" >"$pool"
    fi
}
trap end EXIT

# What has come meanwhile is named to the tests; those of what is missing are left out.
come() {
    local job=$1 variable=$2 folder=$3 lack=$4
    if ! wait "$job"; then
        echo "test: without $lack are left out" >&2
    elif [ -z "${!variable:-}" ]; then
        export "$variable=$(realpath "$folder")"
    fi
}
come "$qatzip" TRANSSHIP_QATZIP_PACKAGES .guest/qatzip "Debian 13's QATzip packages: the tests that compare with Intel's library"
come "$qemus" TRANSSHIP_QEMUS .guest/qemus "QEMU 7.2 and 11.1: the tests that need those versions"
come "$libvirts" TRANSSHIP_LIBVIRTS .guest/libvirts "libvirt 9.0: the tests that need that version"
come "$back_ends" TRANSSHIP_BACK_ENDS .guest/back-ends "passt, virtiofsd and DPDK's testpmd: the tests that need them"
wait "$policy" || echo "test: without Debian's policy for SELinux: the test that needs it is left out" >&2

# One that fails must not hide the others.
failed=
run() {
    cargo test "${build[@]}" --no-fail-fast "$@" || failed=1
}
# The tests end to end wait for their guests now and then: all others go on beside them, and are shown when they are done.
others=$(mktemp)
# A group of processes of their own, so that they can all be ended.
set -m
if [ "${1:-}" = --ignored ]; then
    (
        run --lib -- --ignored
        run --test '[!e]*' --test 'e[!2]*' -- --ignored --test-threads 1
        [ -z "$failed" ]
    ) >"$others" 2>&1 &
    # Guests that are emulated for minutes take a core each, and other tests wait for half of their time.
    end_to_end=(--ignored --test-threads 3)
else
    (
        run --lib --bins
        run --test '[!e]*' --test 'e[!2]*' -- --test-threads 2
        run --doc
        [ -z "$failed" ]
    ) >"$others" 2>&1 &
    end_to_end=(--test-threads 4)
fi
beside=$!
set +m
run --test 'e2e*' -- "${end_to_end[@]}"
wait "$beside" || failed=1
beside=
cat "$others"

if [ -s "$TRANSSHIP_LACKS" ]; then
    echo "test: $(sed 's|: left out: .*||' "$TRANSSHIP_LACKS" | sort -u | wc -l) tests were left out, or a part of each:" >&2
    sort -u "$TRANSSHIP_LACKS" | sed 's/^/  /' >&2
fi
[ -z "$failed" ]
