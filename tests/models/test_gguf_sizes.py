"""The memory that a GGUF file's weights take, counted from its header, against what loading asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.quantization import QuantizationConfig
from quire.config.resolve import resolve
from quire.kernels.cpu.packing import Arena
from quire.kernels.cpu.runtime import NativeRuntime
from quire.models.gguf.sizes import packed_weight_bytes
from quire.models.loader import load_model
from quire.parallel.single import SINGLE_RANK
from quire.quantization import packed
from quire.utils.gguf import GGUFFile
from tests.fakes.gguf import GGUFWriter
from tests.fakes.gguf_layers import write_layers
from tests.fakes.gguf_model import MIXED, WIDE, to_gguf
from tests.long import all_but_long
from tests.models.families import deepseek_v3, gpt_oss, llama, qwen3, qwen3_moe
from tests.models.harness import randomize
from tests.models.hybrid_families import qwen3_5
from tests.models.test_gguf import add_extras

SIZES = {**WIDE, "vocab_size": 128, "num_hidden_layers": 1}
"""Sizes that blocks and panels divide."""
EXPERTS = {"hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 1}
WIDE_EXPERTS = {**EXPERTS, "hidden_size": 256, "moe_intermediate_size": 32, "num_experts": 4}
THREE_TYPES = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q6_K", "ffn_down_exps": "Q8_0"}
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def every(kind: str, **others: str) -> dict[str, str]:
    return dict.fromkeys(("token_embd", "output", *MATRICES), kind) | others


def dense(model: PreTrainedModel, architecture: str, types: dict[str, str]) -> GGUFWriter:
    writer, _ = to_gguf(randomize(model), architecture, types)
    add_extras(writer, architecture, model)
    return writer


def latent(*, is_old: bool) -> GGUFWriter:
    heads = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    sizes = {**heads, **EXPERTS, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 32}
    types = {"attn_k_b": "Q8_0", "attn_v_b": "Q4_0", "attn_kv_b": "Q8_0"}
    return write_layers(randomize(deepseek_v3(**{**sizes, "num_hidden_layers": 2})), "deepseek2", types, is_old=is_old)


def states() -> GGUFWriter:
    sizes = {"hidden_size": 64, "linear_value_head_dim": 32, "linear_key_head_dim": 32, "vocab_size": 128}
    model = qwen3_5(**sizes, intermediate_size=96, num_hidden_layers=2, full_attention_interval=2)
    return write_layers(randomize(model), "qwen35", {"ssm_out": "Q4_0", "attn_qkv": "Q8_0", "ffn_down": "Q8_0"})


FILES: dict[str, Callable[[], GGUFWriter]] = {
    "every type": lambda: dense(llama(**SIZES), "llama", MIXED),
    "Q4_K beside Q6_K": lambda: dense(
        qwen3(**SIZES, head_dim=64), "qwen3", every("Q4_K", attn_v="Q6_K", output="Q6_K")
    ),
    "Q4_0 beside Q8_0": lambda: dense(llama(**SIZES), "llama", every("Q4_0", attn_k="Q8_0", ffn_up="Q8_0")),
    "Q8_0": lambda: dense(llama(**SIZES, tie_word_embeddings=True), "llama", every("Q8_0")),
    "floating point": lambda: dense(llama(**SIZES), "llama", every("F16")),
    "MXFP4 experts": lambda: dense(gpt_oss(**EXPERTS, intermediate_size=32), "gpt-oss", {"experts": "MXFP4"}),
    "Q4_0 experts": lambda: dense(
        qwen3_moe(**EXPERTS, moe_intermediate_size=32, num_experts=32), "qwen3moe", {"experts": "Q4_0"}
    ),
    "experts of three types": lambda: dense(qwen3_moe(**{**WIDE_EXPERTS, "num_experts": 32}), "qwen3moe", THREE_TYPES),
    "latents": lambda: latent(is_old=False),
    "latents of an old file": lambda: latent(is_old=True),
    "states": states,
}


LONG = ("Q4_K beside Q6_K", "experts of three types")


@pytest.mark.parametrize("name", all_but_long(FILES, [name for name in FILES if name not in LONG]))
def test_a_file_takes_what_is_counted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FILES[name]().write(tmp_path / "model.gguf")
    assert_counted(path, described(path), monkeypatch)


@pytest.mark.parametrize(("method", "group_size"), [("int8", None), ("int4", 32), ("w8a8", None), ("mxfp4", 32)])
def test_what_is_quantised_while_it_is_loaded(
    method: str, group_size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of floating point are; those that the file has in blocks stay what they are."""
    types = every("F32", ffn_down="Q4_K", attn_k="F16")
    path = dense(llama(**SIZES), "llama", types).write(tmp_path / "model.gguf")
    quantization = QuantizationConfig(method=method, group_size=group_size)
    assert_counted(path, replace(described(path), quantization=quantization), monkeypatch)


def test_layers_behind_the_last_are_not_counted(tmp_path: Path) -> None:
    writer = dense(llama(**SIZES), "llama", every("Q8_0"))
    alone = writer.write(tmp_path / "alone.gguf")
    config = described(alone)
    writer.tensors |= {
        name.replace("blk.0.", "blk.1."): each for name, each in writer.tensors.items() if "blk.0." in name
    }
    assert counted_bytes(writer.write(tmp_path / "more.gguf"), config) == counted_bytes(alone, config)


def counted_bytes(path: Path, config: ModelConfig) -> int:
    with GGUFFile(path) as file:
        return packed_weight_bytes(file, config)


def test_a_header_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is one reading, and the weights with what they take are another: a vocabulary of 150,000
    tokens takes longer to pass than its model to record."""
    path = dense(llama(**SIZES), "llama", every("Q8_0")).write(tmp_path / "model.gguf")
    opened: list[Path] = []
    whole = GGUFFile.__init__
    monkeypatch.setattr(GGUFFile, "__init__", lambda file, path: (opened.append(path), whole(file, path))[1])
    resolve(EngineOptions(model=str(path)))
    assert opened == [path]
    opened.clear()
    config = described(path)
    assert opened == [path]
    load_model(config, LoadConfig("auto", 0), SINGLE_RANK, runtime=NativeRuntime("auto", 1))
    assert opened == [path, path]


def described(path: Path) -> ModelConfig:
    return load_model_config(str(path), dtype="auto", max_model_len=None, revision=None, config_only=False)


def assert_counted(path: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class CountingArena(Arena):
        def allocate(self, num_bytes: int) -> torch.Tensor:
            asked.append(num_bytes)
            return super().allocate(num_bytes)

    monkeypatch.setattr(packed, "Arena", CountingArena)
    model = load_model(config, LoadConfig("auto", 0), SINGLE_RANK, runtime=NativeRuntime("auto", 1))
    counted = counted_bytes(path, config)
    assert model.weight_bytes() == counted
    with GGUFFile(path) as file:  # vectors lie outside
        vectors = [entry for name, entry in file.tensors.items() if len(entry.shape) == 1 or "conv1d" in name]
        outside = sum(4 * math.prod(entry.shape) for entry in vectors)
    assert sum(asked) == pytest.approx(counted - outside, rel=0.03)
