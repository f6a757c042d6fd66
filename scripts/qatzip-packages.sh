#!/usr/bin/env bash
# Unpacks Intel's QATzip library and command of Debian 13, and the libraries they need, into a folder. Installs nothing, and does
# nothing when they are there. The codec's tests compare with them when TRANSSHIP_QATZIP_PACKAGES names the folder.
#
#   scripts/qatzip-packages.sh DIR
set -euo pipefail

[ $# = 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
wanted=(libqatzip3 qatzip libqat4 libusdm0 libc6 libssl3t64 liblz4-1 libnuma1 zlib1g libzstd1)

# Written last: what was cut short is fetched again.
[ "$(cat "$1/.complete" 2>/dev/null)" != "${wanted[*]}" ] || exit 0

for tool in curl xz dpkg; do
    command -v "$tool" >/dev/null || { echo "qatzip-packages: $tool is missing" >&2; exit 1; }
done
[ "$(dpkg --print-architecture)" = amd64 ] || { echo "qatzip-packages: they are for amd64" >&2; exit 1; }

# From where the machine gets Debian itself, if it is one.
mirror=${DEBIAN_MIRROR:-}
[ -n "$mirror" ] || mirror=$(apt-get indextargets --format '$(ORIGIN) $(SUITE) $(REPO_URI)' 'Created-By: Packages' 'Component: main' \
    2>/dev/null | awk '$1 == "Debian" && $3 ~ /\/debian\/?$/ { print $3; exit }') || true
[ -n "$mirror" ] || { echo "qatzip-packages: no Debian mirror known; name one: DEBIAN_MIRROR=URL" >&2; exit 1; }

# A machine without a network is told so soon.
fetch() {
    curl -fsS --connect-timeout 10 --speed-limit 1000 --speed-time 20 -o "$2" "${mirror%/}/$1"
}

mkdir -p "$(dirname "$1")"
work=$(mktemp -d "$1.XXXXXX")
trap 'rm -rf "$work"' EXIT

fetch dists/trixie/main/binary-amd64/Packages.xz "$work/Packages.xz"
xz -dc "$work/Packages.xz" >"$work/Packages"
for package in "${wanted[@]}"; do
    # Each package's paragraph begins with its name; the checksum is that of the index.
    read -r path sum < <(awk -v name="$package" '
        /^Package: / { here = ($2 == name) }
        here && /^Filename: / { path = $2 }
        here && /^SHA256: / { print path, $2; exit }' "$work/Packages") ||
        { echo "qatzip-packages: $mirror has no $package for trixie" >&2; exit 1; }
    fetch "$path" "$work/package.deb"
    echo "$sum  $work/package.deb" | sha256sum --quiet --check
    dpkg -x "$work/package.deb" "$work/root"
done
echo "${wanted[*]}" >"$work/root/.complete"
rm -rf "$1"
mv "$work/root" "$1"
echo "qatzip-packages: unpacked into $1" >&2
