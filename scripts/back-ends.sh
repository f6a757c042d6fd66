#!/usr/bin/env bash
# Makes a back end of vhost-user devices available in a folder. Installs nothing, needs no root, and does nothing when it is there. It
# comes with its own libraries and loader, all of them Debian's packages, so FOLDER/NAME runs from anywhere.
#
#   scripts/back-ends.sh NAME FOLDER       such as passt .guest/back-ends/passt
#   scripts/back-ends.sh --list            the names that it knows
set -Eeuo pipefail
trap 'echo "back-ends: failed in line $LINENO: $BASH_COMMAND" >&2' ERR
here=$(cd "$(dirname "$0")" && pwd)

# A name, the Debian suites that have it and what it needs, the suite that the packages come from first, the package, and the program
# with its arguments.
back_ends=(
    # One that goes on when its guest has gone.
    "passt|trixie trixie-backports|trixie-backports|passt|usr/bin/passt.avx2"
    # One that ends then.
    "passt-2025|trixie|trixie|passt|usr/bin/passt.avx2"
    "testpmd|bookworm|bookworm|dpdk-dev|usr/bin/dpdk-testpmd -d LIB/dpdk/pmds-23.0/librte_net_vhost.so -d LIB/dpdk/pmds-23.0/librte_mempool_ring.so"
    "virtiofsd|trixie|trixie|virtiofsd|usr/libexec/virtiofsd"
)

say() { echo "back-ends: $*" >&2; }
# shellcheck source=scripts/debian-root.sh
source "$here/debian-root.sh"

main() {
    if [ "${1:-}" = --list ]; then
        printf '%s\n' "${back_ends[@]%%|*}"
        return
    fi
    [ $# = 2 ] || { echo "usage: $0 NAME FOLDER | --list" >&2; exit 2; }
    local name=$1 folder=$2 suites first package program
    find_it "$name" || { say "no back end known that is called $name; there are" "${back_ends[@]%%|*}"; exit 2; }

    take_folder "$folder" "$name"
    if is_complete; then return; fi
    begin_root
    fill_root "$suites" "$first" "$package"
    # What no program reads when it runs is most of it.
    rm -rf "$work"/made/root/usr/{include,share,lib/python3*,lib/x86_64-linux-gnu/*.a}
    # passt may be for processors that this machine has not.
    grep -qw avx2 /proc/cpuinfo || program=${program%.avx2}
    wrap
    finish_root
    say "$name is in $folder"
}

# Sets `suites`, `first`, `package` and `program`.
find_it() {
    local line known
    for line in "${back_ends[@]}"; do
        IFS='|' read -r known suites first package program <<<"$line"
        [ "$known" != "$1" ] || return 0
    done
    return 1
}

wrap() {
    cat >"$work/made/$name" <<WRAPPER
#!/bin/sh
# The program with the loader and libraries that it was unpacked with.
root=\$(dirname "\$(readlink -f "\$0")")/root
lib=\$root/usr/lib/x86_64-linux-gnu
exec "\$root/lib64/ld-linux-x86-64.so.2" --library-path "\$lib:\$lib/blas:\$lib/lapack" "\$root/"${program//LIB/\"\$lib\"} "\$@"
WRAPPER
    chmod 755 "$work/made/$name"
}

main "$@"
