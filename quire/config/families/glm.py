"""GLM 4, old (9B) and new (0414), and the mixtures of experts."""

from dataclasses import replace

from quire.config.families.family import NEVER, Bias, Family
from quire.config.families.llama import LLAMA_VALUES
from quire.config.rope import RopeDefaults

_DENSE = Family(
    "glm",
    ("GlmForCausalLM",),
    is_runnable=True,
    query_bias=Bias("attention_bias", True),
    output_bias=NEVER,
    mlp_bias=NEVER,
    rope=RopeDefaults(share=0.5),
    is_interleaved=True,
    fused=("gate_up_proj",),
    usual_values=LLAMA_VALUES
    | {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
)
FAMILIES = (
    _DENSE,
    replace(_DENSE, model_type="glm4", architectures=("Glm4ForCausalLM",), norms=4),
    Family(
        "glm4_moe",
        output_bias=NEVER,
        mlp_bias=NEVER,
        head_norms="head",
        head_norms_key="use_qk_norm",
        corrects_choice=True,
    ),
)
