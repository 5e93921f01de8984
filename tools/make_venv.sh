#!/bin/sh
# Make a virtual environment, or keep the one that is there if it works.

venv=$1
if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi
python=$(sh "$(dirname "$0")/check_tools.sh") || exit 1
exec sh "$(dirname "$0")/step.sh" "Making $venv with $python" "$python" -m venv --clear "$venv"
