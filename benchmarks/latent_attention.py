"""Native latent attention of single tokens beside what the processor can multiply.

    python benchmarks/latent_attention.py [--heads 128] [--context 4096] [--sequences 1]

One thread, time on the processor, best of 7. A token of H heads does 2 H (576 + 512) operations for each key, which has
1,152 bytes in bfloat16: with 128 heads arithmetic bounds it, not memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from quire.attention.interface import AttentionBatch
from quire.attention.native_backend import NativeAttention, RecordedAttention
from quire.kernels.arguments import LatentShape
from quire.kernels.cpu import _native
from quire.kernels.cpu.recorder import Recorder
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import LatentSpec
from quire.worker.kv_tensors import allocate_pages

RANK, ROPE_DIM, BLOCK_SIZE, TRIALS, LIMIT_UNITS = 512, 64, 16, 7, 256
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WAYS = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))
"""What latents are stored in, and what is multiplied."""


def best(run: Callable[[], object]) -> float:
    """Seconds of this thread on the processor."""
    seconds = []
    for _ in range(TRIALS):
        start = time.thread_time()
        run()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def decode(heads: int, context: int, sequences: int, stored: str, precision: str) -> Callable[[], None]:
    """A step of one token of each sequence, over a layer filled with random latents."""
    shape, dtype = LatentShape(0, heads, RANK, ROPE_DIM, 0.07), DTYPES[stored]
    blocks = -(-context // BLOCK_SIZE)
    spec = LatentSpec(shape.width, dtype.itemsize)
    layout = KVCacheLayout(BLOCK_SIZE, 1 + sequences * blocks, *group_layers([spec], BLOCK_SIZE))
    pages = allocate_pages(layout)
    pages[0].view(dtype).normal_()
    backend = NativeAttention(layout, pages, stored, heads, 1)
    recorder = Recorder()
    widths = (heads * RANK, heads * ROPE_DIM, RANK, ROPE_DIM)
    inputs = tuple(recorder.external(width, width) for width in widths)
    result = RecordedAttention(backend).attend_latent(shape, inputs, None)
    program = recorder.finish_program(result, NativeRuntime("auto", 1, precision), sequences)
    tables = (1 + torch.arange(sequences * blocks)).view(sequences, blocks).int()
    last = torch.full((sequences,), context - 1)
    slots = tables[:, -1].long() * BLOCK_SIZE + last % BLOCK_SIZE
    count = torch.arange(sequences + 1)
    step = backend.plan(AttentionBatch(count, last, last, count[:-1], (tables,), (slots,)))
    rows = [torch.randn(sequences, width) for width in widths]
    return lambda: program.run(sequences, (None, last), plans=step.plans, externals=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=1)
    options = parser.parse_args()
    runtime = NativeRuntime("auto", 1)
    operations = 2 * options.heads * options.context * options.sequences * (2 * RANK + ROPE_DIM)
    for stored, precision in WAYS:
        if precision == "bfloat16" and not _native.has_bf16_products(runtime.isa):
            continue
        run = decode(options.heads, options.context, options.sequences, stored, precision)
        run()
        rate = operations / best(run)
        limit = _native.bf16_limit if precision == "bfloat16" else _native.float_limit
        done = limit(runtime.isa, runtime.pool, LIMIT_UNITS)
        peak = done / best(lambda limit=limit: limit(runtime.isa, runtime.pool, LIMIT_UNITS))
        print(f"{stored} cache, {precision} products: {rate / 1e9:.0f} GFLOP/s, {rate / peak:.0%} of {peak / 1e9:.0f}")


if __name__ == "__main__":
    main()
