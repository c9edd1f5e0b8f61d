#!/bin/sh
# Install Quire into a new virtual environment and run the bundled model in it:
#
#   deploy/install.sh DIRECTORY [SOURCE]
#
# SOURCE: a wheel of `make wheel`, or a source tree, which needs g++ (default: the tree of this script).
# PYTHON: the interpreter (default python3, 3.11 or later). PIP_ARGS: passed to pip install, for example the index of
# torch's CPU builds where the machine has no GPU.
set -eu

directory=$1
root=$(cd "$(dirname "$0")/.." && pwd)
source=${2:-$root}

"${PYTHON:-python3}" -m venv "$directory"
# shellcheck disable=SC2086  # PIP_ARGS holds several words
"$directory/bin/python" -m pip install --no-input --disable-pip-version-check --no-cache-dir \
  -c "$root/constraints.txt" ${PIP_ARGS:-} "$source"

# From another directory, so that the installed package answers and not the tree.
cd "$directory"
bin/quire doctor --attention-backend native
bin/quire run 'def check(value):
    if value is None:
' --temperature 0 --max-tokens 16
