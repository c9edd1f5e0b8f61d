"""Logits processors of tests, which engines load by name."""

from __future__ import annotations

from typing import Any

import torch

from quire.logits_processors import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, process_dict_updates
from quire.sampling_params import SamplingParams


class Batched(LogitsProcessor):
    """Without effect; `rows` has (parameters, prompt, output) of each row."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[SamplingParams, list[int] | None, list[int]]] = {}
        self.batch_size = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            self.batch_size = batch_update.batch_size
        process_dict_updates(self.rows, batch_update, lambda *given: given)
        assert sorted(self.rows) == list(range(self.batch_size)), "a batch has no holes"

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert len(logits) == self.batch_size
        return logits


class Target(Batched):
    """Leaves the token `target_token` alone possible. Raises where that is `broken`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        target = (sampling_params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int) and target != "broken":
            raise ValueError(f"target_token value {target} is not int")

    @classmethod
    def concerns(cls, sampling_params: SamplingParams) -> bool:
        return "target_token" in (sampling_params.extra_args or {})

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (params, _, _) in self.rows.items():
            target = (params.extra_args or {})["target_token"]
            if target == "broken":
                raise RuntimeError("broken on purpose")
            kept = logits[row, target].item()
            logits[row] = float("-inf")
            logits[row, target] = kept
        return logits


class Counting(AdapterLogitsProcessor):
    """Token i of a text is `first` + i, and then the prompt's length: what a row has, and how far it is, decide."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        first = (params.extra_args or {}).get("first")
        if first is None:
            return None

        def function(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            wanted = first + len(output) if len(output) % 2 == 0 else len(prompt)
            logits[wanted] = 1e4
            return logits

        return function


class Coldest(Batched):
    """Argmax-invariant: takes the second best token of a row down by `gap` / temperature."""

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        floor = logits.max(dim=1, keepdim=True).values - 1e-3
        return torch.where(logits < floor, float("-inf"), logits)
