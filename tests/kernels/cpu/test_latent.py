"""Native latent attention against float64, and the same bits whatever else a step computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.attention.dealt import DealtTokens
from quire.attention.interface import AttentionBatch
from quire.attention.native_backend import NativeAttention, RecordedAttention
from quire.errors import ConfigError
from quire.kernels.arguments import LatentShape, RotaryFrequencies
from quire.kernels.cpu import _native
from quire.kernels.cpu.recorder import RecordedIndices, Recorder
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kv_cache.deal import ALL_TOKENS, Deal
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import LatentSpec
from quire.layers.native import NativeOperations
from quire.quantization.interface import LinearShape
from quire.quantization.packed import PackedLinear
from quire.quantization.weight_format import WeightFormat
from quire.worker.block_tables import table_shapes
from quire.worker.kv_tensors import allocate_pages
from tests.fakes.ranks import ThreadRank, run_ranks
from tests.kernels.cpu.attention_pool import BF16_ISAS, ISAS, PRODUCTS
from tests.kernels.cpu.linear_calls import ISAS as LINEAR_ISAS
from tests.long import one_in

STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WAYS = [*((isa, cache) for isa in ISAS for cache in STORED), *((isa, PRODUCTS) for isa in BF16_ISAS)]
SMALL, LARGE = LatentShape(0, 3, 24, 6, 0.3), LatentShape(0, 70, 64, 16, 0.2)
MOST_ROWS = 320


class Pool:
    """One layer's pages, and a program that attends over them. Each sequence has blocks of its own."""

    def __init__(
        self,
        isa: str,
        cache: str,
        shape: LatentShape,
        *,
        block_size: int = 16,
        length: int = 600,
        threads: int = 2,
        dealt: DealtTokens | None = None,
    ) -> None:
        dtype, precision = ("bfloat16", "bfloat16") if cache == PRODUCTS else (cache, "float32")
        self.shape = shape
        self.blocks_each = -(-length // block_size)
        spec = LatentSpec(shape.width, STORED[dtype].itemsize, dealt_to=1 if dealt is None else dealt.deal.num_ranks)
        layout = KVCacheLayout(block_size, 1 + 3 * self.blocks_each, *group_layers([spec], block_size))
        self._pages = allocate_pages(layout)
        self._pages[0].fill_(0xC7)  # what a former owner left: finite numbers
        self._backend = NativeAttention(layout, self._pages, dtype, shape.num_heads, threads, dealt)
        (self._table_shape,) = table_shapes(layout, ALL_TOKENS if dealt is None else dealt.deal)
        operations, recorder = NativeOperations(), Recorder()
        widths = (shape.num_heads * shape.rank, shape.num_heads * shape.rope_dim, shape.rank, shape.rope_dim)
        inputs = [recorder.external(width, width) for width in widths]
        if dealt is not None:  # keys are turned in place, which an external buffer cannot be
            scaled = {"kind": _native.Elementwise.SCALE, "factor": 1.0, "width": shape.rope_dim}
            inputs[3] = recorder.call("elementwise", shape.rope_dim, buffers={"x": inputs[3], "y": None}, **scaled)
        positions = RecordedIndices(recorder, _native.SLOT_POSITIONS)
        self.frequencies = 3.0 ** -torch.arange(shape.rope_dim // 2).float()
        turn = operations.rotation(RotaryFrequencies(self.frequencies, 1.0, torch.float32), positions)
        result = RecordedAttention(self._backend).attend_latent(shape, tuple(inputs), turn)
        self._program = recorder.finish_program(result, NativeRuntime(isa, threads, precision), MOST_ROWS)

    def step(self, work: list[tuple[int, int, tuple[torch.Tensor, ...]]]) -> list[torch.Tensor]:
        """(sequence, start position, its rows of the four inputs) -> results of each."""
        counts = torch.tensor([len(rows[0]) for _, _, rows in work])
        starts = torch.tensor([start for _, start, _ in work])
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        index = torch.repeat_interleave(torch.arange(len(work)), counts)
        # Blocks lie backwards.
        tables = torch.stack([(1 + seq + 3 * torch.arange(self.blocks_each)).flip(0) for seq, _, _ in work]).int()
        slots = torch.from_numpy(self._table_shape.slots(tables.numpy(), index.numpy(), positions.numpy()))
        query_start = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        batch = AttentionBatch(query_start, starts, positions, index, (tables,), (slots,))
        rows = [torch.cat([own[each] for _, _, own in work]).clone() for each in range(4)]
        plans = self._backend.plan(batch).plans
        self._program.run(len(positions), (None, positions), plans=plans, externals=rows)
        return [part.clone() for part in self._program.result(len(positions)).split(counts.tolist())]


def inputs(shape: LatentShape, length: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    widths = (shape.num_heads * shape.rank, shape.num_heads * shape.rope_dim, shape.rank, shape.rope_dim)
    return tuple(torch.randn(length, width, generator=generator) for width in widths)


def part(rows: tuple[torch.Tensor, ...], start: int, end: int) -> tuple[torch.Tensor, ...]:
    return tuple(each[start:end] for each in rows)


def in_chunks(pool: Pool, rows: tuple[torch.Tensor, ...], chunks: list[int]) -> torch.Tensor:
    parts, start = [], 0
    for chunk in chunks:
        parts += pool.step([(0, start, part(rows, start, start + chunk))])
        start += chunk
    return torch.cat(parts)


def turned(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, dim] at positions 0 ... T - 1."""
    angles = torch.arange(len(x))[:, None, None] * frequencies.double()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def exact(pool: Pool, rows: tuple[torch.Tensor, ...], cache: str) -> torch.Tensor:
    shape = pool.shape
    query, turned_query, latent, key = (each.double() for each in rows)
    turned_query = turned(turned_query.unflatten(1, (shape.num_heads, -1)), pool.frequencies)
    kept = torch.cat((latent, turned(key[:, None], pool.frequencies)[:, 0]), dim=1)
    kept = kept.to(STORED["bfloat16" if cache == PRODUCTS else cache]).double()
    queries = torch.cat((query.unflatten(1, (shape.num_heads, -1)), turned_query), dim=2)
    scores = torch.einsum("thd,ld->htl", queries, kept) * shape.scale
    weights = scores.masked_fill(torch.ones(len(query), len(query)).triu(1).bool(), -torch.inf).softmax(-1)
    return torch.einsum("htl,ld->thd", weights, kept[:, : shape.rank]).flatten(1)


@pytest.mark.parametrize(("isa", "cache"), WAYS)
@pytest.mark.parametrize(("shape", "length"), [(SMALL, 300), (LARGE, 21)])
def test_it_is_attention_over_latents(isa: str, cache: str, shape: LatentShape, length: int) -> None:
    pool, rows = Pool(isa, cache, shape), inputs(shape, length)
    (result,) = pool.step([(0, 0, rows)])
    tolerance = 0.05 if cache == PRODUCTS else 2e-3 if cache == "bfloat16" else 2e-5
    torch.testing.assert_close(result.double(), exact(pool, rows, cache), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("isa", "cache"), WAYS)
def test_the_same_bits_alone_in_chunks_in_a_batch_and_on_any_number_of_threads(isa: str, cache: str) -> None:
    length = 290
    rows = inputs(SMALL, length)
    (whole,) = Pool(isa, cache, SMALL).step([(0, 0, rows)])
    pool = Pool(isa, cache, SMALL, block_size=2, threads=1)
    assert torch.equal(in_chunks(pool, rows, [1, 7, 255, 20, 7]), whole)
    pool = Pool(isa, cache, SMALL, block_size=64, threads=3)
    others = [inputs(SMALL, 21, seed=2), inputs(SMALL, 270, seed=3)]
    pool.step([(1, 0, part(others[0], 0, 20)), (0, 0, part(rows, 0, 280))])
    pool.step([(2, 0, part(others[1], 0, 269))])
    results = pool.step(
        [(2, 269, part(others[1], 269, 270)), (0, 280, part(rows, 280, 290)), (1, 20, part(others[0], 20, 21))]
    )
    assert torch.equal(results[1], whole[280:])
    for seed, result in ((3, results[0]), (2, results[2])):
        alone = inputs(SMALL, {3: 270, 2: 21}[seed], seed)
        assert torch.equal(Pool(isa, cache, SMALL).step([(0, 0, alone)])[0][-1:], result)


@pytest.mark.parametrize(("isa", "cache", "count", "run"), one_in(3, WAYS, [(2, 1), (3, 16)]))
def test_ranks_that_keep_a_part_of_the_latents_each(isa: str, cache: str, count: int, run: int) -> None:
    """As exact as one rank, with the same bits in chunks, on any number of threads, and where a rank sees nothing."""
    whole, length = replace(SMALL, num_heads=3 * count), 560
    rows = inputs(whole, length)

    def compute(rank: ThreadRank) -> list[torch.Tensor]:
        halves = (each.chunk(count, dim=1)[rank.rank] for each in rows[:2])
        own, dealt = (*halves, *rows[2:]), DealtTokens(Deal(count, rank.rank, run), rank)
        found = []
        for threads, chunks in ((1, [300, 260]), (2, [1, 258, 300, 1]), (3, [17, 3, 270, 270])):
            found.append(in_chunks(Pool(isa, cache, SMALL, threads=threads, dealt=dealt), own, chunks))
        return found

    found = run_ranks(count, compute)
    for first, *others in found:
        assert all(torch.equal(first, other) for other in others)
    tolerance = 0.05 if cache == PRODUCTS else 2e-3 if cache == "bfloat16" else 2e-5
    expected = exact(Pool(isa, cache, whole), rows, cache)
    torch.testing.assert_close(torch.cat([each[0] for each in found], 1).double(), expected, rtol=0, atol=tolerance)


def test_a_long_sequence_is_shared_out_over_threads() -> None:
    """Enough splits and heads that one token is several items, put together afterwards."""
    rows = inputs(LARGE, 601)
    pools = [Pool("auto", "float32", LARGE, length=640, threads=threads) for threads in (1, 3)]
    results = [in_chunks(pool, rows, [300, 300, 1])[-1:] for pool in pools]
    assert torch.equal(*results)
    assert max(plan.num_merges for plan in pools[1]._backend.plans) > 0


@pytest.mark.parametrize(("rank", "rope_dim"), [(20, 8), (520, 64), (512, 130), (64, 7)])
def test_widths_that_there_is_no_room_for(rank: int, rope_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"latents of {rank} \\+ {rope_dim} elements"):
        NativeOperations().check_latent(LatentShape(0, 2, rank, rope_dim, 1.0))


@pytest.mark.parametrize("isa", LINEAR_ISAS)
@pytest.mark.parametrize("form", [WeightFormat("float32"), WeightFormat("bfloat16"), WeightFormat("float32", 8)])
@pytest.mark.parametrize(("in_features", "out_features"), [(24, 40), (128, 33)])
def test_products_of_heads(isa: str, form: WeightFormat, in_features: int, out_features: int) -> None:
    heads, num_rows = 3, 210
    linear, generator = PackedLinear(form), torch.Generator().manual_seed(0)
    shape = LinearShape(in_features, out_features, False, torch.float32, torch.device("cpu"))
    stack = linear.create_stack(shape, heads)
    weights = torch.randn(heads, out_features, in_features, generator=generator)
    for parameters, weight in zip(stack, weights, strict=True):
        linear.load_rows(parameters, "weight", weight, 0, out_features)
    recorder = Recorder()
    result = linear.apply_heads(stack, recorder.external(heads * in_features, heads * in_features))
    program = recorder.finish_program(result, NativeRuntime(isa, 2), num_rows)
    x = torch.randn(num_rows, heads * in_features, generator=generator)
    program.run(num_rows, externals=(x,))
    computed = program.result(num_rows).clone()
    stored = torch.stack([parameters.matrix.dequantize() for parameters in stack])
    expected = torch.einsum("thk,hnk->thn", x.double().unflatten(1, (heads, -1)), stored.double())
    torch.testing.assert_close(computed.double(), expected.flatten(1), rtol=0, atol=1e-4)
    for first, last in ((0, 1), (5, 18), (95, 110)):
        program.run(last - first, externals=(x[first:last],))
        assert torch.equal(program.result(last - first), computed[first:last])
