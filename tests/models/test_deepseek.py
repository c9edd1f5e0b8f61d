"""What checkpoints and configurations of DeepSeek have besides what the families' tests compare."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import ConfigError, ModelLoadError
from tests.models.conftest import SavedModel
from tests.models.families import deepseek_v2, deepseek_v3
from tests.models.harness import load, randomize, save

SavedModels = Callable[[str], SavedModel]


def change_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(randomize(deepseek_v3(num_hidden_layers=2)), tmp_path)
    change_config(tmp_path, num_nextn_predict_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(4, 8), "model.layers.2.mlp.gate.weight": torch.zeros(8, 4)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO):
        load(tmp_path)
    assert caplog.text.count("2 tensors of layers that predict further tokens are left out") == 1
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.3\.eh_proj\.weight' does not belong to this model"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob must be false"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ({"topk_method": "group_limited_greedy", "n_group": 3}, r"n_group \(3\) must divide the 8 experts"),
    ],
)
def test_choices_of_experts_that_are_not_computed(fields: dict[str, object], message: str, tmp_path: Path) -> None:
    save(randomize(deepseek_v2(num_hidden_layers=2)), tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_latents_are_not_kept_in_8_bits(saved_model: SavedModels) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8' is not available for latent attention") as told:
        resolve(EngineOptions(model=str(saved_model("deepseek-v3").directory), kv_cache_dtype="int8"))
    assert told.value.param == "kv_cache_dtype"


def test_latents_that_native_kernels_have_no_room_for_run_on_torch(tmp_path: Path) -> None:
    save(deepseek_v3(num_hidden_layers=1, kv_lora_rank=44), tmp_path)
    assert resolve(EngineOptions(model=str(tmp_path))).device.attention_backend == "torch"
    with pytest.raises(ConfigError, match=r"latents of 44 \+ 8 elements are not a multiple of 8"):
        resolve(EngineOptions(model=str(tmp_path), attention_backend="native"))
