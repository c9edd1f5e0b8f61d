"""Shapes against Transformers' own models, the engine's, and what is published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.cli.memory_plan import plan_devices, plan_engine
from quire.config.families import ARCHITECTURES, FAMILIES, RUNNABLE, read_shape
from quire.config.options import EngineOptions
from quire.config.parallel import ParallelConfig
from quire.config.resolve import resolve
from quire.errors import ModelLoadError, UserError
from quire.kv_cache.spec import AttentionSpec, SlidingWindowSpec, layer_specs
from quire.models.loader import load_model
from quire.parallel.single import SINGLE_RANK
from quire.simulator.cost import CostModel, Precision
from quire.simulator.hardware import find
from quire.simulator.memory import device_specs
from quire.simulator.shape import built_in, find_shape

LLAMA = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
HEADS = LLAMA | {"head_dim": 12}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
ROUTED = {
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 10, "q_lora_rank": 24}
FIRST_DENSE = {"first_k_dense_replace": 1, "num_key_value_heads": 6}
INDEX = {"index_n_heads": 3, "index_head_dim": 8, "index_topk": 9}
CHUNKS = {"attention_chunk_size": 16}
DELTA = HEADS | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}
KIMI = LLAMA | LATENT | LOCAL | {"num_key_value_heads": 6, "moe_intermediate_size": 20, "n_shared_experts": 1}
OPT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 101, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", LLAMA),
    ("llama", LLAMA | {"tie_word_embeddings": True, "head_dim": 10}),
    ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    ("mistral", LLAMA | {"sliding_window": 16}),
    ("ministral", HEADS | {"sliding_window": 16}),
    ("qwen2", LLAMA | {"tie_word_embeddings": True}),
    ("qwen2", LLAMA | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    ("qwen3", HEADS),
    ("qwen3", HEADS | {"attention_bias": True}),
    ("gpt2", GPT2),
    ("gpt2", GPT2 | {"n_inner": 100, "tie_word_embeddings": False}),
    ("opt", OPT),
    ("opt", OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("opt", OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("opt", OPT | {"_remove_final_layer_norm": True, "tie_word_embeddings": False}),
    ("gemma", HEADS),
    ("gemma2", HEADS | {"sliding_window": 16}),
    ("gemma3_text", HEADS | {"sliding_window": 16, "num_hidden_layers": 7}),
    ("gemma3_text", HEADS | {"sliding_window": 16, "sliding_window_pattern": 2}),
    ("phi3", LLAMA | {"sliding_window": 16}),
    ("olmo2", LLAMA),
    ("olmo3", LLAMA | {"sliding_window": 16}),
    ("granite", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    ("glm", HEADS),
    ("glm4", HEADS),
    ("cohere", LLAMA | {"use_qk_norm": True}),
    ("cohere2", LLAMA | {"sliding_window": 16}),
    ("smollm3", LLAMA),
    ("seed_oss", HEADS | {"attention_out_bias": False}),
    ("starcoder2", LLAMA | {"sliding_window": None}),
    ("gpt_neox", {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}),
    ("mixtral", LLAMA | LOCAL),
    ("granitemoe", LLAMA | LOCAL),
    ("olmoe", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2_moe", LLAMA | MOE | {"shared_expert_intermediate_size": 28, "decoder_sparse_step": 2}),
    ("qwen2_moe", LLAMA | MOE | {"shared_expert_intermediate_size": 28, "mlp_only_layers": [0, 3], "qkv_bias": False}),
    ("qwen3_moe", HEADS | MOE),
    ("qwen2_5_vl_text", LLAMA | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    ("qwen3_vl_text", HEADS),
    ("qwen3_vl_text", HEADS | {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3_vl_moe_text", HEADS | MOE),
    ("qwen3_vl_moe_text", HEADS | MOE | {"tie_word_embeddings": False, "mlp_only_layers": [2]}),
    ("gpt_oss", HEADS | LOCAL | {"sliding_window": 16}),
    ("minimax_m2", HEADS | LOCAL),
    ("glm4_moe", HEADS | ROUTED | {"first_k_dense_replace": 2, "use_qk_norm": True, "attention_bias": True}),
    ("deepseek_v2", LLAMA | ROUTED | LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1}),
    ("deepseek_v3", LLAMA | ROUTED | LATENT | {"first_k_dense_replace": 3, "num_key_value_heads": 6}),
    (
        "deepseek_v3",
        LLAMA | ROUTED | LATENT | {"attention_bias": True} | FIRST_DENSE,
    ),
    ("deepseek_v32", LLAMA | ROUTED | LATENT | INDEX | FIRST_DENSE),
    ("deepseek_v32", LLAMA | ROUTED | LATENT | INDEX | {"num_key_value_heads": 6}),
    ("qwen3_next", DELTA | MOE | {"shared_expert_intermediate_size": 28, "mlp_only_layers": [1]}),
    ("qwen3_5_text", DELTA),
    ("qwen3_5_moe_text", DELTA | MOE | {"shared_expert_intermediate_size": 28}),
    ("kimi_linear", KIMI | {"q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 5}),
    ("llama4_text", HEADS | LOCAL | {"intermediate_size_mlp": 90, "interleave_moe_layer_step": 2} | CHUNKS),
]


def label(case: tuple[str, dict[str, Any]]) -> str:
    return case[0]


WITH_IMAGES = {
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
}
"""Language models of which Transformers has no class of their own, and the models that they are part of."""


def language_model(kind: str, config: PreTrainedConfig) -> PreTrainedModel:
    if kind not in WITH_IMAGES:
        return AutoModelForCausalLM.from_config(config)
    text = config.to_dict()
    tied = text.get("tie_word_embeddings", False)
    whole = AutoConfig.for_model(WITH_IMAGES[kind], text_config=text, tie_word_embeddings=tied)
    model = AutoModelForImageTextToText.from_config(whole)
    del model.model.visual
    return model


@pytest.mark.parametrize("case", CASES, ids=label)
def test_parameters_are_transformers(case: tuple[str, dict[str, Any]]) -> None:
    kind, fields = case
    config = AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = language_model(kind, config)
    shape = read_shape({"model_type": kind, **fields})
    assert shape.is_known
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert shape.parameters() == sum(weight.numel() for weight in (*model.parameters(), *corrections))
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    tables = [table for table in tables if table is not model.get_output_embeddings().weight]
    assert shape.looked_up_parameters == sum(table.numel() for table in tables)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and any(shape.windows):
        assert [window is None for window in shape.windows] == [each == "full_attention" for each in kinds]
    # What Transformers writes into a config.json is read the same.
    assert read_shape(json.loads(config.to_json_string(use_diff=False))) == shape


def test_every_family_is_compared() -> None:
    assert {kind for kind, _ in CASES} == {kind for kind, family in FAMILIES.items() if not family.is_bidirectional}
    assert all(name in ARCHITECTURES for name in RUNNABLE)


def test_the_usual_rotation_is_transformers() -> None:
    runnable = {kind: family for kind, family in FAMILIES.items() if family.is_runnable and kind in CONFIG_MAPPING}
    assert len(runnable) > 5
    for kind, family in runnable.items():
        default = CONFIG_MAPPING[kind].default_theta
        # Gemma 3: of the layers without a window.
        assert family.rope.theta == (default["global"] if isinstance(default, dict) else default), kind


ENGINES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": LLAMA | ROUTED | LATENT | {"first_k_dense_replace": 2},
    "DeepseekV3ForCausalLM": LLAMA | ROUTED | LATENT | {"first_k_dense_replace": 1, "q_lora_rank": None},
    "Llama4ForCausalLM": HEADS | LOCAL | CHUNKS | {"intermediate_size_mlp": 90, "interleave_moe_layer_step": 2},
    "DeepseekV32ForCausalLM": LLAMA | ROUTED | LATENT | INDEX | FIRST_DENSE,
    "LlamaForCausalLM": LLAMA | {"head_dim": 8},
    "MistralForCausalLM": LLAMA | {"head_dim": 8, "sliding_window": 16},
    "Qwen2ForCausalLM": LLAMA | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    "Qwen2_5_VLForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "GPT2LMHeadModel": GPT2,
    "OPTForCausalLM": OPT,
    "MixtralForCausalLM": LLAMA | LOCAL,
    "Qwen2MoeForCausalLM": LLAMA | MOE | {"shared_expert_intermediate_size": 28, "decoder_sparse_step": 2},
    "Qwen3MoeForCausalLM": HEADS | MOE,
    "Qwen3VLForCausalLM": HEADS,
    "Qwen3VLMoeForCausalLM": HEADS | MOE,
    "GptOssForCausalLM": HEADS | LOCAL | {"sliding_window": 16},
    "GemmaForCausalLM": HEADS,
    "Gemma2ForCausalLM": HEADS | {"sliding_window": 16},
    "Gemma3ForCausalLM": HEADS | {"sliding_window": 16, "sliding_window_pattern": 3},
    "Glm4ForCausalLM": HEADS,
    "GlmForCausalLM": HEADS | {"attention_bias": False},
    "GraniteForCausalLM": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "Olmo2ForCausalLM": LLAMA,
    "Olmo3ForCausalLM": LLAMA | {"sliding_window": 16},
    "Phi3ForCausalLM": LLAMA | {"sliding_window": 16},
    "SmolLM3ForCausalLM": LLAMA,
    "Qwen3NextForCausalLM": DELTA
    | MOE
    | {"head_dim": 16, "shared_expert_intermediate_size": 28, "mlp_only_layers": [1]},
    "Qwen3_5ForCausalLM": DELTA | {"head_dim": 16},
    "Qwen3_5MoeForCausalLM": DELTA | MOE | {"head_dim": 16, "shared_expert_intermediate_size": 28},
}


GENERATING = [name for name in RUNNABLE if name.endswith(("ForCausalLM", "LMHeadModel"))]


@pytest.mark.parametrize("architecture", GENERATING)
def test_shapes_are_the_engines_models(tmp_path: Path, architecture: str) -> None:
    """Weights and what every layer keeps, of the shape, of `quire plan` and of the model itself."""
    fields = ENGINES[architecture]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "dtype": "float32", **fields}))
    options = EngineOptions(model=str(tmp_path), load_format="dummy", attention_backend="torch", max_model_len=40)
    config = resolve(options)
    shape = config.model.resolved_shape()
    model = load_model(config.model, config.load, SINGLE_RANK)
    assert shape.weight_bytes() == model.weight_bytes() == 4 * shape.parameters()
    specs = device_specs(shape, config.model.kv_cache_dtype, ParallelConfig())
    assert specs == layer_specs(config.model) == model.cache_specs()
    kept = sum(spec.token_bytes for spec in specs)
    assert shape.kv_bytes_per_token("float32") == kept == plan_engine(config, 2**30, [16]).kv_bytes_per_token
    cost = CostModel(shape, find("h100"), ParallelConfig(), Precision.of(shape, "float32", "float32"))
    assert plan_devices(cost, config, [16], None).kv_bytes_per_token == kept
    for layer, spec in zip(shape.layers, specs, strict=True):
        assert spec.token_bytes == 4 * layer.attention.token_elements()
        assert getattr(spec, "window", None) == layer.attention.window
    assert (shape.max_model_len, shape.windows) == (40, config.model.sliding_windows)


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("opt-125m", 125.2e6, 123.5e6),
        ("opt-13b", 12.853e9, 12.84e9),
        ("opt-66b", 65.72e9, 65.69e9),
        ("opt-175b", 174.6e9, 174.6e9),
        ("llama-7b", 6.738e9, 6.607e9),
        ("llama-2-70b", 68.98e9, 68.71e9),
        ("llama-3-8b", 8.03e9, 7.505e9),
        ("llama-3-70b", 70.55e9, 69.50e9),
        ("llama-3.1-405b", 405.9e9, 403.7e9),
        ("mistral-7b", 7.242e9, 7.111e9),
        ("smollm2-135m", 134.5e6, 134.5e6),
        ("qwen3-0.6b", 596.0e6, 596.0e6),
        ("qwen3-235b-a22b", 235.1e9, 22.19e9 - 622e6),
        ("mixtral-8x7b", 46.70e9, 12.88e9 - 131e6),
        ("qwen2.5-7b", 7.616e9, 7.07e9),
        ("qwen3-8b", 8.191e9, 7.568e9),
        ("qwen3-30b-a3b", 30.53e9, 3.35e9 - 311e6),
        ("gemma-3-27b", 27.01e9, 27.01e9),
        ("gpt-oss-120b", 116.8e9, 5.13e9),
        ("deepseek-v3", 671.0e9, 37.55e9 - 927e6),
        ("kimi-k2", 1026.4e9, 32.86e9 - 1174e6),
    ],
)
def test_published_counts(name: str, parameters: float, active: float) -> None:
    """Model cards count the table of input embeddings among the active parameters; here it is looked up."""
    shape = find_shape(name)
    assert shape.parameters() == pytest.approx(parameters, rel=0.002)
    assert shape.active_parameters() == pytest.approx(active, rel=0.005)


def test_built_in_models_are_of_known_families() -> None:
    assert all(find_shape(name).is_known for name in built_in())


def test_what_is_kept_of_a_token() -> None:
    assert find_shape("opt-13b").kv_bytes_per_token("float16") == 2 * 40 * 5120 * 2  # the paper, section 3
    assert find_shape("llama-3-70b").kv_bytes_per_token("bfloat16", tp=8) == 80 * 2 * 128 * 2
    assert find_shape("llama-3-70b").kv_bytes_per_token("bfloat16", tp=16) == 80 * 2 * 128 * 2  # a head on two devices
    latent = find_shape("deepseek-v3")
    assert latent.kv_bytes_per_token("bfloat16") == latent.kv_bytes_per_token("bfloat16", tp=8) == 61 * (512 + 64) * 2


def test_specs_of_a_hybrid_and_of_latent_attention() -> None:
    specs = device_specs(find_shape("gemma-3-27b"), "bfloat16", ParallelConfig(tp=2, pp=2))
    assert len(specs) == 32  # of 62: the other stage has the output projection
    assert [isinstance(spec, AttentionSpec) for spec in specs[:7]] == [False] * 5 + [True, False]
    assert isinstance(specs[0], SlidingWindowSpec)
    assert (specs[0].window, specs[0].num_kv_heads, specs[0].token_bytes) == (1024, 8, 2 * 8 * 128 * 2)
    assert device_specs(find_shape("deepseek-v3"), "bfloat16", ParallelConfig(tp=8))[0].token_bytes == 576 * 2


@pytest.mark.parametrize(
    ("quantization", "layers", "experts"),
    [
        ({"quant_method": "fp8"}, 1, 1),
        ({"quant_method": "mxfp4"}, 2, 0.53125),
        ({"quant_method": "gptq", "bits": 4}, 0.5, 0.5),
    ],
)
def test_quantised_checkpoints(quantization: dict[str, Any], layers: float, experts: float) -> None:
    fields = {"model_type": "mixtral", "torch_dtype": "bfloat16", **LLAMA, **LOCAL}
    plain = read_shape(fields)
    shape = read_shape(fields | {"quantization_config": quantization})
    tables = plain.parameters() - plain.dense_parameters - plain.routed_parameters
    assert plain.weight_bytes() == 2 * plain.parameters()
    assert shape.weight_bytes() == shape.dense_parameters * layers + shape.routed_parameters * experts + 2 * tables
    assert shape.weight_bytes("float32") == 4 * plain.parameters()


def test_a_model_of_several_modalities_is_its_language_model() -> None:
    inner = HEADS | {"model_type": "gemma3_text", "sliding_window": 16}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": inner}
    assert read_shape(whole).parameters() == read_shape(inner).parameters()


def test_an_unknown_family_is_read_by_its_keys_and_says_so() -> None:
    shape = read_shape(LLAMA | {"model_type": "new", "attention_bias": True})
    assert not shape.is_known
    known = read_shape(LLAMA | {"model_type": "llama", "attention_bias": True})
    assert shape.parameters() == known.parameters()


def test_recurrent_layers_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="recurrent layers"):
        read_shape(LLAMA | {"model_type": "jamba", "mamba_d_state": 16})


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ModelLoadError, match="hidden_size"):
        read_shape({"model_type": "llama"}, "somewhere")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        with pytest.raises(ModelLoadError, match=f"{key} must be an integer of at least 1, not 0"):
            read_shape(LLAMA | {"model_type": "llama", key: 0})
    with pytest.raises(ModelLoadError, match=r"num_attention_heads .6. must be a multiple of num_key_value_heads .4."):
        read_shape(LLAMA | {"model_type": "llama", "num_key_value_heads": 4})
    with pytest.raises(ModelLoadError, match="cannot pick 5 of 4 experts"):
        read_shape(LLAMA | LOCAL | {"model_type": "mixtral", "num_experts_per_tok": 5})
    with pytest.raises(ModelLoadError, match="5 layers"):
        read_shape(LLAMA | {"model_type": "gemma2", "sliding_window": 8, "layer_types": ["full_attention"]})


def test_models_are_found_by_name_and_by_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'llama-3-8b'"):
        find_shape("llama3-8b")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA}))
    by_directory, by_file = find_shape(str(tmp_path)), find_shape(str(tmp_path / "config.json"))
    assert replace(by_directory, name=by_file.name) == by_file
