#!/usr/bin/env bash
# Checks that the oldest Rust that the README promises (rust-version in Cargo.toml) compiles everything but the tests.
# rustup installs that version if it can. Without it this says so, and succeeds; with TRANSSHIP_TESTS_COMPLETE=1 it fails.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
[[ $version == *.*.* ]] || version=$version.0
not_checked() {
    echo "msrv: $1: not checked" >&2
    [ -z "${TRANSSHIP_TESTS_COMPLETE:-}" ] || exit 1
    exit 0
}
type -P rustup >/dev/null || not_checked "without rustup Rust $version can't be had"
if ! rustup run "$version" rustc --version >/dev/null 2>&1 && ! rustup toolchain install "$version" --profile minimal; then
    not_checked "rustup can't install Rust $version"
fi
cargo "+$version" check --workspace --locked --target-dir "${CARGO_TARGET_DIR:-target}/msrv"
