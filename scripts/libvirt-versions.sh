#!/usr/bin/env bash
# Makes libvirtd and virsh of another version available in a folder, beside those that are installed. Installs nothing, needs no root,
# and does nothing when that version is there. They come with their own libraries and loader, all of them Debian's packages. The QEMU
# and the configuration are the machine's own. What libvirtd loads by itself (usr/lib/*/libvirt, usr/share/libvirt) is in FOLDER/root:
# to be mounted where it looks for it, in a namespace of its own.
#
#   scripts/libvirt-versions.sh VERSION FOLDER       such as 9.0 .guest/libvirts/9.0
#   scripts/libvirt-versions.sh --list               the versions that it knows
set -Eeuo pipefail
trap 'echo "libvirt-versions: failed in line $LINENO: $BASH_COMMAND" >&2' ERR
here=$(cd "$(dirname "$0")" && pwd)

# A version, and the Debian suite that has it.
versions=(
    "9.0|bookworm"
    "11.3|trixie"
)

say() { echo "libvirt-versions: $*" >&2; }
# shellcheck source=scripts/debian-root.sh
source "$here/debian-root.sh"

main() {
    if [ "${1:-}" = --list ]; then
        printf '%s\n' "${versions[@]%%|*}"
        return
    fi
    [ $# = 2 ] || { echo "usage: $0 VERSION FOLDER | --list" >&2; exit 2; }
    local wanted=$1 folder=$2 suite
    find_suite "$wanted" || { say "no suite known that has libvirt $wanted; there are" "${versions[@]%%|*}"; exit 2; }
    take_folder "$folder" "$wanted"
    if is_complete; then return; fi
    begin_root
    fill_root "$suite" "$suite" libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients
    wrap libvirtd sbin
    wrap virsh bin
    check_version "$wanted"
    finish_root
    say "libvirt $wanted is in $folder"
}

# Sets `suite`.
find_suite() {
    local line version
    for line in "${versions[@]}"; do
        IFS='|' read -r version suite <<<"$line"
        [ "$version" != "$1" ] || return 0
    done
    return 1
}

# $1: a program; $2: its folder below usr.
wrap() {
    cat >"$work/made/$1" <<WRAPPER
#!/bin/sh
# $1 with the loader and the libraries that it was unpacked with.
root=\$(dirname "\$(readlink -f "\$0")")/root
lib=\$root/usr/lib/x86_64-linux-gnu
exec "\$root/lib64/ld-linux-x86-64.so.2" --library-path "\$lib" --argv0 $1 "\$root/usr/$2/$1" "\$@"
WRAPPER
    chmod 755 "$work/made/$1"
}

# A suite moves on: a name that lies would be worse than none.
check_version() {
    local is
    is=$("$work/made/virsh" --version | sed -n '1s/^\([0-9]*\.[0-9]*\)\..*/\1/p')
    [ "$is" = "$1" ] || refuse "the mirror has libvirt $is by now where $1 was; see the table in this script"
}

main "$@"
