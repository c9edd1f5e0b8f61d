"""Matrices of an adapter in a GGUF file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from quire.config.gguf_adapter import read_gguf_adapter
from quire.models.gguf.weights import PLAIN_DTYPES, halves_apart, taken_apart
from quire.utils.gguf import GGUFFile, TensorEntry

_ROTATED = {"attn_q": 0, "attn_k": 1}
"""Matrices with rows in another order in the file, where pairs are neighbours -> index of their number of heads."""


def read_gguf_matrices(path: Path, heads: tuple[int, int]) -> dict[str, dict[str, torch.Tensor]]:
    """A and B by Hugging Face's module name. heads: the model's query and key heads. Raises ModelLoadError."""
    with GGUFFile(path) as file:
        adapter = read_gguf_adapter(file)
        found = {}
        for module, pair in adapter.entries.items():
            matrices = {part: _matrix(file, entry) for part, entry in pair.items()}
            own = pair["B"].name.split(".")[2]
            if adapter.names.interleaved and own in _ROTATED:
                b = matrices["B"].float().numpy()
                rows = halves_apart(b, heads[_ROTATED[own]], pair["B"].name)
                matrices["B"] = torch.from_numpy(rows.copy())
            found[module] = matrices
        return found


def _matrix(file: GGUFFile, entry: TensorEntry) -> torch.Tensor:
    """A copy."""
    rows = np.frombuffer(file.data(entry), dtype=np.uint8).reshape(entry.shape[0], -1)
    dtype = PLAIN_DTYPES.get(entry.type.name)
    if dtype is not None:
        return torch.from_numpy(rows.copy()).view(dtype).view(entry.shape)
    return taken_apart(rows, entry.type).dequantize()
