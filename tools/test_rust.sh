#!/bin/sh
# All Rust tests. The simulator runs optimised, because it runs hundreds of seeds; the rest runs with
# debug assertions. Extra arguments, such as --no-run, go to each `cargo test`.

cd "$(dirname "$0")/.." || exit 1
failed=0
cargo test --quiet --no-fail-fast --workspace --exclude fastserve-sim "$@" || failed=1
cargo test --quiet --no-fail-fast --release --package fastserve-sim "$@" || failed=1
cargo test --quiet --no-fail-fast --release --package fastserve-sim --features faults --test faults "$@" || failed=1
exit "$failed"
