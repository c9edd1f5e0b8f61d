"""Shapes of families: what a config.json may hold, however hostile, is a shape or one clear error."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.config.families import FAMILIES, read_shape
from quire.config.model_shape import ModelShape
from quire.errors import ModelLoadError

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "n_embd": 48,
    "intermediate_size": 100,
    "ffn_dim": 100,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "num_attention_heads": 6,
    "n_head": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "n_positions": 256,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 10, "q_lora_rank": 24}
INDEX = {"index_n_heads": 3, "index_head_dim": 12, "index_topk": 9}
KEYS = (
    *SIZES, *EXPERTS, *LATENT, *INDEX, "architectures", "model_type", "text_config", "layer_types", "mlp_layer_types",
    "sliding_window", "attention_chunk_size", "use_sliding_window", "max_window_layers", "sliding_window_pattern",
    "mlp_only_layers", "first_k_dense_replace", "decoder_sparse_step", "n_shared_experts", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "enable_bias", "use_qk_norm", "word_embed_proj_dim", "torch_dtype",
    "quantization_config", "linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim",
    "full_attention_interval", "linear_attn_config", "head_dim",
)  # fmt: skip
NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 7, 2**24, 2**31, 10**400, 0.5, 1e308, float("nan"), "", "6", "x" * 200, [], [0],
    [[]], {}, {"bits": []}, {"kda_layers": 5}, {"kda_layers": [[1]], "num_heads": 2}, ["LlamaForCausalLM"],
    ["full_attention"] * 4, ["linear_attention"] * 4, ["sliding_attention", {}, [], None], {"hidden_size": 8},
)  # fmt: skip


@pytest.mark.parametrize("family", [*sorted(FAMILIES), "a family that is not known"])
def test_hostile_values_are_a_shape_or_an_error_of_one_line(family: str) -> None:
    draws = random.Random(family)
    num_shapes, errors = 0, list[str]()
    for _ in range(300):
        values: dict[str, Any] = {"model_type": family, **SIZES, **INDEX}
        for part in (EXPERTS, LATENT):
            values |= part if draws.random() < 0.5 else {}
        for key in draws.sample(KEYS, draws.randint(0, 3)):
            values[key] = draws.choice(NASTY)
        try:
            shape = read_shape(values, "x", "x/config.json")
        except ModelLoadError as error:
            errors.append(str(error))
            continue
        num_shapes += 1
        check(shape)
    assert num_shapes > 30
    assert all(error.startswith("x/config.json: ") and "\n" not in error and len(error) < 400 for error in errors)


def check(shape: ModelShape) -> None:
    """Numbers that agree with each other."""
    assert shape.active_parameters() + shape.looked_up_parameters > 0
    assert shape.dense_parameters <= shape.active_parameters() <= shape.parameters() + shape.embedding_parameters
    assert len(shape.windows) == shape.num_layers == sum(shape.attention_counts.values())
    for layer in shape.layers:
        attention = layer.attention
        assert (attention.kind in ("sliding", "chunked")) == (attention.window is not None)
        assert (attention.token_elements() == 0) == (attention.kind in ("state", "none"))
        assert (attention.state_bytes() == 0) == (attention.kind != "state")


def test_layers_of_a_hybrid_are_described_one_by_one() -> None:
    shape = read_shape({"model_type": "qwen3_next", **SIZES, **EXPERTS, "mlp_only_layers": [1]}, "x")
    assert [layer.attention.kind for layer in shape.layers] == ["state", "state", "state", "full"]
    assert [layer.experts is None for layer in shape.layers] == [False, True, False, False]
    state, full = shape.layers[0].attention, shape.layers[3].attention
    assert (full.num_heads, full.num_kv_heads, full.key_dim, full.value_dim) == (6, 2, 256, 256)
    assert (state.num_heads, state.num_kv_heads, state.key_dim, state.value_dim) == (16, 32, 128, 128)
    assert (state.conv_channels, state.conv_inputs) == (2 * 16 * 128 + 32 * 128, 3)
    rows = 63 * (16 + 32) * 128 + 32 * 64
    assert state.matrix_bytes() == 32 * 128 * 128 * 4 == shape.matrix_bytes() / 3
    assert state.state_bytes() == state.matrix_bytes() + 4 * (rows + 3 * 8192) == 2 * state.state_bytes(2)
    assert shape.kv_elements() == full.token_elements() == 2 * 2 * 256


def test_latent_and_state_layers_of_one_model() -> None:
    own = {"head_dim": 8, "num_heads": 5, "short_conv_kernel_size": 3, "full_attn_layers": [2], "kda_layers": [1, 3, 4]}
    shape = read_shape({"model_type": "kimi_linear", **SIZES, **EXPERTS, **LATENT, "linear_attn_config": own}, "x")
    assert [layer.attention.kind for layer in shape.layers] == ["state", "latent", "state", "state"]
    assert [layer.experts is None for layer in shape.layers] == [True, False, False, False]
    latent = shape.layers[1].attention
    assert (latent.latent_dim, latent.latent_rank, latent.token_elements(8)) == (20, 16, 20)
    assert shape.attention == latent
