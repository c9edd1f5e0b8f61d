"""Tiny models for the device engine in Triton's interpreter, where a step takes a good part of a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from tests.models.families import deepseek_v3, llama, qwen3

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MODELS = {
    "full": lambda: llama(**SIZES),
    # Two KV groups of one layer each.
    "mixed": lambda: qwen3(
        use_sliding_window=True, sliding_window=6, layer_types=["sliding_attention", "full_attention"], **SIZES
    ),
    "latent": lambda: deepseek_v3(
        first_k_dense_replace=1, kv_lora_rank=24, **{**SIZES, "num_key_value_heads": 2, "num_hidden_layers": 1}
    ),
}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "triton",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "num_blocks_override": 60,
    "max_model_len": 48,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
}


def open_engine(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), **{**OPTIONS, **options})


def run(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def greedy(num_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, "detokenize": False, **params}
    )


def continuation(reference: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Transformers' own greedy tokens."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
