"""GGUF files of models with latent attention or delta nets: logits are those of Transformers on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from quire.config.gguf import read_gguf
from quire.errors import ModelLoadError
from quire.models.gguf.weights import GGUFWeights
from quire.quantization.quantized_weight import QuantizedWeight
from tests.fakes.gguf import StoredTensor, typed
from tests.fakes.gguf_layers import write_layers
from tests.models.families import ONE_GROUP, deepseek_v2, deepseek_v3
from tests.models.harness import randomize
from tests.models.hybrid_families import qwen3_5, qwen3_5_moe, qwen3_next
from tests.models.test_gguf import assert_logits

Make = Callable[[], PreTrainedModel]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
MODELS: dict[str, tuple[str, Make]] = {
    "v2": ("deepseek2", lambda: deepseek_v2(topk_method="group_limited_greedy", norm_topk_prob=False)),
    "v2-lite": ("deepseek2", lambda: deepseek_v2(**ONE_GROUP, q_lora_rank=None, routed_scaling_factor=1.0)),
    "v3": ("deepseek2", lambda: deepseek_v3(norm_topk_prob=True, routed_scaling_factor=2.5, rope_parameters=YARN)),
    "v3-tied-all-sparse": (
        "deepseek2",
        lambda: deepseek_v3(tie_word_embeddings=True, first_k_dense_replace=0),
    ),
    "qwen3-next": ("qwen3next", qwen3_next),
    "qwen3.5": ("qwen35", qwen3_5),
    "qwen3.5-as-many-values": ("qwen35", lambda: qwen3_5(linear_num_value_heads=2, tie_word_embeddings=True)),
    "qwen3.5-moe": ("qwen35moe", lambda: qwen3_5_moe(num_hidden_layers=2, full_attention_interval=2)),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, make = MODELS[name]
    model = randomize(make())
    assert_logits(write_layers(model, architecture).write(tmp_path / "model.gguf"), model)


def test_the_two_forms_of_expansion_are_the_same(tmp_path: Path) -> None:
    model = randomize(deepseek_v3())
    assert_logits(write_layers(model, "deepseek2", is_old=True).write(tmp_path / "model.gguf"), model)


def test_layers_behind_the_last_are_left_out(tmp_path: Path) -> None:
    model = randomize(qwen3_5(num_hidden_layers=2, full_attention_interval=2))
    writer = write_layers(model, "qwen35")
    writer.metadata["qwen35.block_count"] = typed(3)
    writer.metadata["qwen35.nextn_predict_layers"] = typed(1)
    writer.tensors["blk.2.nextn.eh_proj.weight"] = StoredTensor(0, (2, 2), bytes(16))
    assert_logits(writer.write(tmp_path / "model.gguf"), model)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantised_columns_of_value_heads_change_places(kind: str, tmp_path: Path) -> None:
    """What leaves the value heads has its columns in another order than Hugging Face's, whatever the blocks."""
    sizes = {"hidden_size": 64, "linear_value_head_dim": 32, "linear_key_head_dim": 32}
    model = randomize(qwen3_5(**sizes, num_hidden_layers=1, full_attention_interval=2))
    writer = write_layers(model, "qwen35", {"ssm_out": kind, "attn_qkv": kind})
    found = dict(GGUFWeights(writer.write(tmp_path / "model.gguf")).stream(lambda done, total: None))
    for name in ("out_proj", "in_proj_qkv"):
        weight = found[f"model.layers.0.linear_attn.{name}.weight"]
        assert isinstance(weight, QuantizedWeight)
        expected = model.state_dict()[f"model.layers.0.linear_attn.{name}.weight"]
        step = expected.abs().max() / (127 if kind == "Q8_0" else 7)
        assert torch.allclose(weight.dequantize(), expected, atol=float(step))


def test_quantised_expansions_stay_integers(tmp_path: Path) -> None:
    model = randomize(deepseek_v3(qk_nope_head_dim=32, kv_lora_rank=64))
    writer = write_layers(model, "deepseek2", {"attn_k_b": "Q8_0", "attn_v_b": "Q8_0"})
    found = dict(GGUFWeights(writer.write(tmp_path / "model.gguf")).stream(lambda done, total: None))
    whole = model.state_dict()["model.layers.0.self_attn.kv_b_proj.weight"].view(6, -1, 64)
    for head in range(6):
        keys = found[f"model.layers.0.self_attn.k_b_proj.{head}.weight"]
        assert isinstance(keys, QuantizedWeight)
        assert torch.allclose(keys.dequantize(), whole[head, :32].t(), atol=float(whole.abs().max()) / 127)


WRONG: dict[str, tuple[str, Make, dict[str, object], str]] = {
    "scores": ("deepseek2", deepseek_v3, {"expert_gating_func": 4}, "expert_gating_func 4 is not supported"),
    "extra": ("deepseek2", deepseek_v3, {"nextn_predict_layers": 3}, "nextn_predict_layers is 3, and there are 3"),
    "heads": ("deepseek2", deepseek_v3, {"attention.key_length_mla": 8}, "heads of 8 elements cannot have 8"),
    "temperature": (
        "deepseek2",
        deepseek_v3,
        {"attention.temperature_scale": 0.5},
        "attention.temperature_scale 0.5 is not supported",
    ),
    "latent": ("deepseek2", deepseek_v3, {"attention.kv_lora_rank": 40}, r"'blk.0.attn_kv_a_mqa.weight' has shape"),
    "values": ("qwen35", qwen3_5, {"ssm.time_step_rank": 3}, "3 value heads of 2 key heads cannot share 160"),
    "layers": ("qwen35", qwen3_5, {"attention.recurrent_layers": [True]}, "recurrent_layers must say of each of the 4"),
    "other layers": (
        "qwen35",
        qwen3_5,
        {"attention.recurrent_layers": [False] * 4},
        r"'blk.0.attn_q.weight' is missing",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_cannot_be_a_model(name: str, tmp_path: Path) -> None:
    architecture, make, keys, message = WRONG[name]
    writer = write_layers(make(), architecture)
    writer.metadata |= {f"{architecture}.{key}": typed(value) for key, value in keys.items()}
    with pytest.raises(ModelLoadError, match=message):
        read_gguf(writer.write(tmp_path / "model.gguf"))


def test_a_rate_that_grows_is_no_rate(tmp_path: Path) -> None:
    writer = write_layers(qwen3_5(num_hidden_layers=1), "qwen35")
    writer.tensors["blk.0.ssm_a"] = StoredTensor(0, (4,), bytes(16))
    with pytest.raises(ModelLoadError, match=r"tensor 'blk.0.ssm_a' must be negative"):
        list(GGUFWeights(writer.write(tmp_path / "model.gguf")).stream(lambda done, total: None))
