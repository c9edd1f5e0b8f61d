"""LLaMA 1 to 3.x, and what families like it share."""

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

FAMILIES = (
    Family(
        "llama",
        ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"),
        is_runnable=True,
        # Files call Mistral's models "llama" as well.
        gguf=GGUFNames("llama", GGUF_TOP, GGUF_LAYER, interleaved=True, windowed="MistralForCausalLM"),
    ),
)
