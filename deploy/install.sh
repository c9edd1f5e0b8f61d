#!/bin/sh
# Install Quire into a new virtual environment and run the bundled model in it:
#
#   deploy/install.sh DIRECTORY [SOURCE]
#
# SOURCE: a wheel of `make wheel`, the folder of its wheels (dist), or a source tree, which needs g++ (default: the tree of
# this script).
# PYTHON: the interpreter (default python3, 3.11 or later). PIP_ARGS: passed to pip install, for example the index of
# torch's CPU builds where the machine has no GPU.
set -eu

directory=$1
root=$(cd "$(dirname "$0")/.." && pwd)
source=${2:-$root}

"${PYTHON:-python3}" -m venv "$directory"
if [ -d "$source" ] && [ ! -e "$source/pyproject.toml" ]; then
  # Of several wheels the one for this Python: pip chooses, and asks no index for its name.
  "$directory/bin/python" -m pip download --quiet --no-input --disable-pip-version-check --no-index --no-deps \
    --only-binary :all: -f "$source" --dest "$directory/wheel" quire-llm
  set -- "$directory"/wheel/*.whl
  source=$1
fi
# shellcheck disable=SC2086  # PIP_ARGS holds several words
"$directory/bin/python" -m pip install --no-input --disable-pip-version-check --no-cache-dir \
  -c "$root/constraints.txt" ${PIP_ARGS:-} "$source"

"$directory/bin/python" -c 'import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)' "$directory/wheel"

# From another directory, so that the installed package answers and not the tree.
cd "$directory"
bin/quire doctor --attention-backend native
bin/quire run 'def check(value):
    if value is None:
' --temperature 0 --max-tokens 16
