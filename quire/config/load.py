"""The weight-loading slice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadConfig:
    """load_format: "auto" (safetensors, else .bin by weights_only, else a GGUF file), "safetensors", "pt", "gguf" or
    "dummy" (random weights, the same for the same seed). seed: of the dummy weights.
    """

    load_format: str
    seed: int
