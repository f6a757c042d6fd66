#!/usr/bin/env bash
# What a change must pass besides the tests: formatting, clippy and documentation without a warning.
set -euo pipefail
cd "$(dirname "$0")/.."

for component in rustfmt clippy; do
    if ! cargo "${component/rust/}" --version >/dev/null 2>&1; then
        rustup component add "$component"
    fi
done

cargo fmt --all --check
cargo clippy --workspace --all-targets --all-features --locked -- -D warnings
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --all-features --no-deps --locked
