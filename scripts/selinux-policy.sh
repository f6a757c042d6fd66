#!/usr/bin/env bash
# Makes Debian's own policy for SELinux (selinux-policy-default, all of its modules) in a folder, as the file FOLDER/policy: in the form
# that a kernel takes. Installs nothing, needs no root, and does nothing when it is there.
#
#   scripts/selinux-policy.sh FOLDER       such as .guest/selinux
set -Eeuo pipefail
trap 'echo "selinux-policy: failed in line $LINENO: $BASH_COMMAND" >&2' ERR
here=$(cd "$(dirname "$0")" && pwd)

suite=bookworm

say() { echo "selinux-policy: $*" >&2; }
# shellcheck source=scripts/debian-root.sh
source "$here/debian-root.sh"

main() {
    [ $# = 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
    local folder=$1
    type -P bzip2 >/dev/null || refuse "bzip2 is missing: the policy's modules are packed with it"
    take_folder "$folder" "$suite"
    if is_complete; then return; fi
    begin_root
    fill_root "$suite" "$suite" selinux-policy-default policycoreutils secilc
    compile
    # It was wanted for this alone.
    rm -rf "$work/made/root"
    finish_root
    say "Debian's policy ($suite) is in $folder"
}

# As the package's own script does when it is installed, but for the file's place.
compile() {
    local module modules=$work/modules
    mkdir "$modules"
    for module in "$work"/made/root/usr/share/selinux/default/*.pp.bz2; do
        bzip2 -dc "$module" | with_its_libraries libexec/selinux/hll/pp >"$modules/$(basename "$module" .pp.bz2).cil"
    done
    # Its rules were checked against each other when it was packaged.
    with_its_libraries bin/secilc -N -o "$work/made/policy" -f /dev/null "$modules"/*.cil
}

# $1: a program below usr.
with_its_libraries() {
    local program=$1 root=$work/made/root
    shift
    "$root/lib64/ld-linux-x86-64.so.2" --library-path "$root/usr/lib/x86_64-linux-gnu" "$root/usr/$program" "$@"
}

main "$@"
