#!/usr/bin/env bash
# Builds the guests that the tests and the demo start, into .guest/. Does nothing when they are newer than their sources.
#
#   .guest/linux/vmlinuz      a distribution kernel, unpacked from its package
#   .guest/linux/modules/     its drivers for virtio's balloon, disk, network card and file system
#   .guest/linux/vmlinuz-new  one that draws new random numbers when it learns that it is a clone (vmgenid)
#   .guest/linux/modules-new/ its drivers for network cards of its guests (vhost-net)
#   .guest/linux/initrd.img   busybox, these drivers, guest/init and guest/workload.rs with its other files
#   .guest/kvm.elf            guest/kvm.c: a 32-bit program that needs no operating system
set -Eeuo pipefail
trap 'echo "guests: failed in line $LINENO: $BASH_COMMAND" >&2' ERR
cd "$(dirname "$0")/.."

# Drivers, in the order in which they need each other.
drivers=(virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci virtio_balloon virtio_blk failover net_failover virtio_net fuse virtiofs)

new_drivers=(tun tap vhost_iotlb vhost vhost_net)

say() { echo "guests: $*" >&2; }

main() {
    mkdir -p .guest/linux
    # One that was put there by hand may have no modules beside it.
    [ -s .guest/linux/vmlinuz ] && { has_modules || ! type -P apt-get >/dev/null; } || fetch_kernel
    [ -s .guest/linux/vmlinuz-new ] && has_new_modules || fetch_new_kernel
    [ -s .guest/linux/busybox ] || fetch_busybox
    shopt -s nullglob
    initrd_parts=(guest/init guest/workload.rs guest/compile.rs guest/disk.rs guest/net.rs guest/slots.rs scripts/guests.sh .guest/linux/modules/*.ko)
    fresh .guest/linux/initrd.img "${initrd_parts[@]}" || build_initrd
    fresh .guest/kvm.elf guest/kvm.c guest/kvm.ld scripts/guests.sh || build_kvm_guest
}

# Were the modules taken that are wanted now? An older checkout wanted fewer.
has_modules() {
    [ "$(cat .guest/linux/modules/wanted 2>/dev/null)" = "${drivers[*]}" ]
}

has_new_modules() {
    [ "$(cat .guest/linux/modules-new/wanted 2>/dev/null)" = "${new_drivers[*]}" ]
}

# Is the target made from exactly these sources? By content: a checkout gives files new dates.
fresh() {
    local target=$1
    shift
    [ -s "$target" ] && [ "$(cat "$target.made-from" 2>/dev/null)" = "$(sha256sum "$@")" ]
}

made() {
    local target=$1
    shift
    mv "$target.new" "$target"
    sha256sum "$@" >"$target.made-from"
    say "built $target"
}

# The distribution's kernel that is smallest and quickest to boot in a virtual machine.
fetch_kernel() {
    local what="a Linux kernel (a bzImage with a serial console built in) as .guest/linux/vmlinuz" package scratch
    need_apt "$what"
    package=$(known_kernel_package linux-image-cloud-amd64 linux-image-virtual)
    [ -n "$package" ] || put_it_there "$what" "apt knows neither linux-image-cloud-amd64 nor linux-image-virtual"
    scratch=$(mktemp -d -p .guest)
    unpack "$package" "$scratch"
    install -m 644 "$scratch"/boot/vmlinuz-* .guest/linux/vmlinuz.new
    take_modules "$scratch"
    mv .guest/linux/vmlinuz.new .guest/linux/vmlinuz
    rm -r "$scratch"
    say "unpacked the kernel of $package"
}

# Debian 12's own is built without the driver; it has a newer one beside it. Later releases have no need of a second.
fetch_new_kernel() {
    local package scratch
    type -P apt-get >/dev/null || { say "no kernel with vmgenid: one test is left out"; return; }
    package=$(known_kernel_package linux-image-6.12-cloud-amd64 linux-image-cloud-amd64 linux-image-virtual)
    [ -n "$package" ] || { say "no kernel with vmgenid: one test is left out"; return; }
    scratch=$(mktemp -d -p .guest)
    unpack "$package" "$scratch"
    install -m 644 "$scratch"/boot/vmlinuz-* .guest/linux/vmlinuz-new.new
    take_new_modules "$scratch"
    mv .guest/linux/vmlinuz-new.new .guest/linux/vmlinuz-new
    rm -r "$scratch"
    say "unpacked the kernel of $package"
}

# What a kernel has built in, or packed in a way that busybox can't read, is left out.
take_modules() {
    local module found name number=0
    rm -rf .guest/linux/modules.new .guest/linux/modules
    mkdir .guest/linux/modules.new
    for module in "${drivers[@]}"; do
        found=$(find "$1/lib/modules" -name "$module.ko" -print -quit 2>/dev/null || true)
        printf -v name '%02d-%s.ko' $((++number)) "$module"
        [ -z "$found" ] || install -m 644 "$found" ".guest/linux/modules.new/$name"
    done
    echo "${drivers[*]}" >.guest/linux/modules.new/wanted
    mv .guest/linux/modules.new .guest/linux/modules
}

# Packed or not: busybox can unpack what Debian packs.
take_new_modules() {
    local module found number=0
    rm -rf .guest/linux/modules-new
    mkdir .guest/linux/modules-new
    for module in "${new_drivers[@]}"; do
        found=$(find "$1/lib/modules" \( -name "$module.ko" -o -name "$module.ko.xz" \) -print -quit 2>/dev/null || true)
        [ -z "$found" ] || install -m 644 "$found" ".guest/linux/modules-new/$((++number))-${found##*/}"
    done
    echo "${new_drivers[*]}" >.guest/linux/modules-new/wanted
}

# The same, from a list of packages that is fetched first where it is missing.
known_kernel_package() {
    local package
    package=$(kernel_package "$@")
    if [ -z "$package" ]; then
        scripts/apt.sh update || true
        package=$(kernel_package "$@")
    fi
    echo "$package"
}

# The package with the kernel itself, which the first of these that the distribution has depends on.
kernel_package() {
    local newest
    for newest in "$@"; do
        apt-cache depends "$newest" 2>/dev/null || true
    done | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1
}

fetch_busybox() {
    local scratch
    # The one that is installed may be linked dynamically, which is of no use without an operating system.
    if type -P busybox >/dev/null && ! ldd "$(type -P busybox)" >/dev/null 2>&1; then
        cp "$(type -P busybox)" .guest/linux/busybox
        return
    fi
    need_apt "a statically linked busybox (package: busybox-static) as .guest/linux/busybox"
    scratch=$(mktemp -d -p .guest)
    unpack busybox-static "$scratch"
    cp "$(find "$scratch" -type f -path '*/bin/busybox')" .guest/linux/busybox.new
    mv .guest/linux/busybox.new .guest/linux/busybox
    rm -r "$scratch"
}

need_apt() {
    type -P apt-get >/dev/null || put_it_there "$1" "it is fetched only on Debian and Ubuntu"
}

put_it_there() {
    echo "missing: $1: put it there; $2"
    exit 1
}

# A package list that is out of date names files that are gone: then fetch the list first.
unpack() {
    scripts/apt.sh unpack "$1" "$2" 2>/dev/null || { scripts/apt.sh update && scripts/apt.sh unpack "$1" "$2"; }
}

build_initrd() {
    local root
    root=$(mktemp -d -p .guest)
    mkdir -p "$root"/{bin,dev,modules,proc,sys}
    local module
    for module in .guest/linux/modules/*.ko; do cp "$module" "$root/modules"; done
    cp .guest/linux/busybox "$root/bin/busybox"
    install -m 755 guest/init "$root/init"
    rustc --edition 2024 -O -C target-feature=+crt-static -C strip=symbols --deny warnings \
        --target x86_64-unknown-linux-gnu -o "$root/bin/workload" guest/workload.rs
    (cd "$root" && find . | sort | cpio --quiet -o -H newc -R 0:0) | gzip -1 >.guest/linux/initrd.img.new
    rm -r "$root"
    made .guest/linux/initrd.img "${initrd_parts[@]}"
}

build_kvm_guest() {
    # -m32 without the 32-bit libraries: the program uses none. No vector instructions: nobody has switched them on.
    gcc -m32 -march=i686 -mno-sse -mno-mmx -O2 -Wall -Wextra -Werror -ffreestanding -fno-pic -fno-stack-protector \
        -fno-asynchronous-unwind-tables -fcf-protection=none -nostdlib -static -no-pie -Wl,--build-id=none \
        -Wl,--no-warn-rwx-segments -Wl,-T,guest/kvm.ld -o .guest/kvm.elf.new guest/kvm.c
    made .guest/kvm.elf guest/kvm.c guest/kvm.ld scripts/guests.sh
}

main
