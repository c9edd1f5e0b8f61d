"""The weight-loading slice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadConfig:
    """load_format: "auto" (safetensors, else .bin by weights_only, else a GGUF file), "safetensors", "pt", "gguf" or
    "dummy" (random weights, the same for the same seed). seed: of the dummy weights.
    counts_experts: whether mixtures of experts count the rows of each expert.
    """

    load_format: str
    seed: int
    counts_experts: bool = False
