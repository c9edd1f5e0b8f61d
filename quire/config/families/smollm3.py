"""SmolLM 3: every fourth layer is not rotated."""

from quire.config.families.family import Family
from quire.config.rope import RopeDefaults

FAMILIES = (
    Family(
        "smollm3",
        ("SmolLM3ForCausalLM",),
        is_runnable=True,
        tied=True,
        windows="qwen",
        rope=RopeDefaults(theta=2_000_000.0, skips_rotation=True),
    ),
)
