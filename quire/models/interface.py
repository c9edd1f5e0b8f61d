"""Interface of a model to the model runner."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch

from quire.kv_cache.spec import LayerSpec
from quire.layers.batch import ForwardBatch, ForwardResult
from quire.layers.context import WeightSlots
from quire.quantization.integer_weight import WeightSource


class LoadableModel(Protocol):
    slots: WeightSlots
    """Slot of each checkpoint tensor."""

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]], elsewhere: Collection[str] = ()) -> None:
        """Load the checkpoint's tensors (CausalLM.load_weights). elsewhere: slot names of other ranks."""
        ...


class CausalLM(Protocol):
    """Decoder-only language model over a flat batch of tokens without padding."""

    @property
    def columns(self) -> Sequence[str]:
        """Names of the step columns that `forward` reads (quire/worker/columns.py)."""
        ...

    def cache_specs(self) -> list[LayerSpec]:
        """KV-cache spec of each layer, by index."""
        ...

    @property
    def output_size(self) -> int:
        """Size of a token's last hidden state."""
        ...

    def forward(self, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
        """Run the layers over tensors. Returns hidden states after the final norm of tokens in `batch.logits_rows`, [R,
        output_size], or of all, [T, output_size], and those that `batch.taps` asks for. The next call may overwrite
        them."""
        ...

    def compute_logits(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of hidden states, [R, output_size]: [R, vocab_size] float32 (on a device its dtype), with contiguous
        rows; caller and next call may overwrite them. slots: [R], adapters of the rows (None: none has one)."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]]) -> None:
        """Load a stream of (checkpoint name, tensor). Raises ModelLoadError naming a missing, surplus or misshapen
        tensor."""
        ...

    def release_workspaces(self) -> None:
        """Free working memory, which the next call allocates again, and references to the KV cache; for sleep."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of the parameters as stored, for memory profiles."""
        ...
