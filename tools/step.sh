#!/bin/sh
# Run a command that talks too much: show one line while it runs, the end of its output if it fails.
#
#   tools/step.sh "What is done" command argument...
#
# On a terminal the line shows the time so far and the command's last line of output.

what=$1
shift
log=$(mktemp "${TMPDIR:-/tmp}/fastserve-step.XXXXXX") || exit 1
started=$(date +%s)
child=
finish() {
    [ -n "$child" ] && kill "$child" 2>/dev/null
    rm -f "$log"
}
trap 'finish; exit 130' INT TERM
trap 'rm -f "$log"' EXIT

elapsed() { echo $(($(date +%s) - started)); }

if [ -t 1 ]; then
    "$@" >"$log" 2>&1 &
    child=$!
    width=$(tput cols 2>/dev/null || echo 80)
    while kill -0 "$child" 2>/dev/null; do
        last=$(tail -c 400 "$log" | tr '\r' '\n' | tail -n 1 | tr -d '\033')
        line=$(printf '%s  %s s  %s' "$what" "$(elapsed)" "$last" | cut -c "1-$((width - 1))")
        printf '\r\033[K%s' "$line"
        sleep 0.5
    done
    wait "$child"
    code=$?
    child=
    printf '\r\033[K'
else
    printf '%s ... ' "$what"
    "$@" >"$log" 2>&1
    code=$?
    what=
fi

what=${what:+$what ... }
if [ "$code" -ne 0 ]; then
    printf '%sfailed after %s s (exit %s)\n' "$what" "$(elapsed)" "$code"
    tail -n 200 "$log"
    exit "$code"
fi
printf '%sdone in %s s\n' "$what" "$(elapsed)"
