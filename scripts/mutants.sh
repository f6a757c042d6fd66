#!/usr/bin/env bash
# Changes one operator or result after the other in the code where one that is wrong loses a page or a guest, and runs the tests of
# its crate: a change that they don't notice ("missed") is a hole in the tests. Those that change nothing are in .cargo/mutants.toml.
#
#   scripts/mutants.sh [memory|wire|engine|guard ...]     flags of cargo-mutants behind --, such as -- --file '*/scan.rs'
#
# What makes it quick: the changes are made in one copy of the tree, whose builds are kept. Most are noticed by the unit tests, which
# are one program to build; only what they miss is tried again with the programs of tests/. What was noticed once is not tried again:
# remove target/mutants/PART to begin anew. Each pass begins with the tests on unchanged code: it ends there if one fails, since that
# one would notice every change.
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
        memory) echo transship-memory crates/memory/src/{tracker,sync_tracker,sweep,pages,window,read,holes,huge_holes,given_back,claims,reach}.rs ;;
        wire) echo transship-wire crates/wire/src/{packet,control,kind,owed}.rs ;;
        engine) echo transship-engine crates/engine/src/{scan,rounds,rounds/running,converging,moving,hand_over,ending,guarded,page_map,forecast,source/switchover,destination/arriving,qemu_peer/send/switchover}.rs ;;
        guard) echo transship crates/cli/src/{guard,commands/guard}.rs ;;
        *) echo "mutants: unknown part $1: memory, wire, engine or guard" >&2; exit 2 ;;
    esac
}

# The programs to try, one pass to a line: those that are quick to build and notice much come first.
passes() {
    case $1 in
        memory) printf '%s\n' --lib '--test=region --test=given_back --test=possible --test=*tracker' '--test=*' ;;
        wire) printf '%s\n' '--test=golden --test=refused --test=properties' '--lib --test=*' ;;
        engine) printf '%s\n' --lib --test=engine ;;
        guard) printf '%s\n' --bins '--test=*' ;;
        *) printf '%s\n' --lib '--test=*' ;;
    esac
}

out=$(realpath -m "${CARGO_TARGET_DIR:-target}/mutants")
unset CARGO_TARGET_DIR
mkdir -p "$out/tree"
find "$out/tree" -mindepth 1 -maxdepth 1 ! -name target -exec rm -rf {} +
# With the times of the files, so that only what has changed is built.
git ls-files -z --cached --others --exclude-standard | { xargs -0 ls -d 2>/dev/null || true; } | tar -c -T - | tar -x -C "$out/tree"
cd "$out/tree"
# But what a run before has changed and built is newer than the file as it was, and would pass for built from that.
for part in memory wire engine guard; do
    # shellcheck disable=SC2046 # paths of this tree, without spaces
    touch $(files "$part" | cut -d ' ' -f 2-)
done

# A loop that a change has made endless may fill the memory before its time is over.
ulimit -v $((16 << 20))

for part in "${parts[@]}"; do
    # shellcheck disable=SC2207 # paths of this tree, without spaces
    wanted=($(files "$part"))
    sources=("${wanted[@]:1}")
    kept=$out/$part/mutants.out
    while read -ra programs; do
        # Tests that never end have noticed it, too.
        [ ! -e "$kept/timeout.txt" ] || cat "$kept/timeout.txt" >>"$kept/caught.txt"
        status=0
        cargo mutants --package "${wanted[0]}" "${sources[@]/#/--file=}" --output "$out/$part" --in-place --iterate \
            --minimum-test-timeout 60 --profile mutants "${programs[@]/#/--cargo-arg=}" "$@" || status=$?
        case $status in
            0 | 2 | 3) ;; # none missed, some missed, some never ended
            *) exit "$status" ;;
        esac
    done < <(passes "$part")
done

# Of the last pass, which has tried what all others have missed.
missed=("${parts[@]/#/$out/}")
missed=("${missed[@]/%//mutants.out/missed.txt}")
cat "${missed[@]}"
[ -z "$(cat "${missed[@]}")" ]
