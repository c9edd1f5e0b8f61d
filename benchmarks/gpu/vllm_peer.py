"""vLLM's side of benchmarks/gpu/side_by_side.py: python -m benchmarks.gpu.vllm_peer MODEL --share S --max-model-len N
--max-num-seqs N

Needs vLLM on the path and nothing of Quire but this folder's files. Greedy, without prefix cache and detokenising, like
the other side; compiled and captured as it is by default, for the batch sizes that the workloads have.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.gpu.peer_arguments import parse
from benchmarks.gpu.peer_protocol import EngineFacts, private_output, serve

CAPTURED = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 512, 1024)


def num_slots(llm: Any) -> int | None:
    """Tokens of the KV cache; None where this version does not say."""
    try:
        cache = llm.llm_engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)
    except (AttributeError, TypeError):
        return None


def main() -> None:
    began, answers, arguments = time.perf_counter(), private_output(), parse()
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        model=arguments.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=arguments.share,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": list(CAPTURED)},
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], counts: list[int]) -> list[int]:
        given = [{"prompt_token_ids": ids} for ids in prompts]
        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in counts
        ]
        return [len(output.outputs[0].token_ids) for output in llm.generate(given, params, use_tqdm=False)]

    serve(EngineFacts("vLLM", __version__, num_slots(llm)), arguments.vocab_size, generate, sys.stdin, answers, began)


if __name__ == "__main__":
    main()
