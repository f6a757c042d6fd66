#!/usr/bin/env bash
# Makes the machine ready for the tests and the demo: QEMU, a few tools, and the guests that they start.
# Quick when nothing is missing. Installs on Debian and Ubuntu as root; elsewhere it names what is missing.
#
#   scripts/setup.sh            install what is missing, build the guest images
#   scripts/setup.sh --check    install nothing: exit 1 and name what is missing
set -Eeuo pipefail
trap 'echo "setup: failed in line $LINENO: $BASH_COMMAND" >&2' ERR
cd "$(dirname "$0")/.."

# What is needed: a command, the Debian package that brings it, what it is for.
needs=(
    "qemu-system-x86_64|qemu-system-x86|runs the guests; version 9 or newer"
    "gcc|gcc libc6-dev|links the guest programs"
    "g++|g++|builds the fuzzer's engine"
    "pkg-config|pkg-config|finds ISA-L for the build"
    "make|make|runs the project's commands"
    "cpio|cpio|packs the Linux guest's initial file system"
    "ip|iproute2|slow links between network namespaces"
    "tc|iproute2|slow links between network namespaces"
    "libvirtd|libvirt-daemon-system|domains of libvirt that are saved while they run"
    "virsh|libvirt-clients|speaks to libvirt in the tests"
    "socat|socat|talks to a guest's serial port by hand; comes to sockets as somebody else"
    "openssl|openssl|speaks TLS with transship, as others do"
    "gnutls-cli|gnutls-bin|the same"
    "age|age|encrypts and decrypts snapshots, as others do"
    "prlimit|util-linux|runs commands with other limits and users"
    "qemu-img|qemu-utils|makes the disks of clones, and has vhost-user ones"
    "chattr|e2fsprogs|lets go of images"
)

check_only=no
case "${1:-}" in
    "") ;;
    --check) check_only=yes ;;
    *) echo "setup: unknown option $1: it knows only --check" >&2; exit 2 ;;
esac

say() { echo "setup: $*" >&2; }

main() {
    mkdir -p .guest
    # Two at once would unpack over each other.
    exec 9>.guest/lock
    flock 9

    find_missing
    if [ ${#missing[@]} -gt 0 ]; then
        if [ "$check_only" = yes ] || ! can_install; then
            name_missing
            exit 1
        fi
        install_missing
        find_missing
        if [ ${#missing[@]} -gt 0 ]; then
            name_missing
            exit 1
        fi
    fi
    warn_about_an_old_qemu
    if [ "$check_only" = no ]; then
        scripts/guests.sh
    fi
}

# Fills `missing` (lines of `needs`) and `packages`.
find_missing() {
    missing=()
    packages=()
    local need command package
    for need in "${needs[@]}"; do
        IFS='|' read -r command package _ <<<"$need"
        if ! PATH="$PATH:/usr/sbin:/sbin" type -P "$command" >/dev/null; then
            missing+=("$need")
            # shellcheck disable=SC2206 # a need may name several packages
            packages+=($package)
        fi
    done
    if ! pkg-config --exists libisal 2>/dev/null; then
        missing+=("ISA-L's headers|libisal-dev (Fedora: isa-l-devel)|compresses as zlib and qatzip")
        packages+=(libisal-dev)
    fi
    if type -P rustc >/dev/null; then
        return
    fi
    missing+=("rustc|rustup, or rustc and cargo|builds everything; https://www.rust-lang.org/tools/install")
}

name_missing() {
    local need command package why
    for need in "${missing[@]}"; do
        IFS='|' read -r command package why <<<"$need"
        echo "missing: $command (package: $package): $why"
    done
    for image in linux/vmlinuz linux/initrd.img kvm.elf; do
        [ -e ".guest/$image" ] || echo "missing: .guest/$image: scripts/setup.sh makes it once the rest is there"
    done
    if [ "$check_only" = no ]; then
        echo "Install these and run it again; as root on Debian or Ubuntu it does so itself."
    fi
}

can_install() {
    [ "$(id -u)" = 0 ] && type -P apt-get >/dev/null
}

install_missing() {
    if [ ${#packages[@]} -eq 0 ]; then
        return
    fi
    say "installing ${packages[*]}"
    scripts/apt.sh update
    local from=()
    if [[ " ${packages[*]} " == *" qemu-system-x86 "* ]] && is_debian bookworm; then
        add_backports
        from=(--target-release bookworm-backports)
    fi
    scripts/apt.sh install "${from[@]}" "${packages[@]}"
}

is_debian() {
    # shellcheck disable=SC1091
    (. /etc/os-release && [ "$ID" = debian ] && [ "${VERSION_CODENAME:-}" = "$1" ])
}

# Debian 12 has QEMU 7.2; its backports have 10. They come from where the machine gets Debian itself.
add_backports() {
    local targets uri keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    targets=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' 'Component: main')
    if grep -q '^bookworm-backports ' <<<"$targets"; then
        return
    fi
    read -r _ uri < <(grep '^bookworm ' <<<"$targets") || true
    if [ -z "${uri:-}" ]; then
        echo "missing: QEMU 9 or newer: no apt source of this machine has Debian bookworm, whose backports have it; add bookworm-backports" >&2
        exit 1
    fi
    {
        echo "Types: deb"
        echo "URIs: $uri"
        echo "Suites: bookworm-backports"
        echo "Components: main"
        [ ! -e "$keyring" ] || echo "Signed-By: $keyring"
    } >/etc/apt/sources.list.d/transship-backports.sources
    scripts/apt.sh update
}

warn_about_an_old_qemu() {
    local version
    version=$(dpkg-query -W -f '${Version}' qemu-system-x86 2>/dev/null || qemu-system-x86_64 --version | sed -n 's/.*version \([0-9.]*\).*/\1/p')
    version=${version#*:}
    if [ "${version%%.*}" -lt 9 ]; then
        say "QEMU $version is older than 9, which is what this project is tested with; some tests may fail"
    fi
}

main
