"""Modules of Transformers that are known by their code, and what is computed ahead for several of them."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig, LlamaMLP, LlamaRMSNorm
from transformers.models.seed_oss.modeling_seed_oss import SeedOssConfig, SeedOssMLP
from transformers.models.stablelm.modeling_stablelm import StableLmAttention, StableLmConfig

from quire.models.recognized_code import Rotate, own_mlp, own_norm, replace_rotation
from quire.models.shared_inputs import Columns, Producer, SharedInput, Taker

LLAMA = LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, vocab_size=9)


def copied_norm(folder: Path, name: str, written: str, instead: str) -> nn.Module:
    """Llama's norm with one piece of its code written otherwise, from a file as Transformers' are."""
    source = inspect.getsource(LlamaRMSNorm.forward)
    assert written in source
    lines = ["import torch", "from torch import nn", "class Norm(nn.Module):", source.replace(written, instead)]
    (folder / f"{name}.py").write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    norm = module.Norm()
    norm.weight, norm.variance_epsilon = nn.Parameter(torch.ones(16)), 1e-5
    return cast("nn.Module", norm)


def test_one_operation_makes_another_function(tmp_path: Path) -> None:
    epsilon = "self.variance_epsilon"
    assert own_norm(copied_norm(tmp_path, "same", epsilon, epsilon)) is not None
    assert own_norm(copied_norm(tmp_path, "annotated", ": torch.Tensor", ": object")) is not None
    assert own_norm(copied_norm(tmp_path, "shifted", f"+ {epsilon}", f"- {epsilon}")) is None


def test_norms_are_known_by_their_code() -> None:
    assert own_norm(LlamaRMSNorm(16)) is not None
    assert own_norm(nn.LayerNorm(16)) is not None
    for other in (GemmaRMSNorm(16), nn.LayerNorm((4, 4)), nn.Linear(16, 16), nn.SiLU()):
        assert own_norm(other) is None


def test_gated_blocks_are_known_by_their_code() -> None:
    assert own_mlp(LlamaMLP(LLAMA)) is not None
    assert own_mlp(SeedOssMLP(SeedOssConfig(hidden_size=16, intermediate_size=24))) is None, "it drops out"
    unusual = LlamaMLP(LLAMA)
    unusual.act_fn = nn.Mish()
    assert own_mlp(unusual) is None
    assert own_mlp(nn.Linear(16, 16)) is None


def test_a_rotation_is_replaced_in_one_module() -> None:
    """Others, and the function itself, stay."""
    asked: list[Rotate] = []

    def replaced(known: Rotate) -> Rotate:
        asked.append(known)
        return known

    module, other = LlamaAttention(LLAMA, 0), LlamaAttention(LLAMA, 1)
    assert replace_rotation(module, replaced)
    assert asked == [modeling_llama.apply_rotary_pos_emb]
    assert "forward" in vars(module)
    assert "forward" not in vars(other)
    assert not replace_rotation(LlamaMLP(LLAMA), replaced)
    assert replace_rotation(StableLmAttention(StableLmConfig(hidden_size=64, num_attention_heads=2), 0), replaced)


def shared_double_and_triple() -> tuple[SharedInput, list[int], Taker, Taker]:
    computed: list[int] = []

    def compute(x: torch.Tensor) -> list[torch.Tensor]:
        computed.append(len(x))
        return [torch.cat([2 * x, 3 * x], dim=1)]

    shared = SharedInput(compute)
    return shared, computed, Taker(shared, Columns(0, 0, 4)), Taker(shared, Columns(0, 4, 4))


def test_two_modules_of_one_tensor_are_computed_once() -> None:
    _, computed, double, triple = shared_double_and_triple()
    x = torch.randn(1, 3, 4)
    assert torch.equal(double(x), 2 * x)
    assert torch.equal(triple(x.view(3, 4)), 3 * x[0])
    assert computed == [3]
    assert torch.equal(triple(x), 3 * x), "asked for again, it is computed again"
    assert computed == [3, 3]


def test_another_tensor_is_computed_for_itself() -> None:
    _, computed, double, triple = shared_double_and_triple()
    x, y = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    assert torch.equal(double(x), 2 * x)
    assert torch.equal(triple(y), 3 * y)
    assert torch.equal(double(x[:, :2]), 2 * x[:, :2]), "a part of it begins at the same address"
    assert computed == [3, 3, 2]


def test_what_follows_a_norm_is_computed_with_it() -> None:
    shared, computed, double, triple = shared_double_and_triple()
    norm = Producer(lambda x: [x + 1, torch.cat([2 * (x + 1), 3 * (x + 1)], dim=1)], shared)
    x = torch.randn(1, 3, 4)
    normed = norm(x)
    assert torch.equal(double(normed), 2 * (x + 1))
    assert torch.equal(triple(normed), 3 * (x + 1))
    assert computed == []
