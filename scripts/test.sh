#!/usr/bin/env bash
# Runs all tests, installing what they need. With the fail points that the crash tests arm.
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

cargo test "${build[@]}" --lib --bins
# Those that start guests take all cores each: one after the other.
cargo test "${build[@]}" --test '*' -- --test-threads 1
cargo test "${build[@]}" --doc
