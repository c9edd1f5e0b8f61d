#!/usr/bin/env bash
# Everything that is checked and measured on a GPU, in two calls of about five minutes:
#
#   benchmarks/gpu/run.sh [--wheels DIR] [--peer FA3.tar.xz] [--triton-cache DIR|FILE.tar.xz] [--out DIR] [--seconds 315]
#                         [--parts gate,engine,...] [--rehearse]
#   benchmarks/gpu/run.sh --side-by-side --peer VLLM.tar.xz --peer-wheels DIR [the same options] [--seconds 290]
#
# Needs python3 with torch (CUDA), Triton, numpy, safetensors, tokenizers, jinja2, transformers, pytest, pytest-xdist,
# hypothesis and psutil, a C compiler with Python's headers, and no network. What else is missing (msgspec) comes from a
# directory of wheels. --peer unpacks packages to compare with: FlashAttention 3 for the kernels, vLLM for the second call.
# --triton-cache names compiled kernels to begin with (`make triton-cache`, or the file that an earlier call has left in
# --out). Prints a summary of one page last; --out (gpu-results) holds four files at any moment. --rehearse tries both
# calls without a card.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-python3}"
wheels="" peer_wheels="" filled="" beside="" peers=() rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels="${2:?--wheels needs a directory}"; shift 2 ;;
    --peer) peers+=("${2:?--peer needs an archive}"); shift 2 ;;
    --peer-wheels) peer_wheels="${2:?--peer-wheels needs a directory}"; shift 2 ;;
    --triton-cache) filled="${2:?--triton-cache needs a directory or an archive}"; shift 2 ;;
    --side-by-side) beside=yes; rest+=("$1"); shift ;;
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
unpack() { # ARCHIVE DIR
  mkdir -p "$2"
  tar -xf "$1" -C "$2" || { echo "run.sh: cannot unpack $1" >&2; exit 2; }
}

path="$root"
[ -z "$wheels" ] || { install "$wheels" "$site/wheels"; path="$path:$site/wheels"; }
[ -z "$peer_wheels" ] || install "$peer_wheels" "$site/peer-wheels"
for archive in "${peers[@]+"${peers[@]}"}"; do unpack "$archive" "$site/peers"; done
# vLLM brings versions of packages that Quire has too: its process alone sees them.
if [ -n "$beside" ]; then rest+=(--peer-path "$site/peers:$site/peer-wheels"); else path="$path:$site/peers"; fi
# Compiled kernels stay here from run to run, and every part shares them: compiling takes a minute of the five. Only what
# a card runs is kept.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/quire-triton-$(id -u)}" TRITON_STORE_BINARY_ONLY=1
mkdir -p "$TRITON_CACHE_DIR"
if [ -d "$filled" ]; then cp -R "$filled"/. "$TRITON_CACHE_DIR"/; elif [ -n "$filled" ]; then unpack "$filled" "$TRITON_CACHE_DIR"; fi
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"$python" -m benchmarks.gpu.run "${rest[@]+"${rest[@]}"}"
