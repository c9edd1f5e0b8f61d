"""Random adapters in PEFT's layout, and models that have one merged into their matrices."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

PREFIX = "base_model.model."
Tensors = dict[str, torch.Tensor]


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """What PEFT calls all linear layers: all but the head."""
    found = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear | Conv1D)}
    return {name: each for name, each in found.items() if "lm_head" not in name}


def write_adapter(
    model: PreTrainedModel,
    directory: Path,
    *,
    rank: int = 8,
    seed: int = 1,
    targets: Callable[[str], bool] = lambda name: True,
    rank_of: Callable[[str], int | None] = lambda name: None,
    dtype: torch.dtype = torch.float32,
    tables: Sequence[str] = (),
    **config: Any,
) -> Path:
    """Write an adapter of the model's linear layers. targets: of the names of modules; rank_of: None: `rank`. tables:
    "head", "embedding": of these too. config: keys of adapter_config.json over the usual ones."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, module in linear_modules(model).items():
        if not targets(name):
            continue
        inputs, outputs = module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1]
        own = rank_of(name) or rank
        a = torch.randn(own, inputs, generator=generator) * inputs**-0.5
        b = torch.randn(outputs, own, generator=generator) * 0.3
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a.to(dtype)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b.to(dtype)
    generator.manual_seed(seed + 1000)  # tables are drawn apart
    rows, size = model.get_input_embeddings().weight.shape
    if "head" in tables:
        a, b = torch.randn(rank, size, generator=generator) * size**-0.5, torch.randn(rows, rank, generator=generator)
        tensors |= {f"{PREFIX}lm_head.lora_A.weight": a.to(dtype), f"{PREFIX}lm_head.lora_B.weight": b.to(dtype) * 0.3}
    if "embedding" in tables:
        name = embedding_name(model)
        tensors[f"{PREFIX}{name}.lora_embedding_A"] = torch.randn(rank, rows, generator=generator).to(dtype)
        tensors[f"{PREFIX}{name}.lora_embedding_B"] = torch.randn(size, rank, generator=generator).to(dtype) * 0.3
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": None, "bias": "none", **config}
    return write(directory, tensors, given)


def embedding_name(model: PreTrainedModel) -> str:
    own = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is own)


def write(directory: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged(model: PreTrainedModel, directory: Path, factor: float = 1.0) -> PreTrainedModel:
    """The model in float64 with W + factor s B A for every W of the adapter; patterns are names of modules here."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    whole = deepcopy(model).double()
    modules = linear_modules(whole)
    head, table = whole.get_output_embeddings(), whole.get_input_embeddings()
    if f"{PREFIX}lm_head.lora_A.weight" in tensors:
        modules["lm_head"] = head
    if head is not None:  # as in PEFT, what is added to one of a tied pair is not added to the other
        head.weight = nn.Parameter(head.weight.detach().clone())
    for name, a in tensors.items():
        if name.endswith(".lora_embedding_A"):
            b = tensors[name[:-1] + "B"]
            scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
            with torch.no_grad():
                table.weight += factor * scale * (b.double() @ a.double()).T
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        last = module.rpartition(".")[2]
        rank = config.get("rank_pattern", {}).get(last, config["r"])
        alpha = config.get("alpha_pattern", {}).get(last, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        delta = factor * scale * tensors[f"{PREFIX}{module}.lora_B.weight"].double() @ a.double()
        weight = modules[module].weight
        with torch.no_grad():
            weight += delta.T if isinstance(modules[module], Conv1D) else delta
    return whole
