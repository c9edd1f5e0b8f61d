"""Checkpoints whose experts are quantised, and what is said of experts that are missing or broken."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from quire.config.load import LoadConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import ModelLoadError
from quire.kernels.cpu.runtime import NativeRuntime
from quire.models.loader import load_model
from quire.parallel.single import SINGLE_RANK
from tests.models.families import deepseek_v3, gpt_oss, qwen3_moe
from tests.models.harness import randomize, save
from tests.models.test_quantized_checkpoints import FORMATS, VOCABULARY, change_config, greedy, write_pair
from tests.quantization.float_packers import mxfp4

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": 4}
NUM_EXPERTS = 4


def tiny_qwen3_moe() -> PreTrainedModel:
    experts = {"moe_intermediate_size": 32, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
    return randomize(qwen3_moe(**SIZES, **experts, norm_topk_prob=True))


@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "pack-quantized"])
def test_experts_of_quantised_checkpoints(name: str, tmp_path: Path) -> None:
    packed, plain = write_pair(tmp_path, tiny_qwen3_moe(), *FORMATS[name])
    assert greedy(packed) == greedy(plain)


def test_the_experts_of_kimi_in_4_bits(tmp_path: Path) -> None:
    """Kimi-K2 Thinking and K2.5: compressed-tensors' packed groups of 32 for routed experts, all else as it was."""
    quantization, settings, pack = FORMATS["pack-quantized"]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 96, "kv_lora_rank": 64, "v_head_dim": 32}
    model = randomize(deepseek_v3(**sizes))
    packed, plain = write_pair(tmp_path, model, quantization, settings, pack)
    assert greedy(packed) == greedy(plain)
    # What is not routed is in 16 bits.
    weights, tensors = load_file(plain / "model.safetensors"), load_file(packed / "model.safetensors")
    stored = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." in name}
    stored |= {name: tensor for name, tensor in weights.items() if ".mlp.experts." not in name}
    save_file(stored, packed / "model.safetensors")
    assert greedy(packed) == greedy(plain)


def test_the_experts_of_gpt_oss_as_they_are_stored(tmp_path: Path) -> None:
    """Blocks and scales of MXFP4 are [expert, out, in], what Transformers saves is [expert, in, out]."""
    model = randomize(gpt_oss(**SIZES, intermediate_size=96, num_local_experts=NUM_EXPERTS))
    plain = save(model, tmp_path / "plain")
    packed = Path(shutil.copytree(plain, tmp_path / "packed"))
    weights = load_file(plain / "model.safetensors")
    tensors, dense = dict(weights), dict(weights)
    for seed, name in enumerate(sorted(name for name in weights if name.endswith(("gate_up_proj", "down_proj")))):
        _, columns, rows = weights[name].shape
        parts = [mxfp4(rows, columns, 100 * seed + expert) for expert in range(NUM_EXPERTS)]
        del tensors[name]
        blocks = torch.stack([stored["weight_packed"] for stored, _ in parts])
        tensors[f"{name}_blocks"] = blocks.unflatten(2, (columns // 32, 16))
        tensors[f"{name}_scales"] = torch.stack([stored["weight_scale"] for stored, _ in parts])
        dense[name] = torch.stack([meaning.float().T for _, meaning in parts]).contiguous()
    save_file(tensors, packed / "model.safetensors")
    save_file(dense, plain / "model.safetensors")
    change_config(packed, {"quant_method": "mxfp4"})
    assert greedy(packed) == greedy(plain)


def load(directory: Path, **options: object) -> None:
    config = resolve(EngineOptions(model=str(directory), dtype="float32", **options))
    load_model(config.model, LoadConfig("auto", 0), SINGLE_RANK, runtime=NativeRuntime("auto", 1))


def test_an_expert_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    file = save(tiny_qwen3_moe(), tmp_path) / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file({key: tensor for key, tensor in weights.items() if key != name}, file)
    with pytest.raises(ModelLoadError, match=f"'{name}' missing"):
        load(tmp_path)
    save_file({**weights, name: weights[name][:-1].contiguous()}, file)
    with pytest.raises(ModelLoadError, match=rf"'{name}' has shape \[31, 64\]"):
        load(tmp_path)
    save_file({**weights, name: weights[name] * torch.nan}, file)
    with pytest.raises(ModelLoadError, match=f"'{name}': holds .* NaN"):
        load(tmp_path, quantization="int4")


def test_an_expert_inside_a_tensor_of_all_is_named(tmp_path: Path) -> None:
    file = save(randomize(gpt_oss(**SIZES, intermediate_size=96)), tmp_path) / "model.safetensors"
    weights, name = load_file(file), "model.layers.0.mlp.experts.down_proj"
    weights[name][3, 0, 0] = torch.nan
    save_file(weights, file)
    with pytest.raises(ModelLoadError, match=f"'{name}': expert 3: holds .* NaN"):
        load(tmp_path, quantization="int8")
