"""The interface of a model, as the model runner calls it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from quire.kv_cache.spec import LayerSpec
from quire.quantization.integer_weight import WeightSource


class CausalLM(Protocol):
    """A decoder-only language model over a flat batch of tokens (no batch dimension, no padding)."""

    def kv_specs(self) -> list[LayerSpec]:
        """What each layer keeps in the KV cache, by layer index."""
        ...

    @property
    def output_size(self) -> int:
        """Elements of a token's last hidden state. Not the layers' size where a projection follows them (OPT-350m)."""
        ...

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Any) -> torch.Tensor:
        """token_ids, positions: [T] int64. attention: the step that the attention back end's `plan` returned. Returns
        the last hidden states (after the final norm), [T, output_size]; they may be overwritten by the next call."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, output_size], the rows that are sampled. Returns [R, vocab_size] float32 (on a device its dtype),
        the elements of a row side by side; they may be overwritten by the caller and by the next call."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]]) -> None:
        """Consume (checkpoint name, tensor) pairs as they stream in. Raises ModelLoadError for a missing, surplus
        or misshapen tensor, naming it."""
        ...

    def release_workspaces(self) -> None:
        """Free working memory, which the next call allocates again, and references to the KV cache."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of the model's parameters as they are stored."""
        ...
