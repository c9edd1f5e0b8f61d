"""Heads for drafts with random weights, in model checkpoints: their definition over Transformers' layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from tests.models.families import deepseek_v3, deepseek_v32
from tests.models.harness import randomize, save
from tests.models.hybrid_families import qwen3_5, qwen3_5_moe, qwen3_next

SIZE = 48
KEPT = ("layers.0.", "norm.")
"""Of a model of one layer, what is a head's too."""
CASES: dict[str, Callable[..., PreTrainedModel]] = {
    "next": lambda **options: qwen3_next(num_hidden_layers=2, full_attention_interval=2, **options),
    "moe": lambda **options: qwen3_5_moe(num_hidden_layers=2, full_attention_interval=2, **options),
    "dense": lambda **options: qwen3_5(num_hidden_layers=2, full_attention_interval=2, attention_bias=True, **options),
    "tied": lambda **options: qwen3_5(
        num_hidden_layers=2, full_attention_interval=2, tie_word_embeddings=True, **options
    ),
}


def following(token_ids: torch.Tensor) -> torch.Tensor:
    """The tokens behind those of a step, as the tests have them."""
    return (7 * token_ids + 3) % 97


class Twin(nn.Module):
    """The definition: fc([norm(embedding of the next token), norm(hidden state)]), one layer, norm."""

    def __init__(self, make: Callable[..., PreTrainedModel]) -> None:
        super().__init__()
        body = make(layer_types=["full_attention"] * 2)
        self.body = randomize(body, seed=5)
        self.body.model.layers = self.body.model.layers[:1]
        self.body.config.num_hidden_layers = 1
        norm = type(self.body.model.norm)
        self.token_norm, self.hidden_norm = norm(SIZE, eps=1e-6), norm(SIZE, eps=1e-6)
        self.fc = nn.Linear(2 * SIZE, SIZE, bias=False)
        with torch.no_grad():
            for weight in (self.token_norm.weight, self.hidden_norm.weight):
                weight.normal_(0.0, 0.2)
            self.fc.weight.normal_(0.0, 0.15)

    def tensors(self) -> dict[str, torch.Tensor]:
        """As a checkpoint names them."""
        body = {f"mtp.{name}": value for name, value in self.body.model.state_dict().items() if name.startswith(KEPT)}
        return body | {
            "mtp.fc.weight": self.fc.weight.detach(),
            "mtp.pre_fc_norm_embedding.weight": self.token_norm.weight.detach(),
            "mtp.pre_fc_norm_hidden.weight": self.hidden_norm.weight.detach(),
        }

    def forward(self, model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
        """Logits, [T, vocabulary]."""
        with torch.no_grad():
            ids = torch.tensor([prompt])
            return self.run(model, model.model(ids).last_hidden_state, following(ids))[1][0]

    def run(
        self, model: PreTrainedModel, hidden: torch.Tensor, followers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a further guess takes, and logits."""
        tokens = model.get_input_embeddings()(followers)
        x = self.fc(torch.cat((self.token_norm(tokens), self.hidden_norm(hidden)), dim=-1))
        results = self.body.model(inputs_embeds=x).last_hidden_state
        return results, model.lm_head(self.before_logits(results))

    def before_logits(self, results: torch.Tensor) -> torch.Tensor:
        return results


class DeepseekTwin(Twin):
    """A further guess takes the results before their norm; the head is the layer behind the model's last one."""

    def __init__(self, make: Callable[..., PreTrainedModel]) -> None:
        super().__init__(make)
        self.norm, self.body.model.norm = self.body.model.norm, nn.Identity()

    def before_logits(self, results: torch.Tensor) -> torch.Tensor:
        return self.norm(results)

    def tensors(self) -> dict[str, torch.Tensor]:
        own = {}
        for name, value in self.body.model.layers[0].state_dict().items():
            for part, tensor in by_expert(name, value):
                own[f"model.layers.2.{part}"] = tensor
        return own | {
            "model.layers.2.eh_proj.weight": self.fc.weight.detach(),
            "model.layers.2.enorm.weight": self.token_norm.weight.detach(),
            "model.layers.2.hnorm.weight": self.hidden_norm.weight.detach(),
            "model.layers.2.shared_head.norm.weight": self.norm.weight.detach(),
            # Copies of the model's tables, which are not read.
            "model.layers.2.embed_tokens.weight": self.body.model.embed_tokens.weight.detach(),
            "model.layers.2.shared_head.head.weight": self.body.lm_head.weight.detach(),
        }


def by_expert(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of a layer, or those of its experts, as checkpoints keep them."""
    prefix, is_fused, part = name.rpartition("mlp.experts.")
    if not is_fused:
        yield name, value
        return
    for expert, own in enumerate(value):
        if part == "down_proj":
            yield f"{prefix}mlp.experts.{expert}.down_proj.weight", own
            continue
        for half, rows in zip(("gate", "up"), own.chunk(2), strict=True):
            yield f"{prefix}mlp.experts.{expert}.{half}_proj.weight", rows


def deepseek_case(make: Callable[..., PreTrainedModel], **options: Any) -> PreTrainedModel:
    """A dense layer and one with experts; of the head one with experts."""
    is_body = options.pop("layer_types", None) is not None
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 0} if is_body else {"num_hidden_layers": 2}
    return make(**{**sizes, **options})


CASES |= {
    "deepseek-v3": partial(deepseek_case, deepseek_v3),
    "deepseek-v3.2": partial(deepseek_case, deepseek_v32, num_nextn_predict_layers=1),
}


def saved(name: str, directory: Path, **sizes: object) -> tuple[PreTrainedModel, Twin]:
    """A model and its head, and a checkpoint of both. sizes: other ones than the case's."""
    make = partial(CASES[name], **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        twin_class = DeepseekTwin if name.startswith("deepseek") else Twin
        model, twin = randomize(make()), twin_class(make)
    save(model, directory)
    add(directory, twin)
    return model, twin


def add(directory: Path, twin: Twin) -> None:
    path = directory / "model.safetensors"
    extra = {key: value.contiguous() for key, value in twin.tensors().items()}
    save_file({**load_file(path), **extra}, path)
