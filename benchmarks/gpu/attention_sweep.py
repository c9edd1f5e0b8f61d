"""Attention over many sizes of tiles: python -m benchmarks.gpu.attention_sweep [--out FILE] [--seconds S] [--tiny]

What `quire/kernels/triton/attention_tiles.py` chooses, and what it might choose instead, timed side by side; the
kernels alone, without norms, rotation and writes. Last comes a table: the choice, that of batch-invariant mode, and the
fastest. --tiny runs a tiny shape wherever this is, to try the script.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu import records
from benchmarks.gpu.attention_subjects import (
    DECODES,
    PROMPTS,
    AttentionSubjects,
    Batch,
    device_batch,
    device_limits,
    scattered_tables,
)
from benchmarks.gpu.limits import Ceilings, Work, measure_ceilings
from benchmarks.gpu.shapes import QWEN3_8B, TINY, Shape
from benchmarks.gpu.subjects import BLOCK_SIZE
from benchmarks.gpu.timing import CACHE_BYTES, Call, measure, num_copies
from quire.attention.interface import LayerAttention
from quire.kernels.triton.attention_tiles import (
    HeadShape,
    SplitPlan,
    Tiles,
    fixed_split_plan,
    fixed_tiles,
    scratch_rows,
    split_plan,
    varlen_tiles,
)
from quire.kernels.triton.decode_attention import SplitScratch, split_attention
from quire.kernels.triton.paged_attention import PagedAttention, varlen_attention

VARLEN_TILES = [
    Tiles(block_m, block_n, num_warps, num_stages)
    for block_m, num_warps in ((64, 4), (128, 4), (128, 8))
    for block_n, num_stages in ((64, 2), (64, 3), (64, 4), (128, 2), (128, 3))
]
SPLIT_TILES = [
    Tiles(block_m, block_n, num_warps, num_stages)
    for block_m in (16, 64)
    for block_n, num_warps, num_stages in itertools.product((32, 64, 128), (2, 4), (2, 3, 4))
]
SPLITS = (0.5, 2.0)
"""Of the number of splits that is chosen."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a batch. plan: of the split kernel; None: the varlen kernel runs, with `tiles`."""

    tiles: Tiles
    plan: SplitPlan | None

    @property
    def name(self) -> str:
        tiles = self.tiles
        size = f"{tiles.block_m} x {tiles.block_n}, {tiles.num_warps} warps, {tiles.num_stages} stages"
        return size if self.plan is None else f"{size}, {self.plan.num_programs} splits"


class Sweep:
    """Over one layer of a shape. scale: divides lengths and numbers of sequences, for trying things out."""

    def __init__(self, shape: Shape, device: torch.device, scale: int = 1) -> None:
        self._subjects = AttentionSubjects(shape, device, scale)
        self._shape = shape
        self._device = device
        self.heads = HeadShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.itemsize)
        self._layer = LayerAttention(0, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5)
        self.limits = device_limits(device)

    def batches(self) -> list[Batch]:
        return [self.scaled(batch) for batch in (*DECODES, *PROMPTS)]

    def scaled(self, batch: Batch) -> Batch:
        return self._subjects.scaled(batch)

    def run(self, batch: Batch, candidate: Candidate) -> torch.Tensor:
        """The result [tokens, num_heads * head_dim] over random operands, which torch's seed decides."""
        call, out = self._prepared(batch, candidate)
        call()
        return out

    def candidates(self, batch: Batch) -> list[Candidate]:
        """The choice first, then that of batch-invariant mode, then all others."""
        fixed = fixed_tiles(self.heads, self.limits)
        if batch.num_new > 1:
            chosen = varlen_tiles(self.heads, batch.num_new, self.limits)
            return [Candidate(tiles, None) for tiles in dict.fromkeys((chosen, fixed, *VARLEN_TILES))]
        plan = split_plan(self.heads, batch.num_seqs, batch.length, self.limits)
        splits = [max(1, round(plan.num_programs * factor)) for factor in SPLITS]
        found = [
            Candidate(plan.tiles, plan),
            Candidate(fixed, fixed_split_plan(self.heads, batch.num_seqs, batch.length, None, self.limits)),
            *(Candidate(plan.tiles, replace(plan, num_programs=count, capacity=count)) for count in splits),
            *(
                Candidate(tiles, replace(plan, tiles=tiles, min_keys=max(plan.min_keys, tiles.block_n)))
                for tiles in SPLIT_TILES
            ),
        ]
        return list(dict.fromkeys(found))

    def work(self, batch: Batch) -> Work:
        """As the subjects count it, but queries are read, results written, and keys and values read: nothing else."""
        shape = self._shape
        rows = 2 * batch.num_seqs * batch.num_new * shape.num_heads * shape.head_dim * shape.itemsize
        cached = batch.num_seqs * batch.length * shape.kv_bytes
        return replace(self._subjects.work(batch), bytes=float(rows + cached))

    def call(self, batch: Batch, candidate: Candidate) -> Call:
        """Operands of its own, and the launch over them."""
        return self._prepared(batch, candidate)[0]

    def _prepared(self, batch: Batch, candidate: Candidate) -> tuple[Call, torch.Tensor]:
        shape = self._shape
        tables, num_blocks = scattered_tables(batch, BLOCK_SIZE, self._device)
        described = device_batch(batch, tables, BLOCK_SIZE, self._device)
        random = partial(torch.randn, device=self._device, dtype=getattr(torch, shape.dtype))
        pages = random(num_blocks, 2, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        query = random(described.num_tokens, shape.qkv_width)
        out = torch.empty_like(query[:, : shape.num_heads * shape.head_dim])
        plan, work = candidate.plan, PagedAttention(query, pages, out, described, 0, self._layer)
        if plan is None:
            return partial(varlen_attention, work, candidate.tiles), out
        rows = scratch_rows(plan, self.heads, batch.num_seqs)
        scratch = SplitScratch.allocate(rows, shape.head_dim, self._device)
        return partial(split_attention, work, plan, scratch), out

    def records(self, batch: Batch, ceilings: Ceilings, cache_bytes: int) -> Iterator[records.Record]:
        """One for each candidate. One that does not fit the card is a record, too."""
        work = self.work(batch)
        for index, candidate in enumerate(self.candidates(batch)):
            role = ("choice", "batch-invariant")[index] if index < 2 else "other"
            base = {"part": "sweep", "what": role, "case": batch.name, "tiles": candidate.name}
            try:
                calls = [self.call(batch, candidate) for _ in range(num_copies(work.bytes, cache_bytes))]
                timing = measure(calls, self._device)
            except Exception as error:
                yield {**base, "error": f"{type(error).__name__}: {str(error)[:200]}"}
                continue
            share = ceilings.share(work, timing.median)
            yield {**base, "seconds": timing.median, "spread": timing.spread, "share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("attention-sweep.json"))
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no batch after this long")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert arguments.tiny or device.type == "cuda", "no CUDA device"
    emit, started = records.writer(arguments.out), time.monotonic()
    with torch.inference_mode():
        sizes = {"num_bytes": 1 << 16, "size": 64} if arguments.tiny else {}
        ceilings, _ = measure_ceilings(device, **sizes)
        sweep = Sweep(TINY, device, 512) if arguments.tiny else Sweep(QWEN3_8B, device)
        for batch in sweep.batches():
            if time.monotonic() - started > arguments.seconds:
                emit({"part": "sweep", "what": "skipped", "case": batch.name})
                continue
            for record in sweep.records(batch, ceilings, 1 if arguments.tiny else CACHE_BYTES):
                emit(record)
    print(summary(records.read(arguments.out)))


def summary(found: list[records.Record]) -> str:
    """One line for each batch: shares of the limit, and the tiles of the fastest."""
    lines = [f"{'batch':34} choice  batch-invariant  fastest"]
    for case in dict.fromkeys(record["case"] for record in found):
        timed = [record for record in found if record["case"] == case and "share" in record]
        by_role = {record["what"]: record["share"] for record in timed if record["what"] != "other"}
        shares = [f"{by_role[role]:.1%}" if role in by_role else "failed" for role in ("choice", "batch-invariant")]
        best = max(timed, key=lambda record: record["share"], default=None)
        fastest = "none" if best is None else f"{best['share']:.1%} ({best['tiles']})"
        lines.append(f"{case:34} {shares[0]:>6}  {shares[1]:>15}  {fastest}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
