#!/usr/bin/env bash
# Makes a stock QEMU of another version available in a folder, beside the one that is installed. Installs nothing, needs no root, and
# does nothing when that version is there. It comes with its own libraries, loader and firmware, all of them Debian's packages, so
# FOLDER/qemu-system-x86_64 runs from anywhere, and on a machine with older libraries too.
#
#   scripts/qemu-versions.sh VERSION FOLDER       such as 7.2 .guest/qemu-7.2
#   scripts/qemu-versions.sh --list               the versions that it knows
set -Eeuo pipefail
trap 'echo "qemu-versions: failed in line $LINENO: $BASH_COMMAND" >&2' ERR
here=$(cd "$(dirname "$0")" && pwd)

# A version, the Debian suites that have it and what it needs, and the suite that the packages come from first.
versions=(
    "7.2|bookworm|bookworm"
    "10.0|trixie|trixie"
    "11.1|trixie trixie-backports|trixie-backports"
)

say() { echo "qemu-versions: $*" >&2; }
# shellcheck source=scripts/debian-root.sh
source "$here/debian-root.sh"

main() {
    if [ "${1:-}" = --list ]; then
        printf '%s\n' "${versions[@]%%|*}"
        return
    fi
    [ $# = 2 ] || { echo "usage: $0 VERSION FOLDER | --list" >&2; exit 2; }
    local wanted=$1 folder=$2 suites first
    find_suites "$wanted" || { say "no suite known that has QEMU $wanted; there are" "${versions[@]%%|*}"; exit 2; }

    take_folder "$folder" "$wanted"
    if is_complete; then return; fi
    begin_root
    fill_root "$suites" "$first" qemu-system-x86
    wrap
    check_version "$wanted"
    finish_root
    say "QEMU $wanted is in $folder"
}

# Sets `suites` and `first`.
find_suites() {
    local line version
    for line in "${versions[@]}"; do
        IFS='|' read -r version suites first <<<"$line"
        [ "$version" != "$1" ] || return 0
    done
    return 1
}

wrap() {
    cat >"$work/made/qemu-system-x86_64" <<'WRAPPER'
#!/bin/sh
# QEMU with the loader, libraries and firmware that it was unpacked with.
root=$(dirname "$(readlink -f "$0")")/root
lib=$root/usr/lib/x86_64-linux-gnu
export QEMU_MODULE_DIR="$lib/qemu"
exec "$root/lib64/ld-linux-x86-64.so.2" --library-path "$lib:$lib/blas:$lib/lapack:$lib/pulseaudio" --argv0 qemu-system-x86_64 \
    "$root/usr/bin/qemu-system-x86_64" -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" -L "$root/usr/lib/ipxe/qemu" "$@"
WRAPPER
    chmod 755 "$work/made/qemu-system-x86_64"
}

# A suite moves on, backports do so often: a name that lies would be worse than none.
check_version() {
    local is
    is=$("$work/made/qemu-system-x86_64" --version | sed -n '1s/.*version \([0-9]*\.[0-9]*\).*/\1/p')
    [ "$is" = "$1" ] || refuse "the mirror has QEMU $is by now where $1 was; see the table in this script"
}

main "$@"
