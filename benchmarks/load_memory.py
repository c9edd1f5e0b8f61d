"""What loading models takes: python benchmarks/load_memory.py MODEL ... [--options quantization=int8 ...]

Loads each model in a process of its own, behind the bundled one, whose libraries then lie in memory. Prints the weights
as `quire plan` counts them beside what the process grew by, of a GGUF file both over the bytes of its tensors; then
answers one prompt, and prints the resident memory at its peak and at the end beside the bound of 1.15 x (weights as
they are stored) + KV cache + 300 MB.
"""

from __future__ import annotations

import argparse
import gc
import resource
import subprocess
import sys
from pathlib import Path

from quire import LLM, SamplingParams
from quire.cli.memory_plan import stored_weight_bytes
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.utils.gguf import GGUFFile
from quire.utils.sizes import format_bytes

FACTOR, ALLOWANCE = 1.15, 300_000_000
KV_BYTES = 256 << 20


def resident_bytes() -> int:
    """Of this process, now; the file's pages that it maps are the system's to drop and are not counted."""
    status = Path("/proc/self/status").read_text().split()
    return sum(int(status[status.index(name) + 1]) * 1024 for name in ("RssAnon:", "RssShmem:"))


def measure(options: dict[str, object]) -> None:
    config = resolve(EngineOptions.from_keywords(options))
    weights = stored_weight_bytes(config.model, config.model.resolved_shape())
    with LLM("bundled", skip_tokenizer_init=True, kv_cache_memory=KV_BYTES) as llm:
        llm.generate([{"prompt_token_ids": [1] * 100}], use_tqdm=False)
    gc.collect()
    before = resident_bytes()
    with LLM(**options) as llm:
        gc.collect()
        grown = resident_bytes() - before
        llm.generate([{"prompt_token_ids": [1] * 100}], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        end = resident_bytes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    bound = int(FACTOR * weights) + KV_BYTES + ALLOWANCE
    if config.model.is_gguf:
        with GGUFFile(config.model.path) as file:
            stored = sum(entry.num_bytes for entry in file.tensors.values())
        print(
            f"{config.model.path.name}: {format_bytes(stored)} of tensors; planned {weights / stored:.3f} and resident "
            f"{grown / stored:.3f} of these bytes"
        )
    print(
        f"weights {format_bytes(weights)}, grown by {format_bytes(grown)}: "
        f"planned {100 * (weights / grown - 1):+.1f} %; "
        f"resident at the end {format_bytes(end)}, at the peak {format_bytes(peak)} "
        f"(mapped files included), bound {format_bytes(bound)}: {'within' if peak <= bound else 'BEYOND'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="of quire.LLM")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.here:
        options = ["--options", *arguments.options] if arguments.options else []
        commands = ([sys.executable, __file__, model, *options, "--here"] for model in arguments.models)
        return max(subprocess.run(command, check=False).returncode for command in commands)
    given: dict[str, object] = dict(option.split("=", 1) for option in arguments.options)
    measure(
        {
            "model": arguments.models[0],
            "skip_tokenizer_init": True,
            "kv_cache_memory": KV_BYTES,
            "max_model_len": 1024,
            **given,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
