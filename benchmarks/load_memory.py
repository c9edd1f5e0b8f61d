"""What loading a model takes: python benchmarks/load_memory.py MODEL [--options quantization=int8 ...]

Loads the model in a process of its own, answers one prompt, and prints the resident memory at its peak and at the end
beside the bound of 1.15 x (weights as they are stored) + KV cache + 300 MB.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
from pathlib import Path

from quire import LLM, SamplingParams
from quire.cli.memory_plan import stored_weight_bytes
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.models.gguf.blocks import FORMATS
from quire.utils.gguf import SUFFIX, GGUFFile, TensorEntry
from quire.utils.sizes import format_bytes

FACTOR, ALLOWANCE = 1.15, 300_000_000
KV_BYTES = 256 << 20
SCALE_BYTES = 4


def resident_bytes() -> int:
    """Of this process, now; the file's pages that it maps are the system's to drop and are not counted."""
    status = Path("/proc/self/status").read_text().split()
    return sum(int(status[status.index(name) + 1]) * 1024 for name in ("RssAnon:", "RssShmem:"))


def weight_bytes(config: ModelConfig) -> int:
    """Of the weights as they are stored in memory. A GGUF file says of each tensor what it is."""
    if config.path.suffix != SUFFIX:
        return stored_weight_bytes(config, config.resolved_shape())
    with GGUFFile(config.path) as file:
        return sum(_stored_bytes(entry) for entry in file.tensors.values())


def _stored_bytes(entry: TensorEntry) -> int:
    stored, size = FORMATS.get(entry.type.name), math.prod(entry.shape)
    if stored is None or entry.type.name in ("Q4_0", "Q8_0"):  # floats and MXFP4 too: as in the file
        return entry.num_bytes
    has_offsets = stored.bits == 4 or entry.type.name in ("Q5_1", "Q5_K")
    return size * stored.bits // 8 + size // stored.group_size * SCALE_BYTES * (1 + has_offsets)


def measure(options: dict[str, object]) -> None:
    config = resolve(EngineOptions.from_keywords(options))
    weights = weight_bytes(config.model)
    with LLM(**options) as llm:
        llm.generate([{"prompt_token_ids": [1] * 100}], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        end = resident_bytes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    bound = int(FACTOR * weights) + KV_BYTES + ALLOWANCE
    print(
        f"weights {format_bytes(weights)}, resident at the end {format_bytes(end)}, at the peak {format_bytes(peak)} "
        f"(mapped files included), bound {format_bytes(bound)}: {'within' if peak <= bound else 'BEYOND'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="of quire.LLM")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.here:
        return subprocess.run([sys.executable, __file__, *sys.argv[1:], "--here"], check=False).returncode
    given: dict[str, object] = dict(option.split("=", 1) for option in arguments.options)
    measure(
        {
            "model": arguments.model,
            "skip_tokenizer_init": True,
            "kv_cache_memory": KV_BYTES,
            "max_model_len": 1024,
            **given,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
