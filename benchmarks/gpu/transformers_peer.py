"""Transformers' continuous batching on the work that the engine does as "peer work": the same shape, the same tokens in
and out.

    python -m benchmarks.gpu.transformers_peer --out FILE [--tiny]

The first run, which compiles and captures, does not count.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu import records
from benchmarks.gpu.shapes import QWEN3_8B, TINY, Shape
from benchmarks.gpu.workloads import PEER_WORK, TINY_WORK, Workload

TINY_BLOCKS, TINY_TOKENS = 16, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    emit = records.writer(arguments.out)
    shape, work = (TINY, TINY_WORK) if arguments.tiny else (QWEN3_8B, PEER_WORK)
    model = make_model(shape, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for record in measured(model, work):
        emit({"part": "transformers", **record})


def make_model(shape: Shape, device: torch.device) -> PreTrainedModel:
    """Random weights, as the engine's are."""
    config = Qwen3Config(**{name: value for name, value in shape.config().items() if name != "architectures"})
    config.eos_token_id = None
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, shape.dtype))
    try:
        with device:
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def measured(model: PreTrainedModel, work: Workload) -> Iterator[dict[str, Any]]:
    """Tokens a second from the call to the last token, of a first run and of the one that counts. Raises RuntimeError
    when not every request got its tokens."""
    settings = GenerationConfig(
        max_new_tokens=work.output_len, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    options: dict[str, Any] = {"generation_config": settings}
    if "persistent_manager" in inspect.signature(model.generate_batch).parameters:
        options["persistent_manager"] = True  # what the first run captured serves the second
    if model.device.type == "cpu":
        # It takes nine tenths of the memory there is: right for a card, not for the host that the script is tried on.
        options["continuous_batching_config"] = transformers.ContinuousBatchingConfig(
            num_blocks=TINY_BLOCKS, max_batch_tokens=TINY_TOKENS
        )
    for run, what in enumerate(("transformers, first run", "transformers")):
        prompts = work.prompts(model.config.vocab_size, seed=run)
        started = time.perf_counter()
        outputs = model.generate_batch(prompts, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        lengths = [len(output.generated_tokens) for output in outputs.values()]
        if lengths != [work.output_len] * work.num_requests:
            raise RuntimeError(f"{len(lengths)} requests with {sum(lengths)} tokens instead of {work}")
        yield {
            "what": what,
            "work": str(work),
            "seconds": seconds,
            "tokens_per_second": work.num_requests * work.output_len / seconds,
            "attention": model.config._attn_implementation,
            "version": transformers.__version__,
        }


if __name__ == "__main__":
    main()
