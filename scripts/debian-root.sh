# For scripts that make a program of another version available in a folder, out of Debian's packages, without installing it. They
# have `here` (the folder of the scripts) and `say`.
# shellcheck shell=bash

refuse() { say "$*"; exit 1; }

# Takes the folder $1 for this process alone; version $2 is to be in it. Sets `folder` to its whole path.
take_folder() {
    mkdir -p "$(dirname "$1")"
    # apt takes relative paths for relative to others.
    folder=$(realpath "$1")
    # Written last: what was cut short is fetched again.
    mark="$2 $(cat "$0" "$here/debian-root.sh" | sha256sum)"
    # Two at once would fetch it twice.
    exec 9>"$folder.lock"
    flock 9
}

# What is there is that version, and complete.
is_complete() {
    [ "$(cat "$folder/.complete" 2>/dev/null)" = "$mark" ]
}

# Sets `work` to a folder of our own. What is to be kept goes to $work/made.
begin_root() {
    check_tools
    find_mirror
    work=$(mktemp -d "$folder.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    # apt drops its rights to download, and may then not write into a root-only folder.
    chmod 755 "$work"
}

# What is in $work/made is complete.
finish_root() {
    echo "$mark" >"$work/made/.complete"
    rm -rf "$folder"
    mv "$work/made" "$folder"
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

# Downloads packages and unpacks them, with all that belongs to them: to $work/made/root. Apt has lists of its own here, as if nothing
# were installed: so the C library comes too.
fill_root() {
    local suites=$1 first=$2
    shift 2
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
    APT_CONFIG=$work/apt/apt.conf "$here/apt.sh" install --download-only "$@"
    local package root=$work/made/root
    # A distribution whose /bin is /usr/bin expects these links before its packages come.
    mkdir -p "$root"/usr/{bin,sbin,lib,lib64}
    ln -s usr/bin usr/sbin usr/lib usr/lib64 "$root"
    for package in "$work"/apt/cache/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -x -C "$root" --keep-directory-symlink --no-same-owner
    done
}
