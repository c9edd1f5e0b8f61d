"""The weight-loading slice."""

from __future__ import annotations

from dataclasses import dataclass, replace

EXPERT_PLACEMENTS = ("linear", "round_robin")
"""Runs of neighbouring experts on each rank; or every n-th expert on one of n ranks."""


@dataclass(frozen=True)
class LoadConfig:
    """load_format: "auto" (safetensors, else .bin by weights_only, else a GGUF file), "safetensors", "pt", "gguf" or
    "dummy" (random weights, the same for the same seed). seed: of the dummy weights.
    counts_experts: whether mixtures of experts count the rows of each expert. expert_placement: how whole experts are
    dealt to the ranks, of EXPERT_PLACEMENTS (None: each rank has a slice of every expert). dealt_to: ranks with the
    same key heads that share a sequence's tokens.
    """

    load_format: str
    seed: int
    counts_experts: bool = False
    expert_placement: str | None = None
    dealt_to: int = 1


def draft_load(load: LoadConfig) -> LoadConfig:
    """The loading of the model that makes drafts beside one that is loaded so: random weights for both, else from
    whatever files each has."""
    return replace(
        load, load_format="dummy" if load.load_format == "dummy" else "auto", counts_experts=False, dealt_to=1
    )
