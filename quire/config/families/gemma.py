"""Gemma 1 to 3: large heads; from 2 on four norms a layer, windows in most layers."""

from dataclasses import replace

from quire.config.families.family import NEVER, Family, GGUFNames
from quire.config.families.llama import GGUF_LAYER, GGUF_TOP, LLAMA_VALUES
from quire.config.rope import RopeDefaults

_GGUF_TOP = {name: place for name, place in GGUF_TOP.items() if name != "output"}
_GGUF_LAYER = GGUF_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF = GGUFNames(
    "gemma3",
    _GGUF_TOP,
    _GGUF_LAYER,
    windowed="Gemma3ForCausalLM",
    activation="gelu_pytorch_tanh",
    norm_offset=1.0,
    largest=62,
)
_VALUES = LLAMA_VALUES | {"head_dim": 256, "tie_word_embeddings": True, "attention_bias": False}
_NEWER = {name: value for name, value in _VALUES.items() if name != "hidden_act"} | {
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_BOTH_WAYS = {"use_bidirectional_attention": (None, False)}
FAMILIES = (
    Family(
        "gemma",
        ("GemmaForCausalLM",),
        is_runnable=True,
        tied=True,
        mlp_bias=NEVER,
        head_dim=256,
        usual_values=_VALUES | {"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
        refused=_BOTH_WAYS,
        gguf=replace(_GGUF, architecture="gemma", layer=GGUF_LAYER, windowed="", largest=0),
    ),
    Family(
        "gemma2",
        ("Gemma2ForCausalLM",),
        is_runnable=True,
        tied=True,
        mlp_bias=NEVER,
        head_dim=256,
        norms=4,
        windows=2,
        usual_values=_NEWER | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        nullable=("attn_logit_softcapping", "final_logit_softcapping"),
        refused=_BOTH_WAYS,
        gguf=replace(
            _GGUF,
            architecture="gemma2",
            windowed="Gemma2ForCausalLM",
            caps=("attn_logit_softcapping", "final_logit_softcapping"),
            largest=46,
        ),
    ),
    Family(
        "gemma3_text",
        ("Gemma3ForCausalLM",),
        aliases=("gemma3",),
        is_runnable=True,
        tied=True,
        mlp_bias=NEVER,
        head_dim=256,
        norms=4,
        head_norms="head",
        windows=6,
        rope=RopeDefaults(theta=1_000_000.0, local_theta=10_000.0, local_key="rope_local_base_freq", is_stretched=True),
        usual_values=_NEWER
        | {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
        },
        refused=_BOTH_WAYS | {"attn_logit_softcapping": (None,)},
        gguf=_GGUF,
    ),
)
