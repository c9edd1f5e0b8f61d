"""LLaMA 1 to 3.x, and what families like it share."""

from __future__ import annotations

from typing import Any

from quire.config.families.family import Family, GGUFNames

GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

LLAMA_VALUES: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Part of `Family.usual_values` that is the same in families like LLaMA."""


def gguf_experts(router: str, expert: str, gate: str, up: str, down: str) -> dict[str, str]:
    """GGUF_LAYER with experts in place of the MLP. Arguments: Hugging Face's names of router, expert and matrices."""
    return {name: place for name, place in GGUF_LAYER.items() if not place.startswith("mlp.")} | {
        "ffn_gate_inp": router,
        "ffn_gate_exps": f"{expert}.{gate}",
        "ffn_up_exps": f"{expert}.{up}",
        "ffn_down_exps": f"{expert}.{down}",
    }


FAMILIES = (
    Family(
        "llama",
        ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"),
        is_runnable=True,
        usual_values=LLAMA_VALUES | {"attention_bias": False, "mlp_bias": False},
        # Mistral's files also have the architecture "llama".
        gguf=GGUFNames("llama", GGUF_TOP, GGUF_LAYER, interleaved=True, windowed="MistralForCausalLM"),
    ),
)
