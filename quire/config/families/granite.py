"""Granite 3 and its mixtures of experts."""

from quire.config.families.family import NEVER, Family
from quire.config.families.llama import LLAMA_VALUES

FAMILIES = (
    Family(
        "granite",
        ("GraniteForCausalLM",),
        is_runnable=True,
        usual_values=LLAMA_VALUES
        | {
            "attention_bias": False,
            "mlp_bias": False,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
    ),
    Family("granitemoe", mlp_bias=NEVER),
)
