"""The native indexer of sparse latent attention: it chooses the keys that float64 does, ties by position, the same ones
whatever else a step computes."""

from __future__ import annotations

import pytest
import torch

from quire.attention.interface import AttentionBatch
from quire.attention.native_backend import NativeAttention, RecordedAttention
from quire.errors import ConfigError
from quire.kernels.arguments import IndexShape, LatentShape
from quire.kernels.cpu.recorder import Recorder
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import LatentSpec
from quire.layers.native import NativeOperations
from quire.worker.kv_tensors import allocate_pages
from tests.kernels.cpu.attention_pool import ISAS
from tests.long import one_in

STORED = {"float32": 4, "bfloat16": 2}
MOST_ROWS = 640
Rows = tuple[torch.Tensor, ...]
"""Queries, keys and weights of the indexer; queries, rotated queries, latents and rotated keys of the attention."""


class Pool:
    """One layer's pages, and a program that chooses keys and attends over them."""

    def __init__(self, isa: str, cache: str, top: int, heads: int, *, block_size: int = 16, threads: int = 2) -> None:
        self.block_size, self.blocks_each = block_size, -(-MOST_ROWS // block_size)
        self.index = IndexShape(0, heads, 24, 8, top, 32, 0.25)
        self.shape = LatentShape(0, 5, 24, 8, 0.3, top)
        spec = LatentSpec(32, STORED[cache], index_width=24, top=top)
        layout = KVCacheLayout(block_size, 1 + 2 * self.blocks_each, *group_layers([spec], block_size))
        self._pages = allocate_pages(layout)
        self._pages[0].fill_(0xC7)  # what a former owner left: finite numbers
        self._backend = NativeAttention(layout, self._pages, cache, self.shape.num_heads, threads)
        step, recorder = RecordedAttention(self._backend), Recorder()
        inputs = [recorder.external(width, width) for width in self.widths()]
        selected = step.select_keys(self.index, (inputs[0], inputs[1], inputs[2]), None)
        latent = (inputs[3], inputs[4], inputs[5], inputs[6])
        result = step.attend_latent(self.shape, latent, None, selected)
        self._program = recorder.finish_program(result, NativeRuntime(isa, threads, "float32"), MOST_ROWS)

    def widths(self) -> list[int]:
        index, shape = self.index, self.shape
        own = [index.num_heads * index.dim, index.dim, index.num_heads]
        return [*own, shape.num_heads * shape.rank, shape.num_heads * shape.rope_dim, shape.rank, shape.rope_dim]

    def rows(self, length: int, seed: int = 0) -> Rows:
        """Whole numbers for the indexer: scores are exact, and many are equal."""
        generator = torch.Generator().manual_seed(seed)
        whole = [torch.randint(-2, 3, (length, width), generator=generator).float() for width in self.widths()[:3]]
        return (*whole, *(torch.randn(length, width, generator=generator) for width in self.widths()[3:]))

    def step(self, work: list[tuple[int, int, Rows]]) -> list[torch.Tensor]:
        """(sequence, start position, its rows) -> results of each."""
        counts = torch.tensor([len(rows[0]) for _, _, rows in work])
        starts = torch.tensor([start for _, start, _ in work])
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        index = torch.repeat_interleave(torch.arange(len(work)), counts)
        tables = torch.stack([(1 + seq + 2 * torch.arange(self.blocks_each)).flip(0) for seq, _, _ in work]).int()
        slots = tables[index, positions // self.block_size].long() * self.block_size + positions % self.block_size
        query_start = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        batch = AttentionBatch(query_start, starts, positions, index, (tables,), (slots,))
        rows = [torch.cat([own[each] for _, _, own in work]).clone() for each in range(7)]
        self._program.run(len(positions), (None, positions), plans=self._backend.plan(batch).plans, externals=rows)
        return [part.clone() for part in self._program.result(len(positions)).split(counts.tolist())]

    def exact(self, rows: Rows, cache: str) -> torch.Tensor:
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[cache]
        query, key, weights, attending, turned, latent, turned_key = (each.double() for each in rows)
        scores = torch.einsum("thd,ld->thl", query.unflatten(1, (-1, self.index.dim)), key).relu()
        scores = torch.einsum("thl,th->tl", scores, weights)
        hidden = torch.ones(len(query), len(query)).triu(1).bool()
        best = scores.masked_fill(hidden, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        hidden |= torch.ones_like(hidden).scatter(1, best[:, : self.index.top], False)
        kept = torch.cat((latent, turned_key), dim=1).to(dtype).double()
        both = torch.cat((attending.unflatten(1, (5, -1)), turned.unflatten(1, (5, -1))), dim=2)
        weighed = (torch.einsum("thd,ld->htl", both, kept) * self.shape.scale).masked_fill(hidden, -torch.inf)
        return torch.einsum("htl,ld->thd", weighed.softmax(-1), kept[:, :24]).flatten(1)


def part(rows: Rows, start: int, end: int) -> Rows:
    return tuple(each[start:end] for each in rows)


@pytest.mark.parametrize(
    ("isa", "cache", "top", "heads", "length"),
    one_in(3, ISAS, STORED, [(1, 1, 9), (7, 3, 60), (40, 17, 130), (300, 64, 620), (64, 5, 64)]),
)
def test_it_reads_the_best_keys(isa: str, cache: str, top: int, heads: int, length: int) -> None:
    pool = Pool(isa, cache, top, heads)
    rows = pool.rows(length)
    (result,) = pool.step([(0, 0, rows)])
    tolerance = 2e-3 if cache == "bfloat16" else 2e-5
    torch.testing.assert_close(result.double(), pool.exact(rows, cache), rtol=0, atol=tolerance)


@pytest.mark.parametrize("isa", ISAS)
def test_the_same_bits_in_chunks_in_a_batch_and_on_any_number_of_threads(isa: str) -> None:
    pool = Pool(isa, "bfloat16", 30, 9)
    rows, other = pool.rows(210), pool.rows(90, seed=2)
    (whole,) = pool.step([(0, 0, rows)])
    pool = Pool(isa, "bfloat16", 30, 9, block_size=4, threads=1)
    parts, start = [], 0
    for chunk in (1, 7, 31, 64, 100, 7):
        parts += pool.step([(0, start, part(rows, start, start + chunk))])
        start += chunk
    assert torch.equal(torch.cat(parts), whole)
    pool = Pool(isa, "bfloat16", 30, 9, threads=3)
    pool.step([(1, 0, part(other, 0, 80)), (0, 0, part(rows, 0, 200))])
    results = pool.step([(0, 200, part(rows, 200, 210)), (1, 80, part(other, 80, 90))])
    assert torch.equal(results[0], whole[200:])


@pytest.mark.parametrize("isa", ISAS)
def test_where_all_keys_are_read_the_bits_are_those_of_dense_attention(isa: str) -> None:
    sparse, dense = Pool(isa, "float32", 300, 3), Pool(isa, "float32", 301, 3)
    rows = sparse.rows(300)
    assert torch.equal(sparse.step([(0, 0, rows)])[0], dense.step([(0, 0, rows)])[0])
    # A dense pool of the same latents, without an indexer.
    layout = KVCacheLayout(16, 40, *group_layers([LatentSpec(32, 4)], 16))
    pages = allocate_pages(layout)
    backend, recorder = NativeAttention(layout, pages, "float32", 5, 2), Recorder()
    inputs = [recorder.external(width, width) for width in sparse.widths()[3:]]
    shape = LatentShape(0, 5, 24, 8, 0.3)
    result = RecordedAttention(backend).attend_latent(shape, (inputs[0], inputs[1], inputs[2], inputs[3]), None)
    program = recorder.finish_program(result, NativeRuntime(isa, 2, "float32"), MOST_ROWS)
    positions = torch.arange(300)
    table = torch.arange(1, 40, dtype=torch.int32)[None]
    slots = table[0, positions // 16].long() * 16 + positions % 16
    starts = torch.tensor([0, 300]), torch.tensor([0])
    batch = AttentionBatch(*starts, positions, torch.zeros(300, dtype=torch.int64), (table,), (slots,))
    program.run(300, (None, positions), plans=backend.plan(batch).plans, externals=[each.clone() for each in rows[3:]])
    assert torch.equal(program.result(300), sparse.step([(0, 0, rows)])[0])


def test_scores_that_are_not_numbers_choose_the_same_keys_every_time() -> None:
    pool = Pool("auto", "float32", 20, 3)
    rows = pool.rows(100)
    rows[0][70:] = torch.nan
    rows[1][50] = torch.inf
    (first,), (again,) = pool.step([(0, 0, rows)]), pool.step([(0, 0, rows)])
    assert torch.equal(first, again)
    assert bool(first.isfinite().all()), "what is read is finite, whatever chose it"


def test_an_indexer_that_the_kernels_have_no_room_for() -> None:
    for heads, dim, top in ((65, 24, 8), (3, 20, 8), (3, 24, 8193)):
        with pytest.raises(ConfigError, match="an indexer of"):
            NativeOperations().check_index(IndexShape(0, heads, dim, 8, top, 32, 1.0))
