#!/usr/bin/env bash
# Makes a Debian package of transship: target/debian/transship_VERSION_ARCH.deb. It runs on the Debian that it was made on, and on newer ones.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! cargo deb --version >/dev/null 2>&1; then
    cargo install cargo-deb --locked
fi
scripts/install.sh --stage target/package
cargo deb --locked --no-build -p transship
