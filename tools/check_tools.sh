#!/bin/sh
# Check what `make` cannot install: cargo, a linker, Python. One line for each thing that is wrong.
#
#   tools/check_tools.sh            prints the Python to use; exit 1 if anything is missing or too old
#   tools/check_tools.sh --lint     also wants rustfmt and clippy
#
# PYTHON, if set, is the only interpreter considered.

cd "$(dirname "$0")/.." || exit 1
minimum_rust=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
minimum_python=11 # 3.11
maximum_python=14 # 3.14: the newest that the pinned torch has wheels for
how_rust="install rustup (https://rustup.rs, or \`apt-get install rustup\` on Debian 13 and Ubuntu 24.04), then \`rustup default stable\`"
failed=0

complain() {
    echo "fastserve: $*" >&2
    failed=1
}

# at_least HAVE WANT: compares major.minor.
at_least() {
    have_major=${1%%.*} have_rest=${1#*.} want_major=${2%%.*} want_rest=${2#*.}
    have_minor=${have_rest%%.*} want_minor=${want_rest%%.*}
    [ "$have_major" -gt "$want_major" ] ||
        { [ "$have_major" -eq "$want_major" ] && [ "$have_minor" -ge "$want_minor" ]; }
}

check_rust() { # check_rust TOOL
    if ! command -v "$1" >/dev/null 2>&1; then
        if [ -x "$HOME/.cargo/bin/$1" ]; then
            complain "$1 is not on PATH, but ~/.cargo/bin has it; run \`. ~/.cargo/env\` and try again"
        else
            complain "$1 is missing, $minimum_rust or newer is needed; $how_rust"
        fi
        return 1
    fi
    version=$("$1" --version 2>/dev/null | sed -n "s/^$1 \([0-9]*\.[0-9]*\).*/\1/p")
    if [ -z "$version" ]; then
        complain "$1 does not run (\`$1 --version\` fails); $how_rust"
    elif ! at_least "$version" "$minimum_rust"; then
        complain "$1 $version is too old, $minimum_rust or newer is needed; $how_rust"
    fi
}

check_python() {
    seen=
    for candidate in ${PYTHON:-.venv/bin/python python3 python3.14 python3.13 python3.12 python3.11}; do
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        if at_least "$version" "3.$minimum_python" && at_least "3.$maximum_python" "$version"; then
            if ! "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
                complain "$candidate ($version) has no venv module; \`apt-get install python3-venv\`"
            fi
            echo "$candidate"
            return
        fi
        seen=${seen:-"$candidate is $version"}
    done
    complain "Python 3.$minimum_python to 3.$maximum_python is needed (${seen:-none was found}); install one (\`apt-get install python3 python3-venv\`), or name it: \`make PYTHON=/path/to/python3.$minimum_python\`"
}

check_rust cargo && check_rust rustc
if ! command -v cc >/dev/null 2>&1; then
    complain "a C linker (cc) is missing, which Rust needs; \`apt-get install build-essential\`"
fi
if [ "$1" = --lint ] && [ "$failed" -eq 0 ]; then
    for part in fmt clippy; do
        cargo "$part" --version >/dev/null 2>&1 ||
            complain "cargo $part is missing; \`rustup component add rustfmt clippy\`"
    done
fi
check_python
exit "$failed"
