"""Quire, through its offline API. Options: those of `quire.LLM`."""

from __future__ import annotations

from typing import Any

from driver import Prepare, Request, Run, serve

from quire import LLM, SamplingParams
from quire.version import __version__

DEFAULTS = {"skip_tokenizer_init": True, "max_model_len": 2048, "kv_cache_memory": "1GiB", "prefault_kv_cache": True}
"""vLLM and llama.cpp write to all of their caches when they start, and the others use their first blocks again: only a
pool that takes unused blocks before cached ones would meet fresh memory in rounds that count."""


def load(model: str, threads: int, options: dict[str, Any]) -> tuple[Prepare, str]:
    llm = LLM(model, **{**DEFAULTS, "num_threads": threads, **options})

    def prepare(requests: list[Request]) -> Run:
        params = [
            SamplingParams(temperature=0.0, max_tokens=each["max_tokens"], ignore_eos=True, detokenize=False)
            for each in requests
        ]
        prompts = [{"prompt_token_ids": each["prompt_token_ids"]} for each in requests]
        return lambda: [len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    return prepare, __version__


if __name__ == "__main__":
    serve(load)
