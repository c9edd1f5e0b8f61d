"""Adapters in GGUF files: the matrices of the same adapter in PEFT's layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from quire.adapter_orders import AdapterRef
from quire.config.adapter_files import content_digest, open_adapter
from quire.errors import ModelLoadError, UserError
from quire.models.adapters import ModelAdapters
from tests.e2e.test_expert_adapters import usual_names
from tests.fakes.adapters import PREFIX, write_adapter
from tests.models.families import llama, qwen3, qwen3_moe
from tests.models.harness import randomize, save
from tests.models.test_adapters import LIMITS, adapters_of

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def to_gguf(
    directory: Path,
    path: Path,
    architecture: str,
    heads: dict[str, int],
    *,
    alpha: float | None = 16.0,
    kind: str = "lora",
    rename: Callable[[str], str] = lambda name: name,
    **keys: Any,
) -> Path:
    """Write a directory's adapter with gguf's own writer, as llama.cpp's script does. heads: of matrices whose rotated
    pairs it puts side by side."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", kind)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for key, value in keys.items():
        writer.add_array(key, value)
    stacks: dict[str, list[np.ndarray]] = {}
    tensors = load_file(directory / "adapter_model.safetensors")
    for name in sorted(tensors, key=lambda name: [int(each) for each in re.findall(r"\d+", name)]):
        tensor = tensors[name]
        layer, _, module = name.removeprefix(f"{PREFIX}model.layers.").partition(".")
        module, _, part = module.removesuffix(".weight").rpartition(".lora_")
        values = tensor.numpy()
        if part == "B" and module in heads:
            count = heads[module]
            values = values.reshape(count, 2, len(values) // count // 2, -1).swapaxes(1, 2).reshape(values.shape)
        own = f"blk.{layer}.{NAMES[re.sub('experts.[0-9]+', 'experts', module)]}.weight.lora_{part.lower()}"
        stacks.setdefault(rename(own), []).append(values)
    for own, found in stacks.items():
        writer.add_tensor(own, np.ascontiguousarray(np.stack(found) if "_exps" in own else found[0]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(adapters: ModelAdapters, path: Path) -> list[Any]:
    """What is stored: A, B and scale by layer and piece."""
    adapters.load(1, AdapterRef(str(path), content_digest(path)))
    return [stack.stored[1] for stack, _ in adapters.layers.stacks if 1 in stack.stored]


def small(architecture: str) -> tuple[PreTrainedModel, dict[str, int]]:
    if architecture == "qwen3moe":
        return randomize(qwen3_moe()), {}
    if architecture == "llama":
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}
        return randomize(llama(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)), heads
    return randomize(qwen3(num_hidden_layers=2)), {}


@pytest.mark.parametrize("alpha", [16.0, None])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3moe"])
def test_the_matrices_of_peft(architecture: str, alpha: float | None, tmp_path: Path) -> None:
    """Ranks may differ, and without alpha scales are 1. A layer's experts lie in one tensor."""
    model, heads = small(architecture)
    adapters = adapters_of(save(model, tmp_path / "base"))
    ranks: dict[str, Any] = {"rank": 8, "rank_of": lambda name: 3 if name.endswith("up_proj") else None}
    if architecture == "qwen3moe":
        ranks = {"rank": 8, "rank_of": lambda name: 3 if name.endswith("v_proj") else None, "experts": usual_names}
    pattern = {"v_proj" if architecture == "qwen3moe" else "up_proj": 3}
    plain = write_adapter(model, tmp_path / "peft", rank_pattern=pattern, lora_alpha=16, **ranks)
    wanted = load(adapters, plain)
    path = to_gguf(plain, tmp_path / "adapter.gguf", architecture, heads, alpha=alpha)
    assert open_adapter(str(path), LIMITS).digest == content_digest(path)
    found = load(adapters, path)
    assert len(found) == len(wanted) > 0
    for own, other in zip(found, wanted, strict=True):
        for piece, matrices in other.items():
            assert torch.equal(own[piece].a, matrices.a)
            assert all(map(torch.equal, own[piece].b, matrices.b))
            assert own[piece].scale == (1.0 if alpha is None else matrices.scale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "control"}, "adapter.type is 'control'"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, "aLoRA"),
        ({"rename": lambda name: name.replace("attn_q", "attn_x")}, "does not belong to a model of its architecture"),
        ({"rename": lambda name: name.replace(".lora_b", ".lora_c")}, "is no matrix of an adapter"),
        ({"rename": lambda name: name.replace("ffn_up", "ffn_up_exps")}, "is no matrix|does not belong"),
        ({"rename": lambda name: name.replace("blk.1.attn_v.weight.lora_a", "blk.5.attn_v.weight.lora_a")}, "missing"),
    ],
)
def test_refusals(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model, heads = small("qwen3")
    plain = write_adapter(model, tmp_path / "peft")
    path = to_gguf(plain, tmp_path / "adapter.gguf", "qwen3", heads, **options)
    with pytest.raises(UserError, match=message):
        open_adapter(str(path), LIMITS)


def test_files_of_other_content(tmp_path: Path) -> None:
    """Models are no adapters, nor are files that are cut off; a layer that the model lacks is named."""
    model, heads = small("qwen3")
    adapters = adapters_of(save(model, tmp_path / "base"))
    plain = write_adapter(model, tmp_path / "peft")
    path = to_gguf(plain, tmp_path / "a.gguf", "qwen3", heads, rename=lambda name: name.replace("blk.1.", "blk.7."))
    with pytest.raises(ModelLoadError, match=r"layers\.7.*does not belong to this model"):
        load(adapters, path)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match=r"cut\.gguf"):
        open_adapter(str(cut), LIMITS)
    wide = write_adapter(model, tmp_path / "wide", rank=17)
    with pytest.raises(UserError, match="rank 17 needs max_lora_rank"):
        open_adapter(str(to_gguf(wide, tmp_path / "wide.gguf", "qwen3", heads)), LIMITS)
