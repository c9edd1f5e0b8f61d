"""SmolLM 3: every fourth layer is not rotated."""

from quire.config.families.family import Family
from quire.config.families.llama import LLAMA_VALUES
from quire.config.rope import RopeDefaults

FAMILIES = (
    Family(
        "smollm3",
        ("SmolLM3ForCausalLM",),
        is_runnable=True,
        tied=True,
        windows="unrotated",
        usual_values=LLAMA_VALUES
        | {
            "num_key_value_heads": 4,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "layer_types": None,
        },
        nullable=("num_key_value_heads",),
        rope=RopeDefaults(theta=2_000_000.0, skips_rotation=True),
    ),
)
