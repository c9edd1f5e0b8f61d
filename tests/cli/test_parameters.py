"""Parameter counts against Transformers' own models, and headers against real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quire.cli.parameters import count_parameters, read_checkpoint
from quire.config.hf_config import FAMILIES, load_model_config
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from tests.fakes.gguf import TYPE_NUMBERS, GGUFWriter, StoredTensor

LLAMA = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OPT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 101, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaForCausalLM", "llama", LLAMA),
    ("LlamaForCausalLM", "llama", LLAMA | {"tie_word_embeddings": True, "head_dim": 10}),
    ("LlamaForCausalLM", "llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    ("MistralForCausalLM", "mistral", LLAMA | {"sliding_window": 16}),
    ("Qwen2ForCausalLM", "qwen2", LLAMA | {"tie_word_embeddings": True}),
    ("Qwen3ForCausalLM", "qwen3", LLAMA | {"head_dim": 16}),
    ("Qwen3ForCausalLM", "qwen3", LLAMA | {"head_dim": 16, "attention_bias": True}),
    ("GPT2LMHeadModel", "gpt2", GPT2),
    ("GPT2LMHeadModel", "gpt2", GPT2 | {"n_inner": 100, "tie_word_embeddings": False}),
    ("OPTForCausalLM", "opt", OPT),
    ("OPTForCausalLM", "opt", OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("OPTForCausalLM", "opt", OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("OPTForCausalLM", "opt", OPT | {"_remove_final_layer_norm": True, "tie_word_embeddings": False}),
]


def written(directory: Path, architecture: str, model_type: str, fields: dict[str, Any]) -> ModelConfig:
    config = {"architectures": [architecture], "model_type": model_type, **fields}
    (directory / "config.json").write_text(json.dumps(config))
    return load_model_config(str(directory), dtype="auto", max_model_len=None, revision=None, config_only=True)


@pytest.mark.parametrize(("architecture", "model_type", "fields"), CASES)
def test_counts_are_transformers(tmp_path: Path, architecture: str, model_type: str, fields: dict[str, Any]) -> None:
    config = written(tmp_path, architecture, model_type, fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    count = count_parameters(config)
    assert count.total == sum(parameter.numel() for parameter in model.parameters())
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    looked_up = [t for t in tables if not (tied and t is model.get_input_embeddings())]
    assert count.looked_up == sum(table.weight.numel() for table in looked_up)
    assert count.read_per_step == count.total - count.looked_up


def test_every_known_architecture_is_counted() -> None:
    assert {architecture for architecture, _, _ in CASES} == set(FAMILIES)


def test_headers_are_summed_by_dtype(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "two.safetensors", metadata={"x": "y"})
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.num_files == 2
    assert checkpoint.elements == {"F32": 15, "BF16": 9}
    assert checkpoint.bytes == {"F32": 60, "BF16": 18}


def test_a_gguf_file_is_summed_by_type(tmp_path: Path) -> None:
    tensors = {
        "a": StoredTensor(TYPE_NUMBERS["F32"], (3, 5), bytes(60)),
        "b": StoredTensor(TYPE_NUMBERS["Q8_0"], (2, 64), bytes(136)),
        "c": StoredTensor(TYPE_NUMBERS["Q8_0"], (32,), bytes(34)),
    }
    path = GGUFWriter({}, tensors).write(tmp_path / "model.gguf")
    checkpoint = read_checkpoint(path)
    assert checkpoint is not None
    assert (checkpoint.format, checkpoint.num_files) == ("GGUF", 1)
    assert checkpoint.elements == {"F32": 15, "Q8_0": 160}
    assert checkpoint.bytes == {"F32": 60, "Q8_0": 170}
    assert read_checkpoint(tmp_path) == checkpoint
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    beside = read_checkpoint(tmp_path)
    assert beside is not None
    assert beside.format == "safetensors"


def test_no_files_is_none(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05\x00",
        b"\x10\x00\x00\x00\x00\x00\x00\x00{}",
        b"\xff" * 16,
        b'\x07\x00\x00\x00\x00\x00\x00\x00{"a":1}',
        b'\x29\x00\x00\x00\x00\x00\x00\x00{"a":{"dtype":"F3","shape":[2],"x":"123"}}',
    ],
)
def test_corrupt_headers_name_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"bad\.safetensors"):
        read_checkpoint(tmp_path)
