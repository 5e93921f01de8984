#!/bin/sh
# Tests of the CPU kernels under valgrind's memcheck, on the portable path: an access to memory that is
# nobody's, and a decision on memory that nobody wrote, is an error. Extra arguments, such as a test's
# name, go to the test binaries. `memcheck.rs` has every kernel; the others are those that do not take
# hours.

cd "$(dirname "$0")/.." || exit 1
if ! command -v valgrind >/dev/null 2>&1; then
    echo "fastserve: valgrind is missing; \`apt-get install valgrind\`" >&2
    exit 1
fi
export FASTSERVE_CPU_ISA=portable
# Threads that wait do so in turns; what they keep to the end of the process is not lost.
runner="['valgrind', '--quiet', '--error-exitcode=1', '--leak-check=no', '--fair-sched=yes']"
cargo test --quiet --no-fail-fast --config "target.'cfg(unix)'.runner = $runner" \
    --package fastserve-cpu --test memcheck --test quantized --test elementwise --test decode \
    --test decoder --test refusals -- --include-ignored "$@"
