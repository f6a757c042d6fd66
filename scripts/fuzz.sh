#!/usr/bin/env bash
# Builds the fuzz targets and runs each for SECONDS (20 when not given). At the end there is a table of what each has reached. Fails when
# one crashes; its input is then in fuzz/artifacts/TARGET. Needs a C++ compiler, and no nightly Rust: the coverage counters come from LLVM's own pass.
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
    qemu_stream qemu_blocks qemu_tail qemu_multifd qemu_reply qemu_xbzrle relay_link libvirt_image trust

built=${CARGO_TARGET_DIR:-target}
host=$(rustc -vV | sed -n 's/^host: //p')
# The same instrumentation as cargo-fuzz's with --sanitizer none. Given --target, cargo keeps it away from build scripts.
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares" \
    cargo build --quiet --release --locked --target "$host"

# What a target's log ends with: edges of the program and values compared (libFuzzer's cov and ft).
reached() {
    local target=$1 log=$2 cpu=$3 executions edges features
    executions=$(sed -n 's/^Done \([0-9]*\) runs.*/\1/p' "$log")
    read -r edges features < <(sed -n 's/^#.* cov: \([0-9]*\) ft: \([0-9]*\) .*/\1 \2/p' "$log" | tail -n 1) || true
    printf '| %s | %s | %s | %s | %s | %s |\n' "$target" "${executions:-0}" "${edges:-0}" "${features:-0}" "$cpu" \
        "$(find "corpus/$target" -type f | wc -l)"
}

failed=
table=
TIMEFORMAT='%U %S'
for target in "$@"; do
    corpus=corpus/$target
    artifacts=artifacts/$target
    log=$built/$target.log
    mkdir -p "$corpus" "$artifacts"
    if { time "$built/$host/release/$target" "$corpus" "seeds/$target" -max_total_time="$seconds" \
        -timeout=10 -rss_limit_mb=512 -max_len=65536 -use_value_profile=1 -artifact_prefix="$artifacts/" \
        >"$log" 2>&1; } 2>"$built/$target.time"; then
        echo "$target: $(sed -n 's/^Done \(.*\)/\1/p' "$log")"
    else
        tail -n 40 "$log" >&2
        echo "$target: failed; run it again on the input in fuzz/$artifacts" >&2
        failed=1
    fi
    table+=$(reached "$target" "$log" "$(awk '{ printf "%.1f", $1 + $2 }' "$built/$target.time")")$'\n'
done
printf '\n| target | executions | edges | features | CPU s | inputs in the corpus |\n| --- | ---: | ---: | ---: | ---: | ---: |\n%s' "$table"
[ -z "$failed" ]
