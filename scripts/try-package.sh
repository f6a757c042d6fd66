#!/usr/bin/env bash
# Installs the Debian package in a fresh root of a release of Debian, as a user of it would, and fails where something is missing: what it
# depends on, the command, its manual pages, completions that their shells load, the relays' units under a systemd of that root. Then
# removes it, and fails where something is left. Needs root, debootstrap, systemd-nspawn and a mirror; builds the package if none is named.
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
type -P systemd-nspawn >/dev/null || fail "it needs systemd-nspawn: apt install systemd-container"
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

# The following run in the new root.
common() {
    set -euo pipefail
    export DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8
    missing() {
        echo "try-package: $*" >&2
        exit 1
    }
    # What is there besides what packages write down about themselves, and what running programs leave.
    files() { find / -xdev \( -path /proc -o -path /tmp -o -path /run -o -path /var/lib/dpkg -o -path /var/lib/apt -o -path /var/cache -o -path /var/log \) -prune -o -print | sort; }
    packages() { dpkg-query -W -f '${Package}\n' | sort; }
    quietly() { "$@" >/tmp/output 2>&1 || { cat /tmp/output >&2 && missing "failed: $*"; }; }
}

# With the package as /tmp/transship.deb.
installed() {
    # These are no dependencies of the package: it has something for each of them.
    quietly apt-get update -q
    quietly apt-get install -qy --no-install-recommends man-db bash-completion zsh fish systemd systemd-sysv dbus
    files >/tmp/before
    packages >/tmp/packages

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
}

# As the first thing that its systemd starts, before /try/relays.sh ends it.
relays() {
    mkdir -p /etc/transship
    printf 'LISTEN=relay:tcp:127.0.0.1:4445\nTO=unix:/run/transship/far.sock\nOPTIONS=--insecure\n' >/etc/transship/relay-far-try.conf
    printf 'LISTEN=unix:/run/transship/near.sock\nTO=relay:tcp:127.0.0.1:4445\nOPTIONS=--insecure --socket-mode 0660\n' >/etc/transship/relay-near-try.conf
    units="transship-relay-far@try transship-relay-near@try"
    # shellcheck disable=SC2086 # two words
    quietly systemctl enable --now $units
    listening() {
        for _ in $(seq 100); do
            ! systemctl is-active --quiet transship-relay-near@try || [ "$(stat -c %a /run/transship/near.sock 2>/dev/null)" != 660 ] || return 0
            sleep 0.1
        done
        journalctl -u transship-relay-near@try --no-pager >&2
        missing "the relay near the source does not listen $*"
    }
    listening "after its start"
    before=$(systemctl show -p MainPID --value transship-relay-near@try)
    rm /run/transship/near.sock
    kill -9 "$before"
    listening "after it was killed"
    # shellcheck disable=SC2086 # two words
    quietly systemctl stop $units
    # shellcheck disable=SC2086 # two words
    ! systemctl is-failed $units >/tmp/output || missing "a relay did not end as it should: $(cat /tmp/output)"
    [ ! -e /run/transship/near.sock ] || missing "a relay that was stopped leaves its socket"
    echo "try-package: the relays have run"
}

removed() {
    quietly apt-get purge -qy transship
    quietly apt-get autoremove -qy --purge
    new=$(comm -13 /tmp/packages <(packages))
    [ -z "$new" ] || missing "packages stay: $new"
    left=$(comm -13 /tmp/before <(files))
    [ -z "$left" ] || missing "files stay: $left"
}

# Boots the root with its own systemd, which runs `relays`; what that writes to the root is not kept.
boot() {
    mkdir -p "$folder/try"
    printf '%s\n' "$(declare -f common relays)" "common" "relays" >"$folder/try/relays.sh"
    cat >"$folder/try/relays.service" <<'UNIT'
[Service]
ExecStart=/bin/bash /try/relays.sh
ExecStopPost=/bin/systemctl poweroff --force
StandardOutput=journal+console
StandardError=journal+console
UNIT
    # Without a terminal it would be asked for a name and a password.
    timeout 180 systemd-nspawn -D "$1" --volatile=overlay --private-network --register=no --keep-unit -M transship-try \
        --bind-ro="$folder/try:/try" --bind-ro="$folder/try/relays.service:/etc/systemd/system/relays.service" \
        -b systemd.wants=relays.service systemd.unit=multi-user.target systemd.firstboot=no </dev/null >"$folder/log" 2>&1 || true
    grep -q "try-package: the relays have run" "$folder/log" || { tail -n 40 "$folder/log" >&2 && fail "the units of the relays"; }
}

for release in "${releases[@]}"; do
    root=$folder/$release
    echo "try-package: $release" >&2
    debootstrap --variant=minbase "$release" "$root" "$mirror" >"$folder/log" 2>&1 || { tail -n 20 "$folder/log" >&2 && fail "debootstrap $release"; }
    install -m 644 "$TRANSSHIP_DEB" "$root/tmp/transship.deb"
    mount -t proc proc "$root/proc"
    chroot "$root" /bin/bash -c "$(declare -f common installed); common; installed"
    umount "$root/proc"
    boot "$root"
    mount -t proc proc "$root/proc"
    chroot "$root" /bin/bash -c "$(declare -f common removed); common; removed"
    umount "$root/proc"
    rm -rf --one-file-system "$root"
    echo "try-package: $release: installed, tried, and removed without a trace" >&2
done
