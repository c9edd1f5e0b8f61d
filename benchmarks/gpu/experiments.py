"""What decides designs: python -m benchmarks.gpu.experiments --out FILE [--what WHAT ...] [--seconds S] [--tiny]

bits: are a product's rows the same bits in tiles of 64 and 128 rows, of 64 to 256 columns, and with operands swapped
(`batch_invariant` could then choose tiles by the number of rows), and what does each take? launch: a chain of small
kernels with and without programmatic dependent launch. products (only if named): the fastest way to multiply with a
quantised matrix, within --seconds. --tiny: small matrices in Triton's interpreter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl

from benchmarks.gpu import records
from benchmarks.gpu.product_sweep import ProductSweep
from benchmarks.gpu.records import Record
from benchmarks.gpu.shapes import QWEN3_8B, TINY, Shape
from benchmarks.gpu.timing import CACHE_BYTES, measure, num_copies
from quire.kernels.triton.matmul import GROUP_M, ProductTiles, _matmul_kernel
from quire.kernels.triton.runtime import INTERPRETED, launch
from quire.kernels.triton.weight_formats import StoredMatrix

PRODUCT_TILES = tuple(
    ProductTiles(block_m, block_n, 64, num_warps, num_stages)
    for block_m, block_n, num_warps, num_stages in (
        (64, 64, 4, 5),
        (64, 128, 4, 4),
        (64, 256, 4, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 4),
        (128, 256, 8, 3),
    )
)
"""The first is what `batch_invariant` uses for narrow results."""
TINY_TILES = (ProductTiles(16, 16, 16, 4, 1), ProductTiles(32, 32, 16, 4, 1))
ROWS = (1, 64, 256, 4096)
CHAIN = 10


class Experiments:
    """Over the matrices of a shape."""

    def __init__(self, shape: Shape, device: torch.device, *, tiny: bool) -> None:
        self._shape = shape
        self._device = device
        self._tiny = tiny
        self._cache_bytes = 1 if tiny else CACHE_BYTES

    def bits(self) -> Iterator[Record]:
        """Each way against the first, on the same operands; `differing` counts elements."""
        n, k = (32, 40) if self._tiny else (self._shape.hidden, self._shape.hidden)
        tiles = TINY_TILES if self._tiny else PRODUCT_TILES
        for m in (1, 5) if self._tiny else ROWS:
            x, weight = self._random(m, k), self._random(n, k)
            expected = product(x, weight, tiles[0])
            for swapped in (False, True):
                for each in tiles:
                    name = f"{each.block_m} x {each.block_n}{', swapped' if swapped else ''}"
                    yield self._attempt("bits", name, partial(self._compare, x, weight, each, swapped, expected), m=m)

    def _compare(
        self, x: torch.Tensor, weight: torch.Tensor, tiles: ProductTiles, swapped: bool, expected: torch.Tensor
    ) -> Record:
        def call(weight: torch.Tensor) -> torch.Tensor:
            return product(weight, x, tiles).t() if swapped else product(x, weight, tiles)

        found = call(weight)
        copies = [weight, *(weight.clone() for _ in range(self._num_copies(weight) - 1))]
        timing = measure([partial(call, copy) for copy in copies], self._device)
        differing = int((found != expected).sum())
        return {"equal": differing == 0, "differing": differing, "seconds": timing.median}

    def launch(self) -> Iterator[Record]:
        """Seconds of one of a chain of small kernels in a graph."""
        x = torch.zeros(self._shape.hidden, device=self._device)
        for name, early in (("plain", False), ("programmatic dependent launch", True)):
            if early and self._tiny:
                yield {"what": "launch", "variant": name, "left out": "the interpreter has no such launch"}
                continue
            yield self._attempt("launch", name, partial(self._chain, x, early))

    def _chain(self, x: torch.Tensor, early: bool) -> Record:
        def call() -> None:
            for _ in range(CHAIN):
                add_one(x, early=early)

        return {"seconds": measure([call], self._device).median / CHAIN}

    def _num_copies(self, weight: torch.Tensor) -> int:
        return num_copies(weight.numel() * weight.itemsize, self._cache_bytes)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device).bfloat16()

    def _attempt(self, what: str, variant: str, of: Callable[[], Record], **fields: object) -> Record:
        """What fails is a record too, and the others are tried all the same."""
        base = {"what": what, "variant": variant, **fields}
        try:
            return base | of()
        except Exception as error:
            return base | {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def product(x: torch.Tensor, weight: torch.Tensor, tiles: ProductTiles) -> torch.Tensor:
    """x W^T by the kernel of batch-invariant products, in tiles of any size."""
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(m, tiles.block_m) * triton.cdiv(n, tiles.block_n),)
    matrix = StoredMatrix.plain(weight)
    constants = {
        **matrix.constants(rounds_activations=False),
        "HAS_BIAS": False,
        "HAS_RESIDUAL": False,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "TILES": GROUP_M,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    sizes = m, n, x.stride(0), 0, n, k, n
    launch(_matmul_kernel, grid, x, None, *matrix.tensors, None, None, out, *sizes, **constants)
    return out


@triton.jit
def _add_kernel(x, size, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(x + at, value + 1, mask=at < size)


def add_one(x: torch.Tensor, *, early: bool) -> None:
    """x += 1. early: the next such kernel is launched while this one runs, and waits inside."""
    options: Mapping[str, object] = {"launch_pdl": True} if early else {}
    launch(_add_kernel, (triton.cdiv(x.numel(), 1024),), x, x.numel(), EARLY=early, BLOCK=1024, num_warps=4, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--what", nargs="+", choices=("launch", "bits", "products"), default=["launch", "bits"])
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    emit = records.writer(arguments.out)
    assert arguments.tiny == bool(INTERPRETED.value), "tiny shapes are interpreted, all others compiled"
    device = torch.device("cpu" if arguments.tiny else "cuda")
    shape = TINY if arguments.tiny else QWEN3_8B
    experiments = Experiments(shape, device, tiny=arguments.tiny)
    sweep = ProductSweep(shape, device, tiny=arguments.tiny)
    wanted = {
        "launch": experiments.launch,
        "bits": experiments.bits,
        "products": partial(sweep.records, arguments.seconds),
    }
    with torch.inference_mode():
        for what in arguments.what:
            for record in wanted[what]():
                emit({"part": "experiments", **record})


if __name__ == "__main__":
    main()
