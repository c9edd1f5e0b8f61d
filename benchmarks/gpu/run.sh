#!/usr/bin/env bash
# Everything that is checked and measured on a GPU, in at most ten minutes:
#
#   benchmarks/gpu/run.sh [--wheels DIR] [--out DIR] [--seconds 600] [--parts tests,kernels,...] [--rehearse]
#
# Needs python3 with torch (CUDA), Triton, numpy, safetensors, tokenizers, jinja2, transformers, pytest, hypothesis and psutil;
# no network and no compiler. What else is missing (msgspec) comes from a directory of wheels. Prints a short summary last and
# writes results.json to --out (default: gpu-results in the current directory). --rehearse tries all of it without a card.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-python3}"
wheels=""
rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels="${2:?--wheels needs a directory}"; shift 2 ;;
    *) rest+=("$1"); shift ;;
  esac
done
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
path="$root"
if [ -n "$wheels" ]; then
  found=("$wheels"/*.whl)
  [ -e "${found[0]}" ] || { echo "run.sh: no wheels in $wheels" >&2; exit 2; }
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "${found[@]}"
  path="$root:$site"
fi
# Compiled kernels stay here: every part of the run shares them, nothing is left behind.
export TRITON_CACHE_DIR="$site/triton" PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"$python" -m benchmarks.gpu.run "${rest[@]+"${rest[@]}"}"
