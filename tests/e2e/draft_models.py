"""Models on disk that make drafts for others: copies of a model whose guesses are changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Change = Callable[[dict[str, torch.Tensor]], None]
GUESSED = (5, 6)
MASK = 3
"""Token that parallel drafts have for unknown ones."""


def changed(source: Path, target: Path, change: Change) -> Path:
    """A copy of a model in one file whose tensors `change` changes; its output projection is one of its own."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    change(tensors)
    save_file(tensors, path)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": len(tensors["lm_head.weight"])}))
    return target


def parallel(source: Path, target: Path) -> Path:
    """A copy of a model whose config.json has MASK for unknown tokens, as PARD's have."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"pard_token": MASK}))
    return target


def guesses_two_tokens(tensors: dict[str, torch.Tensor]) -> None:
    """Let the likeliest token be one of GUESSED, whichever text comes before."""
    head = torch.zeros_like(tensors["lm_head.weight"])
    head[GUESSED[0]], head[GUESSED[1]] = 1.0, -1.0
    head[:, ::2] *= 0.5
    tensors["lm_head.weight"] = head


def masks_guess_a_token(tensors: dict[str, torch.Tensor]) -> None:
    """Let the likeliest token be one of GUESSED, and behind a mask the first."""
    guesses_two_tokens(tensors)
    guess = tensors["lm_head.weight"][GUESSED[0]]
    tensors["model.embed_tokens.weight"][MASK] = 100.0 * guess / guess.norm()


def noisy(tensors: dict[str, torch.Tensor]) -> None:
    """Let the likeliest token be that of the model in many places, and another one in others."""
    generator = torch.Generator().manual_seed(3)
    head = tensors["lm_head.weight"].float()
    noise = torch.randn(head.shape, generator=generator) * head.std() * 0.7
    tensors["lm_head.weight"] = (head + noise).to(tensors["lm_head.weight"].dtype)


def resized(rows: int) -> Change:
    """Give the vocabulary another number of rows: the last ones are left out, or zeros are added."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            old = tensors[name]
            new = torch.zeros(rows, old.shape[1], dtype=old.dtype)
            new[: len(old)] = old[:rows]
            tensors[name] = new

    return change
