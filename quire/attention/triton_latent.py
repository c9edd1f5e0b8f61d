"""The layers of latent attention in the Triton back end: their pages, kernels and scratch."""

from __future__ import annotations

import torch

from quire.attention.latent import LatentShape
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.kernels.triton.latent_attention import LatentKernels, LatentScratch, latent_tiles


class DeviceLatents:
    """Kernels are bound to a layer's pages when it first attends, and live as long as this. max_num_seqs,
    max_model_len: the largest batch that the scratch, which all layers share, must serve."""

    def __init__(
        self,
        num_heads: int,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_model_len: int,
        limits: DeviceLimits,
        *,
        batch_invariant: bool,
    ) -> None:
        self._dtype = dtype
        self._batch_invariant = batch_invariant
        self._limits = limits
        self._sizes = (num_heads, max_num_seqs, max_model_len)
        self._pages: dict[int, tuple[int, torch.Tensor]] = {}
        self._scratch: LatentScratch | None = None
        self._kernels: dict[int, LatentKernels] = {}

    def add(self, layer: int, group: int, pages: torch.Tensor) -> None:
        """group: of those that keep tokens. pages: [num_blocks, block_size, width], in the kernels' blocks."""
        self._pages[layer] = group, pages
        if self._scratch is None:
            num_heads, max_num_seqs, max_model_len = self._sizes
            self._scratch = LatentScratch.allocate(
                num_heads, pages.shape[2], max_num_seqs, max_model_len, pages.device, self._limits
            )

    def layer(self, shape: LatentShape) -> tuple[LatentKernels, int]:
        """A layer's kernels and its group."""
        group, pages = self._pages[shape.layer]
        found = self._kernels.get(shape.layer)
        if found is None:
            assert self._scratch is not None, "there is scratch where there are pages"
            # Of two dtypes, both are multiplied in float32.
            itemsize = self._dtype.itemsize if self._dtype == pages.dtype else 4
            tiles = latent_tiles(shape, itemsize, self._limits, batch_invariant=self._batch_invariant)
            found = self._kernels[shape.layer] = LatentKernels(shape, pages, tiles, self._scratch, self._limits)
        return found, group
