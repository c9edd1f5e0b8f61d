"""Random adapters in PEFT's layout, and models that have one merged into their matrices."""

from __future__ import annotations

import json
import math
import re
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
STACKED = {"gate_up_proj": "experts.base_layer", "down_proj": "experts"}
"""Parameters of Transformers with all experts of a layer -> the end of the module in PEFT's files."""


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
    tables: Sequence[str] = (),
    experts: Callable[[str, int], dict[str, str]] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of the model's linear layers. targets: of the names of modules; rank_of: None: `rank`. tables:
    "head", "embedding": of these too. experts: `stacked_names`, or the modules of one expert by "gate", "up",
    "down", from its layer's module and its number. config: keys of adapter_config.json over the usual ones; the modules
    of modules_to_save are whole."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, module in linear_modules(model).items():
        if not targets(name):
            continue
        if name.partition(".")[0] in (config.get("modules_to_save") or ()):
            for part, whole in module.named_parameters():
                tensors[f"{PREFIX}{name}.{part}"] = torch.randn(whole.shape, generator=generator) * 0.3
            continue
        inputs, outputs = module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1]
        own = rank_of(name) or rank
        a = torch.randn(own, inputs, generator=generator) * inputs**-0.5
        b = torch.randn(outputs, own, generator=generator) * 0.3
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b
    generator.manual_seed(seed + 1000)  # tables are drawn apart
    rows, size = model.get_input_embeddings().weight.shape
    if "head" in tables:
        a, b = torch.randn(rank, size, generator=generator) * size**-0.5, torch.randn(rows, rank, generator=generator)
        tensors |= {f"{PREFIX}lm_head.lora_A.weight": a, f"{PREFIX}lm_head.lora_B.weight": b * 0.3}
    if "embedding" in tables:
        name = embedding_name(model)
        tensors[f"{PREFIX}{name}.lora_embedding_A"] = torch.randn(rank, rows, generator=generator)
        tensors[f"{PREFIX}{name}.lora_embedding_B"] = torch.randn(size, rank, generator=generator) * 0.3
    if experts is stacked_names:
        tensors |= _stacked_tensors(model, rank, generator)
        config = {"target_parameters": [f"experts.{name}" for name in STACKED], **config}
    elif experts is not None:
        tensors |= _single_tensors(model, rank, generator, experts)
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": None, "bias": "none", **config}
    return write(directory, tensors, given)


def stacked_names(module: str, expert: int) -> dict[str, str]:
    raise AssertionError("experts stacked in parameters have no modules")


def mixtures(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Modules whose parameters hold all experts of a layer."""
    return {name: each for name, each in model.named_modules() if hasattr(each, "gate_up_proj") and "experts" in name}


def expert_sizes(module: nn.Module, parameter: str) -> tuple[int, int, int]:
    """Experts, outputs and inputs of a parameter with all of them."""
    count, rows, columns = getattr(module, parameter).shape
    return (count, columns, rows) if getattr(module, "is_transposed", False) else (count, rows, columns)


def _stacked_tensors(model: PreTrainedModel, rank: int, generator: torch.Generator) -> Tensors:
    tensors: Tensors = {}
    for name, module in mixtures(model).items():
        for parameter, end in STACKED.items():
            count, outputs, inputs = expert_sizes(module, parameter)
            own = PREFIX + name.removesuffix("experts") + end
            a, b = (torch.randn(count * rank, size, generator=generator) for size in (inputs, outputs))
            tensors[f"{own}.lora_A.weight"] = a * inputs**-0.5
            tensors[f"{own}.lora_B.weight"] = b.t().contiguous() * 0.3
    return tensors


def _single_tensors(
    model: PreTrainedModel, rank: int, generator: torch.Generator, names: Callable[[str, int], dict[str, str]]
) -> Tensors:
    tensors: Tensors = {}
    for name, module in mixtures(model).items():
        count, size, intermediate = expert_sizes(module, "down_proj")
        for expert in range(count):
            for part, own in names(name, expert).items():
                inputs, outputs = (intermediate, size) if part == "down" else (size, intermediate)
                a, b = (torch.randn(each, generator=generator) for each in ((rank, inputs), (outputs, rank)))
                tensors[f"{PREFIX}{own}.lora_A.weight"] = a * inputs**-0.5
                tensors[f"{PREFIX}{own}.lora_B.weight"] = b * 0.3
    return tensors


def _add_to_experts(
    model: PreTrainedModel, module: str, delta: Callable[[tuple[int, int] | None], torch.Tensor]
) -> bool:
    """Add to experts what a module of an adapter means for them; False for other modules. delta: [outputs,
    inputs] of (expert, their number), or of the only one."""
    one = re.fullmatch(r"(.+)\.(\d+)\.(\w+)", module)
    for name, own in mixtures(model).items():
        layer = name.split(".mlp.")[0].split(".feed_forward.")[0]
        if not module.startswith(f"{layer}.") or ".experts" not in module:
            continue
        count = expert_sizes(own, "down_proj")[0]
        with torch.no_grad():
            if one is None:
                parameter = "gate_up_proj" if module.endswith(".base_layer") else "down_proj"
                for expert, weight in enumerate(getattr(own, parameter)):
                    each = delta((expert, count))
                    weight += each.T if getattr(own, "is_transposed", False) else each
                return True
            expert, last = int(one[2]), one[3]
            if last in ("down_proj", "w2"):
                own.down_proj[expert] += delta(None)
            else:
                first, second = own.gate_up_proj[expert].chunk(2)
                (second if last in ("up_proj", "w3") else first).add_(delta(None))
        return True
    return False


def embedding_name(model: PreTrainedModel) -> str:
    own = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is own)


def write(directory: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged(
    model: PreTrainedModel, directory: Path, factor: float = 1.0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model in float64 with W + factor s B A for every W of the adapter; patterns are names of modules here. dtype:
    that A and B are rounded to."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = {name: each.to(dtype) for name, each in load_file(directory / "adapter_model.safetensors").items()}
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
        own, _, part = name.removeprefix(PREFIX).rpartition(".")
        if own in modules:
            with torch.no_grad():
                getattr(modules[own], part).copy_(tensors[name])
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        last = module.rpartition(".")[2]
        rank = config.get("rank_pattern", {}).get(last, config["r"])
        alpha = config.get("alpha_pattern", {}).get(last, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        b = tensors[f"{PREFIX}{module}.lora_B.weight"].double()

        def of_expert(
            which: tuple[int, int] | None, a: torch.Tensor = a, b: torch.Tensor = b, scale: float = scale
        ) -> torch.Tensor:
            if which is None:
                return factor * scale * (b @ a.double())
            expert, count = which
            return (
                factor
                * scale
                * (b.unflatten(1, (-1, count))[:, :, expert] @ a.double().unflatten(0, (count, -1))[expert])
            )

        if _add_to_experts(whole, module, of_expert):
            continue
        delta = factor * scale * b @ a.double()
        weight = modules[module].weight
        with torch.no_grad():
            weight += delta.T if isinstance(modules[module], Conv1D) else delta
    return whole
