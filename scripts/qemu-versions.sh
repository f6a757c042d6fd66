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
refuse() { say "$*"; exit 1; }

main() {
    if [ "${1:-}" = --list ]; then
        printf '%s\n' "${versions[@]%%|*}"
        return
    fi
    [ $# = 2 ] || { echo "usage: $0 VERSION FOLDER | --list" >&2; exit 2; }
    local wanted=$1 folder=$2 suites first
    find_suites "$wanted" || { say "no suite known that has QEMU $wanted; there are" "${versions[@]%%|*}"; exit 2; }

    mkdir -p "$(dirname "$folder")"
    # apt takes relative paths for relative to others.
    folder=$(realpath "$folder")
    # Two at once would fetch it twice.
    exec 9>"$folder.lock"
    flock 9
    # Written last: what was cut short is fetched again.
    [ "$(cat "$folder/.complete" 2>/dev/null)" != "$wanted $(sha256sum <"$0")" ] || return 0

    check_tools
    find_mirror
    work=$(mktemp -d "$folder.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    # apt drops its rights to download, and may then not write into a root-only folder.
    chmod 755 "$work"
    download "$suites" "$first"
    unpack "$folder"
    check_version "$wanted"
    echo "$wanted $(sha256sum <"$0")" >"$work/made/.complete"
    rm -rf "$folder"
    mv "$work/made" "$folder"
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

check_tools() {
    local tool
    for tool in apt-get dpkg dpkg-deb flock; do
        type -P "$tool" >/dev/null || refuse "$tool is missing: this works on Debian and Ubuntu"
    done
    [ "$(dpkg --print-architecture)" = amd64 ] || refuse "the packages are for amd64"
}

# Where the machine gets Debian itself, if it is one.
find_mirror() {
    mirror=${DEBIAN_MIRROR:-}
    [ -n "$mirror" ] || mirror=$(apt-get indextargets --format '$(ORIGIN) $(SUITE) $(REPO_URI)' 'Created-By: Packages' 'Component: main' \
        2>/dev/null | awk '$1 == "Debian" && $3 ~ /\/debian\/?$/ { print $3; exit }') || true
    [ -n "$mirror" ] || refuse "no Debian mirror known; name one: DEBIAN_MIRROR=URL"
    keyring=${DEBIAN_KEYRING:-/usr/share/keyrings/debian-archive-keyring.gpg}
    [ -e "$keyring" ] || refuse "$keyring is missing: install debian-archive-keyring, or name another: DEBIAN_KEYRING=FILE"
}

# Has apt find out what belongs to it, with lists of its own and as if nothing were installed: so the C library comes too.
download() {
    local suites=$1 first=$2
    mkdir -p "$work/apt"/{lists/partial,cache/archives/partial,etc}
    : >"$work/apt/status"
    {
        echo "Types: deb"
        echo "URIs: $mirror"
        echo "Suites: $suites"
        echo "Components: main"
        echo "Signed-By: $keyring"
    } >"$work/apt/etc/debian.sources"
    # In a file that apt reads before all others: those of the machine are not for these suites.
    cat >"$work/apt/apt.conf" <<CONF
Dir::State "$work/apt";
Dir::State::lists "$work/apt/lists";
Dir::State::status "$work/apt/status";
Dir::Cache "$work/apt/cache";
Dir::Etc::sourcelist "$work/apt/etc/debian.sources";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Sandbox::User "$(id -un)";
APT::Architecture "amd64";
APT::Architectures "amd64";
APT::Default-Release "$first";
Acquire::Languages "none";
CONF
    APT_CONFIG=$work/apt/apt.conf "$here/apt.sh" update
    APT_CONFIG=$work/apt/apt.conf "$here/apt.sh" install --download-only qemu-system-x86
}

unpack() {
    local package root=$work/made/root
    # A distribution whose /bin is /usr/bin expects these links before its packages come.
    mkdir -p "$root"/usr/{bin,sbin,lib,lib64}
    ln -s usr/bin usr/sbin usr/lib usr/lib64 "$root"
    for package in "$work"/apt/cache/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -x -C "$root" --keep-directory-symlink --no-same-owner
    done
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
