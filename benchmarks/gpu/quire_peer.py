"""Quire's side of benchmarks/gpu/side_by_side.py: python -m benchmarks.gpu.quire_peer MODEL --share S --max-model-len N
--max-num-seqs N [--tiny]"""

from __future__ import annotations

import sys
import time

from benchmarks.gpu.engine import greedy
from benchmarks.gpu.peer_arguments import parse
from benchmarks.gpu.peer_protocol import EngineFacts, private_output, serve
from quire import LLM
from quire.version import __version__


def main() -> None:
    began, answers, arguments = time.perf_counter(), private_output(), parse()
    where = (
        {"device": "cpu", "attention_backend": "triton", "num_blocks_override": 40}
        if arguments.tiny
        else {"device": "cuda", "gpu_memory_utilization": arguments.share, "max_num_batched_tokens": 8192}
    )
    with LLM(
        arguments.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        **where,
    ) as llm:

        def generate(prompts: list[list[int]], counts: list[int]) -> list[int]:
            given = [{"prompt_token_ids": ids} for ids in prompts]
            outputs = llm.generate(given, [greedy(count) for count in counts], use_tqdm=False)
            return [len(output.outputs[0].token_ids) for output in outputs]

        # An idle server captures its CUDA graphs before requests come, and the other engine while it starts. Here the
        # engine runs on this thread, which has to ask for it.
        while llm._client.idle():
            pass
        stats = llm.stats()
        facts = EngineFacts("Quire", __version__, stats["num_blocks"] * stats["block_size"])
        serve(facts, arguments.vocab_size, generate, sys.stdin, answers, began)


if __name__ == "__main__":
    main()
