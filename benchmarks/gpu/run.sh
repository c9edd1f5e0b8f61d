#!/usr/bin/env bash
# Everything that is checked and measured on a GPU, in at most ten minutes:
#
#   benchmarks/gpu/run.sh [--wheels DIR] [--peer ARCHIVE.tar.xz]... [--triton-cache DIR] [--out DIR] [--seconds 600]
#                         [--parts gate,tests,kernels,...] [--rehearse]
#   benchmarks/gpu/run.sh --side-by-side [--wheels DIR] --peer VLLM.tar.xz --peer-wheels DIR [--out DIR] [--seconds 560]
#
# Needs python3 with torch (CUDA), Triton, numpy, safetensors, tokenizers, jinja2, transformers, pytest, pytest-xdist,
# hypothesis and psutil, a C compiler with Python's headers, and no network. What else is missing (msgspec) comes from a
# directory of wheels. --peer unpacks packages to compare with (FlashAttention 3, FlashInfer), which the kernel tables then use.
# --triton-cache names compiled kernels to begin with (`make triton-cache`). Prints a summary of one page last; --out (gpu-results)
# gets results.json, summary.txt and logs.tar.xz. --rehearse tries all of it without a card.
# --side-by-side runs Quire and vLLM on the same workloads in turns: benchmarks/gpu/side_by_side.py.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-python3}"
module="benchmarks.gpu.run"
wheels="" peer_wheels="" filled="" peers=() rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels="${2:?--wheels needs a directory}"; shift 2 ;;
    --peer) peers+=("${2:?--peer needs an archive}"); shift 2 ;;
    --peer-wheels) peer_wheels="${2:?--peer-wheels needs a directory}"; shift 2 ;;
    --triton-cache) filled="${2:?--triton-cache needs a directory}"; shift 2 ;;
    --side-by-side) module="benchmarks.gpu.side_by_side"; shift ;;
    *) rest+=("$1"); shift ;;
  esac
done
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT

install() { # DIR TARGET: every wheel of a directory
  local found=("$1"/*.whl)
  [ -e "${found[0]}" ] || { echo "run.sh: no wheels in $1" >&2; exit 2; }
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$2" "${found[@]}"
}

path="$root" peer_path=""
[ -z "$wheels" ] || { install "$wheels" "$site/wheels"; path="$root:$site/wheels"; }
[ -z "$peer_wheels" ] || { install "$peer_wheels" "$site/peer-wheels"; peer_path=":$site/peer-wheels"; }
for archive in "${peers[@]+"${peers[@]}"}"; do
  mkdir -p "$site/peers"
  tar -xf "$archive" -C "$site/peers" || { echo "run.sh: cannot unpack $archive" >&2; exit 2; }
done
if [ ${#peers[@]} -gt 0 ]; then
  # vLLM brings versions of packages that Quire has too: its process alone sees them.
  if [ "$module" = benchmarks.gpu.side_by_side ]; then rest+=(--peer-path "$site/peers$peer_path"); else path="$path:$site/peers"; fi
fi
# Compiled kernels stay here from run to run, and every part shares them: compiling takes a minute of the ten.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/quire-triton-$(id -u)}"
mkdir -p "$TRITON_CACHE_DIR"
[ -z "$filled" ] || cp -R "$filled"/. "$TRITON_CACHE_DIR"/
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"$python" -m "$module" "${rest[@]+"${rest[@]}"}"
