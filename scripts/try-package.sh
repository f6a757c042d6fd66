#!/usr/bin/env bash
# Installs the Debian package in a fresh root of a release of Debian, as a user of it would, and fails where something is missing: what it
# depends on, the command, its manual pages, completions that their shells load. Then removes it, and fails where something is left.
# Needs root, debootstrap and a mirror; builds the package if there is none of this version.
#
#   scripts/try-package.sh [bookworm|trixie ...]     both if none is named: a package runs on the release that it was made on and on newer ones
#
# DEBIAN_MIRROR: another than deb.debian.org. TRANSSHIP_DEB: another package than the one of `make deb`.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "try-package: $*" >&2
    exit 1
}

releases=("$@")
[ ${#releases[@]} -gt 0 ] || releases=(bookworm trixie)
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
[ "$(id -u)" = 0 ] || fail "it needs root, to make another root"
type -P debootstrap >/dev/null || fail "it needs debootstrap: apt install debootstrap"
if [ -z "${TRANSSHIP_DEB:-}" ]; then
    scripts/package.sh
    # shellcheck disable=SC2012 # names that cargo-deb has made
    TRANSSHIP_DEB=$(ls -t "${CARGO_TARGET_DIR:-target}"/debian/transship_*.deb | head -n 1)
fi
[ -f "$TRANSSHIP_DEB" ] || fail "there is no package $TRANSSHIP_DEB"
! dpkg-deb --fsys-tarfile "$TRANSSHIP_DEB" | grep -qaF "$PWD/" || fail "the package names the folder it was built in"

folder=$(mktemp -d "${TMPDIR:-/var/tmp}/transship-root-XXXXXX")
clean() {
    local root
    for root in "$folder"/*; do
        ! mountpoint -q "$root/proc" || umount "$root/proc"
    done
    rm -rf --one-file-system "$folder"
}
trap clean EXIT
trap 'exit 1' INT TERM

# Runs in the new root, with the package as /tmp/transship.deb.
checks() {
    set -euo pipefail
    export DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8
    missing() {
        echo "try-package: $*" >&2
        exit 1
    }
    # What is there besides what packages write down about themselves, and what running programs leave.
    files() { find / -xdev \( -path /proc -o -path /tmp -o -path /run -o -path /var/lib/dpkg -o -path /var/lib/apt -o -path /var/cache -o -path /var/log \) -prune -o -print | sort; }
    quietly() { "$@" >/tmp/output 2>&1 || { cat /tmp/output >&2 && missing "failed: $*"; }; }

    # These are no dependencies of the package: it has something for each of them.
    quietly apt-get update -q
    quietly apt-get install -qy --no-install-recommends man-db bash-completion zsh fish
    files >/tmp/before
    packages=$(dpkg-query -W -f '${Package}\n')

    quietly apt-get install -qy /tmp/transship.deb
    ! ldd /usr/bin/transship | grep "not found" || missing "a library is not there"
    # Into files, since a reader that ends early would end who writes.
    transship --version >/tmp/output
    grep -Eq '^transship [0-9]+\.[0-9]+\.[0-9]+' /tmp/output || missing "transship --version says something else: $(cat /tmp/output)"
    transship --help >/tmp/help
    grep -q '^Commands:' /tmp/help || missing "transship --help has no commands"
    for name in $(awk '/^Commands:/ { on = 1; next } on && NF == 0 { exit } on && /^  [a-z]/ { print $1 }' /tmp/help); do
        page=transship-$name
        [ "$name" != help ] || page=transship
        # The page itself, not merely a file of its name.
        man --warnings "$page" >/tmp/page 2>/tmp/output || missing "man $page: $(cat /tmp/output)"
        grep -q "^N.*A.*M.*E" /tmp/page || missing "man $page shows no page"
        [ ! -s /tmp/output ] || missing "man $page warns: $(cat /tmp/output)"
        # What `bench` calls is in no package.
        [[ $name == help || $name == bench ]] || transship "$name" --help >/dev/null || missing "transship $name --help"
    done
    # As an interactive shell finds it: by name, in the folder of all completions.
    bash -c 'source /usr/share/bash-completion/bash_completion; _completion_loader transship || _comp_load transship; complete -p transship' \
        >/tmp/output 2>&1 || missing "bash has no completion: $(cat /tmp/output)"
    # shellcheck disable=SC2016 # for zsh
    zsh -fc 'autoload -Uz compinit && compinit -u -d /tmp/zcompdump && (( $+_comps[transship] )) && autoload +X _transship' \
        >/tmp/output 2>&1 || missing "zsh has no completion: $(cat /tmp/output)"
    fish --no-execute /usr/share/fish/vendor_completions.d/transship.fish || missing "fish can't read its completion"
    HOME=/tmp fish -c 'complete -C "transship mo"' >/tmp/output
    grep -q '^move' /tmp/output || missing "fish does not complete transship mo"
    for unit in near far; do
        [ -f "/usr/lib/systemd/system/transship-relay-$unit@.service" ] || missing "there is no unit for relays ($unit)"
    done
    for file in README.md CHANGELOG.md copyright docs/architecture.md; do
        [ -e "/usr/share/doc/transship/$file" ] || [ -e "/usr/share/doc/transship/$file.gz" ] || missing "there is no $file"
    done

    quietly apt-get purge -qy transship
    quietly apt-get autoremove -qy --purge
    new=$(comm -13 <(echo "$packages" | sort) <(dpkg-query -W -f '${Package}\n' | sort))
    [ -z "$new" ] || missing "packages stay: $new"
    left=$(comm -13 /tmp/before <(files))
    [ -z "$left" ] || missing "files stay: $left"
}

for release in "${releases[@]}"; do
    root=$folder/$release
    echo "try-package: $release" >&2
    debootstrap --variant=minbase "$release" "$root" "$mirror" >"$folder/log" 2>&1 || { tail -n 20 "$folder/log" >&2 && fail "debootstrap $release"; }
    install -m 644 "$TRANSSHIP_DEB" "$root/tmp/transship.deb"
    mount -t proc proc "$root/proc"
    chroot "$root" /bin/bash -c "$(declare -f checks); checks"
    umount "$root/proc"
    rm -rf --one-file-system "$root"
    echo "try-package: $release: installed, tried, and removed without a trace" >&2
done
