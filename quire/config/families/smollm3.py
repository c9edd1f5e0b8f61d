"""SmolLM 3."""

from quire.config.families.family import Family

FAMILIES = (Family("smollm3", tied=True, windows="qwen", rope_theta=2_000_000.0),)
