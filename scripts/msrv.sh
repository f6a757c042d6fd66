#!/usr/bin/env bash
# Checks that the oldest Rust that the README promises (rust-version in Cargo.toml) compiles everything but the tests. rustup installs that
# version if it can; without it this says so, and succeeds.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
[[ $version == *.*.* ]] || version=$version.0
if ! type -P rustup >/dev/null; then
    echo "msrv: without rustup Rust $version can't be had: not checked" >&2
    exit
fi
if ! rustup run "$version" rustc --version >/dev/null 2>&1 && ! rustup toolchain install "$version" --profile minimal; then
    echo "msrv: rustup can't install Rust $version: not checked" >&2
    exit
fi
cargo "+$version" check --workspace --locked --target-dir "${CARGO_TARGET_DIR:-target}/msrv"
