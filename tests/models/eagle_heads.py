"""Heads for drafts (EAGLE, EAGLE-3) with random weights: their definition in plain torch, and their checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import PreTrainedModel

HEADS, KV_HEADS, DIM, WIDTH, EPSILON, THETA = 4, 2, 16, 56, 1e-6, 10000.0


@dataclass
class HeadTwin:
    """A head of one layer. layers: of the model, whose inputs it reads (none: a head of "eagle"). guessed: the tokens
    that it can guess (None: all). has_tables: it has an embedding of its own, and other logits than the model's. flags:
    keys of its config.json. kind: the model_type of its layer. authors: names and keys are those of the authors'
    checkpoints, else those of the `speculators` library."""

    size: int
    read_size: int
    vocab: int
    layers: tuple[int, ...] = ()
    guessed: list[int] | None = None
    has_tables: bool = True
    flags: dict[str, bool] = field(default_factory=dict)
    kind: str = "llama"
    authors: bool = True
    seed: int = 1

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        size, pair = self.size, self.size * (2 if self.layers else 1)
        shapes = {
            "self_attn.q_proj": (HEADS * DIM, pair),
            "self_attn.k_proj": (KV_HEADS * DIM, pair),
            "self_attn.v_proj": (KV_HEADS * DIM, pair),
            "self_attn.o_proj": (size, HEADS * DIM),
            "mlp.gate_proj": (WIDTH, size),
            "mlp.up_proj": (WIDTH, size),
            "mlp.down_proj": (size, WIDTH),
            "post_attention_layernorm": (size,),
        }
        if self.layers:
            shapes |= {"input_layernorm": (size,), "hidden_norm": (size,)}
        if self.kind == "qwen3":
            shapes |= {"self_attn.q_norm": (DIM,), "self_attn.k_norm": (DIM,)}
        named = {f"layers.0.{name}": shape for name, shape in shapes.items()}
        named["fc"] = (size, len(self.layers) * self.read_size if self.layers else size + self.read_size)
        if self.layers:
            named["norm"] = (size,)
        if self.flags.get("norm_before_fc"):
            named["input_norm"] = (len(self.layers) * self.read_size,)
        if self.flags.get("fc_norm"):
            named |= {f"fc_norm.{part}": (self.read_size,) for part in range(len(self.layers))}
        if self.has_tables:
            named["embed_tokens"], named["lm_head"] = (self.vocab, size), (len(self.ids), size)
        self.weights = {}
        for name, shape in named.items():
            scale = 1.0 if name == "embed_tokens" else 1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.2
            self.weights[name] = torch.randn(shape, generator=generator) * scale + (len(shape) == 1)
        if not self.layers:
            self.weights["fc.bias"] = torch.randn(size, generator=generator) * 0.2

    @property
    def ids(self) -> list[int]:
        return list(range(self.vocab)) if self.guessed is None else self.guessed

    def join(self, states: list[torch.Tensor]) -> torch.Tensor:
        """states: the model's, [T, read_size] each: of `layers`, or its result. Returns what a guess takes."""
        if not self.layers:
            return states[0]
        if self.flags.get("fc_norm"):
            states = [self.norm(f"fc_norm.{part}", state) for part, state in enumerate(states)]
        joined = torch.cat(states, 1)
        if self.flags.get("norm_before_fc"):
            joined = self.norm("input_norm", joined)
        return joined @ self.weights["fc"].to(joined).T

    def run(self, model: PreTrainedModel, hidden: torch.Tensor, followers: list[int]) -> tuple[torch.Tensor, ...]:
        """hidden: [T, ...], of `join` or of an earlier guess. Returns what a further guess takes, and logits of all
        tokens of the vocabulary."""
        table, head = model.get_input_embeddings().weight, model.lm_head.weight
        if self.has_tables:
            head = self.weights["lm_head"].to(hidden)
            table = self.weights["embed_tokens"].to(hidden) if self.layers else table
        tokens = table[torch.tensor(followers)].to(hidden)
        if self.layers:
            normed = self.norm("layers.0.hidden_norm", hidden)
            residual = normed if self.flags.get("norm_before_residual") else hidden
            x = torch.cat((self.norm("layers.0.input_layernorm", tokens), normed), 1)
        else:
            x = torch.cat((tokens, hidden), 1) @ self.weights["fc"].to(hidden).T + self.weights["fc.bias"].to(hidden)
            residual = x
        x = residual + self.attend(x)
        normed = self.norm("layers.0.post_attention_layernorm", x)
        x = x + self.product(
            "mlp.down_proj", F.silu(self.product("mlp.gate_proj", normed)) * self.product("mlp.up_proj", normed)
        )
        results = self.norm("norm", x) if self.layers else x
        logits = torch.full((len(x), self.vocab), -torch.inf).to(x)
        logits[:, self.ids] = results @ head.to(x).T
        return (results if self.flags.get("norm_output") else x), logits

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        heads = {}
        for name, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            heads[name] = self.product(f"self_attn.{name}_proj", x).view(len(x), count, DIM)
            if self.kind == "qwen3" and name != "v":
                heads[name] = self.norm(f"layers.0.self_attn.{name}_norm", heads[name])
        angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
        cos, sin = (torch.cat((part, part), 1)[:, None].to(x) for part in (angles.cos(), angles.sin()))
        for name in ("q", "k"):
            first, second = heads[name].chunk(2, -1)
            heads[name] = heads[name] * cos + torch.cat((-second, first), -1) * sin
        query, key, value = (each.transpose(0, 1) for each in heads.values())
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.product("self_attn.o_proj", attended.transpose(0, 1).reshape(len(x), -1))

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[f"layers.0.{name}"].to(x).T

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name].to(x), EPSILON)

    def config(self, verifier: Path | None = None) -> dict[str, Any]:
        own = {
            "model_type": self.kind,
            "hidden_size": self.size,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "intermediate_size": WIDTH,
            "max_position_embeddings": 64,
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "vocab_size": self.vocab,
        }
        said: dict[str, Any] = {**self.flags, "torch_dtype": "float32"}
        if self.guessed is not None:
            said["draft_vocab_size"] = len(self.guessed)
        if self.read_size != self.size:
            said["target_hidden_size"] = self.read_size
        if self.layers:
            said["eagle_aux_hidden_state_layer_ids"] = list(self.layers)
        if self.authors:
            return own | said | {"architectures": ["LlamaForCausalLMEagle3" if self.layers else "LlamaForCausalLM"]}
        proposals = [{"proposal_type": "greedy", "speculative_tokens": 3}]
        stated = {"algorithm": "eagle3", "proposal_methods": proposals, "verifier": {"name_or_path": str(verifier)}}
        kinds = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        return said | kinds | {"transformer_layer_config": own, "speculators_config": stated}

    def save(self, directory: Path, verifier: Path | None = None) -> Path:
        directory.mkdir(exist_ok=True)
        tensors = {}
        for name, value in self.weights.items():
            named = name if name.endswith(".bias") else f"{name}.weight"
            tensors[named.replace("layers.0", "midlayer") if self.authors and self.layers else named] = value
        if self.guessed is not None:
            ids = torch.tensor(self.guessed)
            tensors["d2t"], tensors["t2d"] = ids - torch.arange(len(ids)), torch.zeros(self.vocab, dtype=torch.bool)
            tensors["t2d"][ids] = True
        save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(self.config(verifier)))
        return directory


def states_of(model: PreTrainedModel, twin: HeadTwin, prompt: list[int]) -> list[torch.Tensor]:
    """What the head reads of a model of Transformers' behind a prompt."""
    with torch.no_grad():
        result = model.model(torch.tensor([prompt]), output_hidden_states=True)
    states = [result.hidden_states[layer] for layer in twin.layers] or [result.last_hidden_state]
    return [state[0] for state in states]
