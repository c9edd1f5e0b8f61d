"""Transformers: `generate` on one padded batch. Options: dtype (default float32).

Requests that want fewer tokens than the longest are computed to the end with the rest, as this engine has it.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from driver import Prepare, Request, Run, serve


def load(model: str, threads: int, options: dict[str, Any]) -> tuple[Prepare, str]:
    torch.set_num_threads(threads)
    dtype = getattr(torch, {"dtype": "float32", **options}.pop("dtype"))
    engine = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def prepare(requests: list[Request]) -> Run:
        width = max(len(each["prompt_token_ids"]) for each in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(requests):
            prompt = each["prompt_token_ids"]
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        new = max(each["max_tokens"] for each in requests)
        settings = transformers.GenerationConfig(
            max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None
        )

        def run() -> list[int]:
            output = engine.generate(ids, attention_mask=mask, generation_config=settings)
            return [min(output.shape[1] - width, each["max_tokens"]) for each in requests]

        return run

    return prepare, transformers.__version__


if __name__ == "__main__":
    serve(load)
