"""What is timed: kernels in the shapes of a model, with what each of them cannot do without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu.limits import Work
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import Call, num_copies
from quire.kernels.triton.activation import activation
from quire.kernels.triton.block_copy import PageTable, copy_pages
from quire.kernels.triton.embedding import embedding
from quire.kernels.triton.matmul import matmul
from quire.kernels.triton.norm import norm
from quire.kernels.triton.rotary import rotation_angles

BLOCK_SIZE = 16
PRODUCT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 8192)
Build = Callable[[], Call]
"""Makes operands of its own, and what computes with them."""


@dataclass(frozen=True, slots=True)
class Subject:
    """kernel, case: names. work: of one call. variants: by name, ways to do it; the first is ours, the others are what
    it is compared with."""

    kernel: str
    case: str
    work: Work
    variants: dict[str, Build]

    def calls(self, variant: str, cache_bytes: int) -> Sequence[Call]:
        """As many as exceed the cache."""
        return [self.variants[variant]() for _ in range(num_copies(self.work.bytes, cache_bytes))]


class Subjects:
    """All subjects over one shape on one device. scale: divides numbers of tokens, for trying things out."""

    def __init__(self, shape: Shape, device: torch.device, scale: int = 1) -> None:
        self.shape = shape
        self.device = device
        self.dtype: torch.dtype = getattr(torch, shape.dtype)
        self._scale = scale

    def all(self) -> Iterator[Subject]:
        """In the order of what is asked first."""
        yield from self.products()
        yield from self.others()

    def others(self) -> Iterator[Subject]:
        """What is bound by memory, or by its launch."""
        yield from self.norms()
        yield from self.activations()
        yield from self.tables()
        yield from self.copies()

    def tokens(self, count: int) -> int:
        return max(1, count // self._scale)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def norms(self) -> Iterator[Subject]:
        """RMSNorm over the hidden states, alone and of a sum."""
        size, itemsize = self.shape.hidden, self.shape.itemsize
        for count in (8192, 256, 1):
            t = self.tokens(count)
            yield Subject(
                "RMSNorm",
                f"{count} tokens",
                Work(2 * t * size * itemsize),
                {"triton": partial(self._norm, t, False), "torch": partial(self._torch_norm, t)},
            )
        t = self.tokens(8192)
        yield Subject(
            "RMSNorm of a sum",
            "8192 tokens",
            Work(4 * t * size * itemsize),
            {"triton": partial(self._norm, t, True)},
        )

    def _norm(self, t: int, summed: bool) -> Call:
        x, weight = self.random(t, self.shape.hidden), self.random(self.shape.hidden)
        residual = self.random(t, self.shape.hidden) if summed else None
        return lambda: norm(x, weight, None, 1e-6, centred=False, residual=residual)

    def _torch_norm(self, t: int) -> Call:
        x, weight = self.random(t, self.shape.hidden), self.random(self.shape.hidden)
        return lambda: F.rms_norm(x, (self.shape.hidden,), weight, 1e-6)

    def activations(self) -> Iterator[Subject]:
        """silu(gate) * up."""
        width, itemsize = self.shape.intermediate, self.shape.itemsize
        for count in (8192, 256):
            t = self.tokens(count)
            yield Subject(
                "gated SiLU", f"{count} tokens", Work(3 * t * width * itemsize), {"triton": partial(self._gated, t)}
            )

    def _gated(self, t: int) -> Call:
        x = self.random(t, 2 * self.shape.intermediate)
        return lambda: activation(x, "silu", gated=True)

    def tables(self) -> Iterator[Subject]:
        """Embeddings of random tokens; cos and sin of positions."""
        t = self.tokens(8192)
        yield Subject(
            "embedding",
            "8192 tokens",
            Work(2 * t * self.shape.hidden * self.shape.itemsize),
            {"triton": partial(self._embedding, t)},
        )
        half = self.shape.head_dim // 2
        yield Subject("rotation angles", "8192 tokens", Work(8 * t * half), {"triton": partial(self._angles, t, half)})

    def _embedding(self, t: int) -> Call:
        table = self.random(self.shape.vocab, self.shape.hidden)
        tokens = torch.randint(0, self.shape.vocab, (t,), device=self.device)
        return lambda: embedding(table, tokens)

    def _angles(self, t: int, half: int) -> Call:
        positions = torch.arange(t, device=self.device)
        frequencies = (1e6 ** -(torch.arange(half) / half)).to(self.device)
        return lambda: rotation_angles(positions, frequencies, 1.0)

    def copies(self) -> Iterator[Subject]:
        """Blocks of all layers, as copy-on-write and swapping copy them."""
        page_bytes = BLOCK_SIZE * self.shape.kv_bytes
        for blocks in (64, 1):
            yield Subject(
                "block copy",
                f"{blocks} blocks",
                Work(2 * blocks * page_bytes * self.shape.num_layers),
                {"triton": partial(self._copy, blocks, page_bytes)},
            )

    def _copy(self, blocks: int, page_bytes: int) -> Call:
        pages = torch.randint(0, 256, (self.shape.num_layers, 2 * blocks, page_bytes), dtype=torch.uint8)
        table = PageTable.of_pages(list(pages.to(self.device).unbind(0)))
        order = np.random.default_rng(0).permutation(2 * blocks).reshape(blocks, 2).astype(np.int32)
        pairs = torch.from_numpy(order).to(self.device)
        return lambda: copy_pages(table, table, pairs)

    def products(self) -> Iterator[Subject]:
        """The library's matrix products and the batch-invariant ones, over the matrices of a layer."""
        hidden, inner = self.shape.hidden, self.shape.intermediate
        heads = self.shape.num_heads * self.shape.head_dim
        matrices = (
            ("gate_up", 2 * inner, hidden),
            ("down", hidden, inner),
            ("qkv", self.shape.qkv_width, hidden),
            ("o", hidden, heads),
        )
        for name, n, k in matrices:
            for count in PRODUCT_ROWS if self._scale == 1 else PRODUCT_ROWS[:: len(PRODUCT_ROWS) - 1]:
                t = self.tokens(count)
                yield Subject(
                    f"product {name}",
                    f"{count} tokens",
                    Work((n * k + t * (n + k)) * self.shape.itemsize, 2.0 * t * n * k),
                    {
                        "library": partial(self._product, t, n, k, False),
                        "invariant": partial(self._product, t, n, k, True),
                    },
                )
        yield from self.sums()

    def _product(self, t: int, n: int, k: int, invariant: bool) -> Call:
        x, weight = self.random(t, k), self.random(n, k)
        return (lambda: matmul(x, weight)) if invariant else (lambda: F.linear(x, weight))

    def sums(self) -> Iterator[Subject]:
        """The residual: added by the product of the block before, as the engine does it, or by the norm after it."""
        n, k = self.shape.hidden, self.shape.intermediate
        for count in (256, 8192):
            t = self.tokens(count)
            yield Subject(
                "product and sum and norm",
                f"{count} tokens",
                Work((n * k + t * (k + 4 * n)) * self.shape.itemsize, 2.0 * t * n * k),
                {"addmm": partial(self._summed, t, True), "fused norm": partial(self._summed, t, False)},
            )

    def _summed(self, t: int, in_product: bool) -> Call:
        n, k = self.shape.hidden, self.shape.intermediate
        x, weight, residual, gain = self.random(t, k), self.random(n, k), self.random(t, n), self.random(n)
        if in_product:
            return lambda: norm(residual.addmm_(x, weight.t()), gain, None, 1e-6, centred=False)
        return lambda: norm(F.linear(x, weight), gain, None, 1e-6, centred=False, residual=residual)
