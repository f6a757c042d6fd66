#!/usr/bin/env bash
# Builds transship for use, and installs it with its manual pages and the completions of bash, zsh and fish.
#
#   scripts/install.sh [PREFIX]      /usr/local if none is named; DESTDIR is put before it, as packagers expect
#   scripts/install.sh --stage DIR   only builds, and puts what a package needs into DIR
set -euo pipefail
cd "$(dirname "$0")/.."

# Where the command is found when it is installed.
bin=/usr/bin
release=${CARGO_TARGET_DIR:-target}/release
# Those that people call, and those that `transship help` lists.
subcommands() { "$release/transship" --help | awk '/^Commands:/ { on = 1; next } on && NF == 0 { exit } on && /^  [a-z]/ { print $1 }'; }

stage() {
    local to=$1 name
    rm -rf "$to"
    mkdir -p "$to/man" "$to/completions" "$to/systemd"
    "$release/transship" man | gzip -9n >"$to/man/transship.1.gz"
    while read -r name; do
        [ "$name" = help ] || "$release/transship" man "$name" | gzip -9n >"$to/man/transship-$name.1.gz"
    done < <(subcommands)
    "$release/transship" completions bash >"$to/completions/transship"
    "$release/transship" completions zsh >"$to/completions/_transship"
    "$release/transship" completions fish >"$to/completions/transship.fish"
    install -m755 "$release/transship" "$to/transship"
    # Names of functions stay, for whoever profiles it; where it was built is nobody's business.
    strip --strip-debug "$to/transship"
    for name in packaging/systemd/*.service; do
        sed "s|/usr/bin/transship|$bin/transship|" "$name" >"$to/systemd/${name##*/}"
    done
}

cargo build --release --locked -p transship
if [ "${1:-}" = --stage ]; then
    stage "${2:?a folder}"
    exit
fi
prefix=${1:-/usr/local}
bin=$prefix/bin
root=${DESTDIR:-}$prefix
staged=$(mktemp -d)
trap 'rm -rf "$staged"' EXIT
stage "$staged/made"
install -Dm755 "$staged/made/transship" "$root/bin/transship"
install -Dm644 -t "$root/share/man/man1" "$staged"/made/man/*
install -Dm644 "$staged/made/completions/transship" "$root/share/bash-completion/completions/transship"
install -Dm644 "$staged/made/completions/_transship" "$root/share/zsh/site-functions/_transship"
install -Dm644 "$staged/made/completions/transship.fish" "$root/share/fish/vendor_completions.d/transship.fish"
install -Dm644 -t "$root/lib/systemd/system" "$staged"/made/systemd/*
echo "install: transship and its manual pages are in $root" >&2
