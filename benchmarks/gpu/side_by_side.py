"""One engine on the workloads that Quire and vLLM are compared on: python -m benchmarks.gpu.side_by_side quire|vllm
--out FILE [--model qwen3-8b|qwen3-30b-a3b] [--format bf16|fp8] [--workloads NAMES] [--tiny]

The engine has the card to itself: random weights, the same token ids, greedy, no end tokens, no prefix cache, no
detokenising, 8,192 tokens a step. Each workload runs once to compile and warm, then ROUNDS times. vLLM's process
imports of Quire only this folder's files, which need the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.gpu import records
from benchmarks.gpu.family_shapes import QWEN3_MOE
from benchmarks.gpu.shapes import QWEN3_8B, TINY
from benchmarks.gpu.workloads import RAGGED_WORK, TINY_RAGGED, TINY_WORK, Work, Workload

ROUNDS = 2
SHARE = 0.88
"""Of the card's memory, for each engine."""
WARM_TOKENS = 8
CAPTURED = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
WORKLOADS: Mapping[str, Work] = {
    "single": Workload(1, 128, 256),
    "32 streams": Workload(32, 128, 128),
    "256 streams": Workload(256, 256, 128),
    "prompts of 8K": Workload(4, 8192, 1),
    "prompt of 32K": Workload(1, 32768, 1),
    "ragged": RAGGED_WORK,
}
SHAPES = {"qwen3-8b": QWEN3_8B, "qwen3-30b-a3b": QWEN3_MOE}
NARROW = ("single", "32 streams", "256 streams", "prompts of 8K")
"""What runs with weights of 8 bits, and with experts."""
TINY_WORKLOADS: Mapping[str, Work] = {"single": TINY_WORK, "ragged": TINY_RAGGED}
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
Generate = Callable[[list[list[int]], list[int]], list[int]]
"""(prompts, how many tokens each gets) -> how many each got."""


@contextmanager
def open_quire(model: str, weights: str, *, tiny: bool) -> Iterator[Generate]:
    from benchmarks.gpu.engine import WHERE, greedy
    from quire import LLM

    options = WHERE[tiny] | {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    if not tiny:
        options |= {"gpu_memory_utilization": SHARE, "max_num_batched_tokens": 8192}
    with LLM(model, quantization=None if weights == "bf16" else weights, **options) as llm:

        def generate(prompts: list[list[int]], counts: list[int]) -> list[int]:
            given = [{"prompt_token_ids": ids} for ids in prompts]
            outputs = llm.generate(given, [greedy(count) for count in counts], use_tqdm=False)
            return [len(output.outputs[0].token_ids) for output in outputs]

        # An idle server captures its CUDA graphs before requests come. Here the engine runs on this thread, which has
        # to ask for it.
        while llm._client.idle():
            pass
        yield generate


@contextmanager
def open_vllm(model: str, weights: str, *, tiny: bool) -> Iterator[Generate]:
    """Compiled and captured as it is by default. Where its engine process does not start, this module is run again with
    the engine in one process."""
    from vllm import LLM, SamplingParams

    try:
        llm = LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            quantization=None if weights == "bf16" else weights,
            max_model_len=40960,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            gpu_memory_utilization=SHARE,
            enable_prefix_caching=False,
            compilation_config={"cudagraph_capture_sizes": list(CAPTURED)},
            disable_log_stats=True,
        )
    except Exception as error:
        if os.environ.get(IN_PROCESS) == "0":
            raise
        print(f"{type(error).__name__}: {error}; again in one process", flush=True)
        os.environ[IN_PROCESS] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu.side_by_side", *sys.argv[1:]])

    def generate(prompts: list[list[int]], counts: list[int]) -> list[int]:
        given = [{"prompt_token_ids": ids} for ids in prompts]
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in counts]
        return [len(output.outputs[0].token_ids) for output in llm.generate(given, params, use_tqdm=False)]

    yield generate


def timed(generate: Generate, work: Work, vocab_size: int) -> list[float]:
    """Seconds of each round after a warm one of few tokens. Raises RuntimeError where tokens are missing."""
    found = []
    for seed in range(ROUNDS + 1):
        counts = work.output_lens if seed else [min(count, WARM_TOKENS) for count in work.output_lens]
        prompts = work.prompts(vocab_size, seed)
        began = time.perf_counter()
        given = generate(prompts, counts)
        found.append(time.perf_counter() - began)
        if given != counts:
            raise RuntimeError(f"{sum(given)} tokens came out instead of {sum(counts)}")
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("quire", "vllm"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="", help="the name in the records")
    parser.add_argument("--model", choices=tuple(SHAPES), default="qwen3-8b")
    parser.add_argument("--format", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--workloads", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--tiny", action="store_true", help="in Triton's interpreter; vLLM: a stand-in")
    arguments = parser.parse_args()
    began, emit = time.perf_counter(), records.writer(arguments.out)
    shape = TINY if arguments.tiny else SHAPES[arguments.model]
    works = TINY_WORKLOADS if arguments.tiny else WORKLOADS
    names = tuple(works) if (arguments.model, arguments.format) == ("qwen3-8b", "bf16") else NARROW
    names = tuple(arguments.workloads.split(",")) if arguments.workloads else names
    kind = {"engine": arguments.engine, "model": arguments.model, "format": arguments.format}
    base = {"part": arguments.part or arguments.engine, **kind}
    opened = open_quire if arguments.engine == "quire" else open_vllm
    with tempfile.TemporaryDirectory() as directory:
        model = str(shape.write(Path(directory) / "model"))
        with opened(model, arguments.format, tiny=arguments.tiny) as generate:
            emit({**base, "what": "ready", "seconds": time.perf_counter() - began})
            for name in (name for name in names if name in works):
                seconds = timed(generate, works[name], shape.vocab)
                speed = sum(works[name].output_lens) / median(seconds)
                work = {"workload": name, "work": str(works[name]), "output_tokens_per_second": speed}
                emit({**base, "what": "workload", **work, "seconds": seconds})


if __name__ == "__main__":
    main()
