#!/usr/bin/env bash
# apt-get without questions, which waits when another apt is at work.
#
#   scripts/apt.sh update
#   scripts/apt.sh install [--target-release SUITE] PACKAGE...
#   scripts/apt.sh unpack PACKAGE DIR     download a package and unpack it; installs nothing, needs no root
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive
options=(-q -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)

# The lock timeout holds for dpkg's lock, not for that of the package lists: try again while somebody has those.
patiently() {
    local output attempt
    for attempt in $(seq 60); do
        if output=$("$@" 2>&1 </dev/null); then
            return 0
        fi
        if [[ "$output" != *"Could not get lock"* && "$output" != *"Unable to lock"* ]]; then
            break
        fi
        [ "$attempt" -gt 1 ] || echo "apt: another apt is at work, waiting" >&2
        sleep 5
    done
    echo "$output" >&2
    echo "apt: failed: $*" >&2
    return 1
}

unpack() {
    local package=$1 into=$2 scratch
    scratch=$(mktemp -d)
    # apt drops its rights to download, and may then not write into a root-only folder.
    chmod 755 "$scratch"
    (cd "$scratch" && patiently apt-get "${options[@]}" -o APT::Sandbox::User="$(id -un)" download "$package")
    mkdir -p "$into"
    dpkg-deb -x "$scratch"/*.deb "$into"
    rm -r "$scratch"
}

case "${1:-}" in
    update) patiently apt-get "${options[@]}" update ;;
    install) shift; patiently apt-get "${options[@]}" install --no-install-recommends "$@" ;;
    unpack) unpack "$2" "$3" ;;
    *) echo "usage: scripts/apt.sh update | install PACKAGE... | unpack PACKAGE DIR" >&2; exit 2 ;;
esac
