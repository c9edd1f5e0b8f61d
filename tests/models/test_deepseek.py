"""What checkpoints and configurations of DeepSeek have besides what the families' tests compare."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import ConfigError, ModelLoadError
from tests.models.conftest import SavedModel
from tests.models.families import deepseek_v2, deepseek_v3, deepseek_v32
from tests.models.harness import load, random_prompts, randomize, save

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


@pytest.mark.parametrize("name", ["wq_b.weight", "k_norm.bias", "weights_proj.weight"])
def test_a_damaged_indexer_is_named(name: str, tmp_path: Path) -> None:
    save(randomize(deepseek_v32(num_hidden_layers=2)), tmp_path)
    path, tensor = tmp_path / "model.safetensors", f"model.layers.1.self_attn.indexer.{name}"
    tensors = load_file(path)
    save_file({key: value for key, value in tensors.items() if key != tensor}, path)
    with pytest.raises(ModelLoadError, match=f"{re.escape(repr(tensor))} missing"):
        load(tmp_path)
    save_file(tensors | {tensor: tensors[tensor][:-1].contiguous()}, path)
    with pytest.raises(ModelLoadError, match=f"{re.escape(repr(tensor))} has shape"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"q_lora_rank": None}, "q_lora_rank must not be null"),
        ({"index_topk": 0}, "index_topk"),
        ({"index_head_dim": 4}, r"index_head_dim \(4\) must be at least qk_rope_head_dim \(8\)"),
    ],
)
def test_indexers_that_cannot_be(fields: dict[str, object], message: str, tmp_path: Path) -> None:
    save(deepseek_v32(num_hidden_layers=1), tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises(ModelLoadError, match=message):
        resolve(EngineOptions(model=str(tmp_path)))


def test_an_indexer_that_is_too_large_for_the_native_kernels(tmp_path: Path) -> None:
    save(deepseek_v32(num_hidden_layers=1, index_topk=9000), tmp_path)
    assert resolve(EngineOptions(model=str(tmp_path))).device.attention_backend == "torch"
    with pytest.raises(ConfigError, match="an indexer of 3 heads of 16 elements that chooses 9000 keys"):
        resolve(EngineOptions(model=str(tmp_path), attention_backend="native"))


def test_where_all_keys_are_read_the_model_is_deepseek_v3(tmp_path: Path) -> None:
    """The same weights without the indexer: no bit of the logits differs."""
    sparse, dense = tmp_path / "sparse", tmp_path / "dense"
    for directory in (sparse, dense):
        save(randomize(deepseek_v32(num_hidden_layers=2, index_topk=60)), directory)
    change_config(dense, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3")
    tensors = load_file(dense / "model.safetensors")
    save_file({name: value for name, value in tensors.items() if ".indexer." not in name}, dense / "model.safetensors")
    prompts = random_prompts([60, 61], 97)
    outputs = []
    for directory in (sparse, dense):
        options = {"num_blocks_override": 40, "num_threads": 1, "skip_tokenizer_init": True}
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, detokenize=False)
        with LLM(str(directory), **options) as llm:
            generated = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            outputs.append([output.prompt_logprobs for output in generated])
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][1][:60] == outputs[1][1][:60], "the 61st token reads 60 of its 61 keys"
