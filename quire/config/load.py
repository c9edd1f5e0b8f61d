from __future__ import annotations

from dataclasses import dataclass, replace

EXPERT_PLACEMENTS = ("linear", "round_robin")
"""Placement of experts: neighbours on each rank, or every n-th expert on one of n ranks."""


@dataclass(frozen=True)
class ExpertBalance:
    """Option `eplb_config`, with vLLM's names. num_redundant_experts: further copies of a layer's experts, on all ranks
    together. window_size: steps whose rows decide where experts go. step_interval: steps between two decisions."""

    num_redundant_experts: int = 0
    window_size: int = 1000
    step_interval: int = 3000


@dataclass(frozen=True)
class LoadConfig:
    """Settings for loading weights; fields with an option's name have its meaning. load_format: "auto" is safetensors,
    else .bin by weights_only, else a GGUF file; "dummy" is random weights, equal for equal seeds. counts_experts: count
    each expert's rows. expert_placement: one of EXPERT_PLACEMENTS; None: slices of every expert. balance: how experts
    change ranks (None: they stay). dealt_to: ranks with the same key heads that share a sequence's tokens."""

    load_format: str
    seed: int
    counts_experts: bool = False
    expert_placement: str | None = None
    balance: ExpertBalance | None = None
    dealt_to: int = 1


def draft_load(load: LoadConfig) -> LoadConfig:
    """Loading of a target's draft model: dummy weights if the target has them, else the model's own files."""
    load_format = "dummy" if load.load_format == "dummy" else "auto"
    return replace(load, load_format=load_format, counts_experts=False, balance=None, dealt_to=1)
