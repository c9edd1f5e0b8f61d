"""Reading and writing training checkpoints."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from model import LanguageModel, ModelConfig
from safetensors.torch import load_file
from torch.optim import Optimizer


def save_checkpoint(path: Path, model: LanguageModel, optimizers: list[Optimizer], progress: dict[str, Any]) -> None:
    """Write weights, optimiser state and progress; an interrupted write leaves the old file in place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    content = {
        "config": asdict(model.config),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": progress,
    }
    torch.save(content, partial)
    os.replace(partial, path)


def read_checkpoint(path: Path, device: str = "cpu") -> dict[str, Any]:
    """The content of a checkpoint."""
    return torch.load(path, map_location=device, weights_only=True)


def load_model(path: Path, device: str = "cpu") -> LanguageModel:
    """The model of a checkpoint, without its optimiser state."""
    content = read_checkpoint(path, device)
    model = LanguageModel(ModelConfig(**content["config"])).to(device)
    model.load_state_dict(content["model"])
    return model


def load_exported(directory: Path) -> LanguageModel:
    """The model of a directory that ``export.py`` wrote, in float32."""
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=fields["num_attention_heads"],
        num_kv_heads=fields["num_key_value_heads"],
        intermediate_size=fields["intermediate_size"],
        max_positions=fields["max_position_embeddings"],
        rope_theta=fields["rope_theta"],
        rms_norm_eps=fields["rms_norm_eps"],
    )
    model = LanguageModel(config)
    weights = load_file(directory / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
    return model.eval()
