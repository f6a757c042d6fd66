#!/bin/sh
# Builds the fuzz targets and runs each for SECONDS (20 when not given). Fails when one crashes; its input is then in
# fuzz/artifacts/TARGET. Needs a C++ compiler, and no nightly Rust: the coverage counters come from LLVM's own pass.
#
#   scripts/fuzz.sh [SECONDS [TARGET...]]
set -eu
cd "$(dirname "$0")/../fuzz"

seconds=${1:-20}
case $seconds in
'' | *[!0-9]* | 0)
    echo "fuzz.sh: SECONDS is \"$seconds\", not a whole number of seconds above 0" >&2
    exit 2
    ;;
esac
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- preamble packet control_message encoded_packet \
    qemu_stream qemu_blocks qemu_tail qemu_multifd qemu_reply qemu_xbzrle relay_link

built=${CARGO_TARGET_DIR:-target}
host=$(rustc -vV | sed -n 's/^host: //p')
# The same instrumentation as cargo-fuzz's with --sanitizer none. Given --target, cargo keeps it away from build scripts.
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares" \
    cargo build --quiet --release --locked --target "$host"

failed=
for target in "$@"; do
    corpus=corpus/$target
    artifacts=artifacts/$target
    log=$built/$target.log
    mkdir -p "$corpus" "$artifacts"
    if "$built/$host/release/$target" "$corpus" "seeds/$target" -max_total_time="$seconds" \
        -timeout=10 -rss_limit_mb=512 -max_len=65536 -use_value_profile=1 -artifact_prefix="$artifacts/" >"$log" 2>&1; then
        echo "$target: $(sed -n 's/^Done \(.*\)/\1/p' "$log"), $(find "$corpus" -type f | wc -l) inputs in the corpus"
    else
        tail -n 40 "$log" >&2
        echo "$target: failed; run it again on the input in fuzz/$artifacts" >&2
        failed=1
    fi
done
[ -z "$failed" ]
