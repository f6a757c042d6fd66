#!/usr/bin/env bash
# Moves, saves and restores one guest between stock QEMUs 7.2, the installed one and 11.1 again and again, while one of those that take part is
# killed or held, and looks at what came of it. Prints a table; fails at the first thing that is not as promised, with seed and step.
#
#   scripts/soak.sh [--moves N] [--seed S] [--keep-going] [--gentle]        tests/src/bin/soak says what each step does
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
scripts/qemu-versions.sh 7.2 .guest/qemus/7.2
scripts/qemu-versions.sh 11.1 .guest/qemus/11.1
cargo build --quiet --workspace --locked --features transship/fail-points --bin transship --bin soak

# Guest memory and sockets: gone whatever ends the soak.
memory=/dev/shm
[ -d "$memory" ] || memory=${TMPDIR:-/tmp}
TRANSSHIP_SCRATCH=$(mktemp -d "$memory/transship-soak-XXXXXX")
TRANSSHIP_QEMUS=$(realpath .guest/qemus)
export TRANSSHIP_SCRATCH TRANSSHIP_QEMUS
trap 'rm -rf "$TRANSSHIP_SCRATCH"' EXIT
"${CARGO_TARGET_DIR:-target}/debug/soak" --logs "${CARGO_TARGET_DIR:-target}/soak" "$@"
