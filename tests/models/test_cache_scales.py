"""Scales of an 8-bit KV cache among the tensors of a checkpoint: which they are, and what is no scale."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import ModelLoadError
from quire.kernels.arguments import CacheScale
from quire.models.cache_scales import load_cache_scales
from tests.models.conftest import SavedModel

SavedModels = Callable[[str], SavedModel]


@pytest.fixture
def model_path(saved_model: SavedModels) -> Path:
    return saved_model("qwen3").directory


def config_of(model_path: Path, dtype: str = "fp8", **quantization: Any) -> ModelConfig:
    model = resolve(EngineOptions(model=str(model_path), kv_cache_dtype=dtype, attention_backend="torch")).model
    return replace(model, hf={**model.hf, "quantization_config": quantization})


def loaded(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> tuple[dict[int, CacheScale], list[str]]:
    """The scales of layers 0 and 10, and the names that are passed on."""
    scales = {0: CacheScale(), 10: CacheScale()}
    rest = [name for name, _ in load_cache_scales(iter(tensors.items()), scales, config, "here")]
    return scales, rest


K, V = torch.tensor(0.25), torch.tensor([3.0], dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"model.layers.10.self_attn.k_scale": K, "model.layers.10.self_attn.v_scale": V}, CacheScale(0.25, 3.0)),
        ({"model.layers.10.self_attn.attn.v_scale": V}, CacheScale(1.0, 3.0)),
        ({"layers.10.self_attn.qkv_proj.k_scale": K}, CacheScale(0.25, 1.0)),
        ({"transformer.h.10.attn.kv_scale": V}, CacheScale(3.0, 3.0)),
        ({"a.10.self_attn.k_proj.output_scale": K, "a.10.self_attn.v_proj.v_scale": V}, CacheScale(0.25, 3.0)),
        ({"model.layers.10.self_attn.q_scale": torch.zeros(8)}, CacheScale()),
    ],
)
def test_names(tensors: dict[str, torch.Tensor], expected: CacheScale, model_path: Path) -> None:
    others = {"model.layers.10.self_attn.k_proj.weight_scale": K, "model.layers.10.mlp.v_proj_scale": K}
    scales, rest = loaded(config_of(model_path), tensors | others)
    assert scales == {0: CacheScale(), 10: expected}
    assert rest == list(others)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2), r"'model.layers.0.self_attn.k_scale' is \[2\] of float32: an fp8 cache has one scale"),
        (torch.tensor(3), r"is \[\] of int64"),
        (torch.tensor(-1.0), r"is -1.0, which is no scale"),
        (torch.tensor(torch.inf), r"is inf, which is no scale"),
    ],
)
def test_what_is_no_scale(tensor: torch.Tensor, message: str, model_path: Path) -> None:
    name = "model.layers.0.self_attn.k_scale"
    with pytest.raises(ModelLoadError, match=message):
        loaded(config_of(model_path), {name: tensor})
    assert loaded(config_of(model_path, "bfloat16"), {name: tensor})[0][0] == CacheScale(), "and none is needed"


@pytest.mark.parametrize(
    ("layer", "quantization", "reason"),
    [
        (0, {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "they are for numbers of 4 bits"),
        (0, {"kv_cache_quant_algo": "NVFP4"}, "they are for numbers of NVFP4"),
        (3, {"kv_cache_quant_algo": "FP8"}, "layers without keys and values of each head have none"),
    ],
)
def test_what_is_left_out(
    layer: int, quantization: dict[str, Any], reason: str, model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        scales, rest = loaded(config_of(model_path, **quantization), {f"layers.{layer}.self_attn.k_scale": K})
    assert (scales[0], rest) == (CacheScale(), [])
    assert f"here: 1 scales of an 8-bit KV cache are left out: {reason}" in caplog.text
