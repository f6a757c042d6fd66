#!/usr/bin/env bash
# Moves a running guest before your eyes, or forks one.
#
#   scripts/demo.sh [qemu|synthetic|clones] [FLAGS of transship move]
set -euo pipefail
cd "$(dirname "$0")/.."

vm=${1:-qemu}
if [ "$vm" != synthetic ]; then
    scripts/setup.sh
fi
cargo build --release --quiet -p transship -p transship-tests --bin transship --bin demo

# Guest memory: gone whatever ends the demo.
memory=/dev/shm
[ -d "$memory" ] || memory=${TMPDIR:-/tmp}
TRANSSHIP_SCRATCH=$(mktemp -d "$memory/transship-demo-XXXXXX")
export TRANSSHIP_SCRATCH
trap 'chattr -R -f -i "$TRANSSHIP_SCRATCH" || true; rm -rf "$TRANSSHIP_SCRATCH"' EXIT
"${CARGO_TARGET_DIR:-target}/release/demo" "$@"
