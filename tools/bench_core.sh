#!/bin/sh
# Benches of the core, then of the whole. JSON lines go to stdout, everything else to stderr.
# Arguments are filters: names of benches, for example `tools/bench_core.sh step startup`.

cd "$(dirname "$0")/.." || exit 1
wanted() {
    [ -z "$filters" ] && return 0
    case " $filters " in *" $1 "*) return 0 ;; esac
    return 1
}
filters=$*

printf '{"bench": "machine", "cpu": "%s", "cores": %s, "commit": "%s"}\n' \
    "$(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)" \
    "$(getconf _NPROCESSORS_ONLN)" \
    "$(git describe --always --dirty 2>/dev/null || echo unknown)"
for bench in benches/*.rs; do
    name=$(basename "$bench" .rs)
    if wanted "$name"; then
        cargo bench --quiet --package fastserve --bench "$name" || exit
    fi
done
for bench in benches/*.py; do
    name=$(basename "$bench" .py)
    [ "$name" = accuracy ] && continue # It takes minutes, and measures no time.
    if wanted "$name"; then
        .venv/bin/python "$bench" || exit
    fi
done
