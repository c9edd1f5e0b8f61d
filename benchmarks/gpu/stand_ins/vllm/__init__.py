"""Stands in for vLLM where there is no card: the interface that vllm_peer.py uses. It computes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__version__ = "stand-in"


@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool
    detokenize: bool


@dataclass
class CompletionOutput:
    token_ids: list[int]


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput]


class LLM:
    def __init__(self, **options: Any) -> None:
        print("INFO: words on the standard output, as the engine has them")

    def generate(
        self, prompts: list[dict[str, list[int]]], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        return [RequestOutput([CompletionOutput([0] * each.max_tokens)]) for each in params]
