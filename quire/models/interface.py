"""The interface of a model, as the model runner calls it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch

from quire.kv_cache.spec import LayerSpec
from quire.layers.batch import ForwardBatch, ForwardResult
from quire.layers.context import WeightSlots
from quire.quantization.integer_weight import WeightSource


class LoadableModel(Protocol):
    """A model that a checkpoint can be loaded into."""

    slots: WeightSlots
    """Where each tensor of a checkpoint goes."""

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]], elsewhere: Collection[str] = ()) -> None:
        """As CausalLM.load_weights. elsewhere: names of the slots that only other ranks of the model have."""
        ...


class CausalLM(Protocol):
    """A decoder-only language model over a flat batch of tokens (no batch dimension, no padding)."""

    @property
    def columns(self) -> Sequence[str]:
        """Names of the step's columns that `forward` reads (quire/worker/columns.py)."""
        ...

    def cache_specs(self) -> list[LayerSpec]:
        """What each layer says it keeps in the KV cache, by layer index."""
        ...

    @property
    def output_size(self) -> int:
        """Elements of a token's last hidden state. Not the layers' size where a projection follows them (OPT-350m)."""
        ...

    def forward(self, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
        """batch: of tensors. Returns the last hidden states (after the final norm) of the tokens that
        `batch.logits_rows` names, [R, output_size], or of all, [T, output_size], and what `batch.taps` asks for; the
        next call may overwrite them."""
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
