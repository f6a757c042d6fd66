#!/usr/bin/env bash
# Changes one operator or result after the other in the code where one that is wrong loses a page or a guest, and runs the tests of
# its crate: a change that they don't notice ("missed") is a hole in the tests. Hours; each part can be run alone.
#
#   scripts/mutants.sh [memory|wire|engine|guard ...]     flags of cargo-mutants behind --, such as -- --shard 0/4
set -euo pipefail
cd "$(dirname "$0")/.."

parts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    parts+=("$1")
    shift
done
[ "${1:-}" != -- ] || shift
[ ${#parts[@]} -gt 0 ] || parts=(memory wire engine guard)

if ! cargo mutants --version >/dev/null 2>&1; then
    cargo install cargo-mutants --locked
fi

# The package, and then its files.
files() {
    case $1 in
        memory) echo transship-memory crates/memory/src/{tracker,sweep,pages,holes,claims}.rs ;;
        wire) echo transship-wire crates/wire/src/{packet,control,kind}.rs ;;
        engine) echo transship-engine crates/engine/src/{scan,rounds,hand_over,ending,guarded,page_map,forecast,source/switchover,destination/place,qemu_peer/send/switchover}.rs ;;
        guard) echo transship crates/cli/src/{guard,commands/guard}.rs ;;
        *) echo "mutants: unknown part $1: memory, wire, engine or guard" >&2; exit 2 ;;
    esac
}

failed=
for part in "${parts[@]}"; do
    # shellcheck disable=SC2207 # paths of this tree, without spaces
    wanted=($(files "$part"))
    sources=("${wanted[@]:1}")
    cargo mutants --package "${wanted[0]}" "${sources[@]/#/--file=}" --output "${CARGO_TARGET_DIR:-target}/mutants/$part" "$@" || failed=1
done
[ -z "$failed" ]
