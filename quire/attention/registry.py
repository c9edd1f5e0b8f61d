"""Attention back ends by name."""

from __future__ import annotations

from quire.registry import Registry


def attention_backends() -> Registry:
    """A registry of its own for each caller; entries are classes that satisfy AttentionBackend."""
    return Registry("attention backend", {"torch": "quire.attention.torch_backend:TorchAttention"})
