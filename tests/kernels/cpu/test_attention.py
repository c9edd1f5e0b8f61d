"""Native paged attention: right, and the same bits whatever surrounds a query."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from quire.config.model import CACHE_DTYPE_BYTES, CACHE_SCALE_BYTES
from quire.errors import ConfigError
from quire.kernels.arguments import CacheScale, LayerAttention
from quire.kernels.cpu import _native, paged_attention
from quire.kernels.cpu.paged_attention import block_bytes, check_shape
from quire.kv_cache.spec import AttentionSpec
from tests.kernels.cpu.attention_pool import (
    BF16_ISAS,
    ISAS,
    POOLS,
    PRODUCTS,
    STORED,
    WAYS,
    History,
    NativePool,
    Options,
    Setting,
    rotations,
)
from tests.long import one_in

GROUPED = LayerAttention(layer=0, num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25)
LAYERS = {
    "grouped": GROUPED,
    "multi-head": LayerAttention(layer=0, num_heads=3, num_kv_heads=3, head_dim=24, scale=0.3),
    "one-key-head": LayerAttention(layer=0, num_heads=16, num_kv_heads=1, head_dim=8, scale=0.4),
    "head-dim-80": LayerAttention(layer=0, num_heads=4, num_kv_heads=2, head_dim=80, scale=0.11),
    "head-dim-96": LayerAttention(layer=0, num_heads=8, num_kv_heads=1, head_dim=96, scale=0.1),
    "head-dim-256": LayerAttention(layer=0, num_heads=2, num_kv_heads=1, head_dim=256, scale=1 / 16),
    "window": replace(GROUPED, window=50),
    "window-of-one": replace(GROUPED, window=1),
    "chunks": replace(GROUPED, window=50, is_chunked=True),
    "soft-cap": replace(GROUPED, soft_cap=2.0),
    "wide-group": LayerAttention(layer=0, num_heads=110, num_kv_heads=1, head_dim=16, scale=0.25),
}
PRECISION = 2e-5
"""Scores of some 30 in float32."""

every_way = pytest.mark.parametrize(("isa", "cache"), WAYS)
every_isa = pytest.mark.parametrize("isa", ISAS)
every_cache = pytest.mark.parametrize("cache", list(STORED))


def random_layer(draw: random.Random) -> LayerAttention:
    kv_heads = draw.choice([1, 2, 3, 5])
    head_dim = draw.choice([8, 16, 40, 64, 80, 96, 128, 200, 256])
    window = draw.choice([None, None, 1, 30, 100, 1000])
    return LayerAttention(
        layer=0,
        num_heads=kv_heads * draw.choice([1, 2, 3, 7, 16]) if kv_heads == 1 else kv_heads * draw.randint(1, 3),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        is_chunked=window is not None and draw.random() < 0.4,
        soft_cap=draw.choice([None, None, 5.0]),
    )


def random_sinks(layer: LayerAttention, draw: random.Random) -> Options:
    return Options(sinks=torch.randn(layer.num_heads) * 3 if draw.random() < 0.3 else None)


@pytest.mark.parametrize(("isa", "cache", "seed"), one_in(3, WAYS, range(3)))
def test_equals_dense_attention_in_float64(isa: str, cache: str, seed: int) -> None:
    """Mixed batches of prompts, chunks and single tokens, over two steps."""
    draw = random.Random(f"{cache} {seed}")
    torch.manual_seed(seed)
    layer = random_layer(draw)
    lengths = [draw.choice([1, 2, 17, 64, 65, 130, 270]) for _ in range(draw.randint(1, 5))]
    setting = Setting(isa, draw.choice([1, 2, 3]), cache, draw.choice([1, 4, 16, 32, 64]), seed)
    pool = NativePool(layer, lengths, setting, random_sinks(layer, draw))
    histories = [History.random(length, layer, 10 * seed + i) for i, length in enumerate(lengths)]
    while left := [(s, n) for s, n in enumerate(map(int.__sub__, lengths, pool.computed)) if n]:
        work = [(s, draw.choice([1, n, (n + 1) // 2])) for s, n in left]
        starts = dict(enumerate(pool.computed))
        for (s, n), out in zip(work, pool.step(histories, work), strict=True):
            pool.check(out, s, histories[s].q[starts[s] : starts[s] + n], starts[s], PRECISION)


@pytest.mark.parametrize(("isa", "cache"), one_in(4, WAYS))
def test_long_context(isa: str, cache: str) -> None:
    layer = replace(LAYERS["head-dim-80"], window=1500)
    history = History.random(2300, layer, seed=1)
    pool = NativePool(layer, [2300], Setting(isa, 2, cache, 32))
    out = torch.cat([pool.step([history], [(0, n)])[0] for n in (2200, 99, 1)])
    for first, last in ((0, 70), (1400, 1600), (2190, 2300)):
        pool.check(out[first:last], 0, history.q[first:last], first, PRECISION)


@every_way
@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e6])
def test_queries_and_values_of_any_size(isa: str, cache: str, size: float) -> None:
    """8-bit elements meet queries and weights as whole numbers of their rows' scales."""
    layer = LAYERS["head-dim-80"]
    history = History.random(150, layer, seed=6)
    history.q *= size
    history.q[5, 1] = 0
    history.k /= size
    history.v *= 1 / size
    history.v[20:40] = 0
    pool = NativePool(layer, [150], Setting(isa, 2, cache))
    pool.check(pool.whole(history, 60), 0, history.q, 0, PRECISION / size)


@pytest.mark.parametrize("isa", BF16_ISAS)
def test_products_of_bfloat16_are_only_made_when_asked_for(isa: str) -> None:
    history = History.random(40, GROUPED, seed=6)
    settings = [Setting(isa, 1, cache) for cache in ("bfloat16", PRODUCTS)]
    exact, rounded = (NativePool(GROUPED, [40], setting).whole(history) for setting in settings)
    assert not torch.equal(exact, rounded)
    with pytest.raises(ValueError, match="no bfloat16 products"):
        NativePool(GROUPED, [40], Setting("portable", 1, PRODUCTS))


@every_cache
@pytest.mark.parametrize("block_size", [1, 2, 16, 32])
def test_what_is_written(cache: str, block_size: int) -> None:
    """Keys and values in the cache's type: rounded to nearest, ties to even; 8 bits by the largest of the head."""
    history = History.random(50, GROUPED, seed=2)
    pool = NativePool(GROUPED, [50], Setting("auto", 1, cache, block_size))
    pool.whole(history, 7)
    positions = torch.arange(50)
    kept = pool.stored()[pool.tables[0].long()[positions // block_size], :, positions % block_size]
    given = torch.stack((history.k, history.v), dim=1)
    if cache == "int8":
        scale = given.abs().amax(-1, keepdim=True) / 127
        given = (given / scale).round().double() * scale.double()
    else:
        given = given.to(STORED[cache]).double()
    assert torch.equal(kept, given)


@every_isa
def test_every_rounding_to_8_bit_floats(isa: str) -> None:
    """Each number of e4m3, the middles between neighbours (ties go to the even code), what lies beside them, and what
    is larger than the largest number, which is kept as that."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat((numbers, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), torch.tensor([449.0, 1e30])))
    values = torch.cat((values, -values))
    layer = LayerAttention(layer=0, num_heads=1, num_kv_heads=1, head_dim=256, scale=1.0)
    count = -(-len(values) // 256)
    drawn = torch.nn.functional.pad(values, (0, count * 256 - len(values))).view(count, 1, 256)
    history = History(torch.zeros(count, 1, 256), drawn, drawn.flip(-1))
    pool = NativePool(layer, [count], Setting(isa, 1, "fp8"))
    pool.whole(history)
    kept = pool.stored()[pool.tables[0].long()[0], :, :count]
    expected = drawn.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    assert torch.equal(kept[0], expected)
    assert torch.equal(kept[1], expected.flip(-1))


@every_isa
def test_8_bit_floats_with_scales_of_the_layer(isa: str) -> None:
    """Keys and values are divided by theirs, in float32, and rounded once: large ones are not cut off."""
    layer = replace(GROUPED, scale=GROUPED.scale / 3000, soft_cap=9.0, cache_scale=CacheScale(61.3, 0.0003))
    history = History.random(150, layer, seed=8)
    history.k *= 3000
    history.v *= 0.03
    setting, options = Setting(isa, 2, "fp8"), Options(sinks=torch.linspace(-2, 3, 6))
    pool, chunks = (NativePool(layer, [150], setting, options) for _ in range(2))
    out = pool.whole(history)
    positions = torch.arange(150)
    kept = pool.stored()[pool.tables[0].long()[positions // 16], :, positions % 16]
    given = torch.stack((history.k / 61.3, history.v / 0.0003), dim=1)
    assert 200 < float(given.abs().amax()) < 448
    assert torch.equal(kept, given.to(torch.float8_e4m3fn).double())
    pool.check(out, 0, history.q, 0, 1e-6)
    assert torch.equal(chunks.whole(history, 41), out)


@every_isa
@pytest.mark.parametrize("part", ["k", "v"])
def test_8_bit_floats_keep_what_is_not_finite(isa: str, part: str) -> None:
    """A later step sees it, in any place of the head, alone and in a batch of rows."""
    for rows in (1, 60):
        history = History.random(200, GROUPED, seed=20)
        getattr(history, part)[12, 0, 7] = float("inf")
        pool = NativePool(GROUPED, [200], Setting(isa, 1, "fp8"))
        pool.step([history], [(0, 100)])
        (out,) = pool.step([history], [(0, rows)])
        assert out[:, :3].isnan().all()
        assert out[:, 3:].isfinite().all()


@every_isa
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (24, 24), (40, 8)])
def test_norm_and_rotation_before_attention(isa: str, head_dim: int, rotary_dim: int) -> None:
    layer = LayerAttention(layer=0, num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=0.2)
    torch.manual_seed(head_dim)
    options = Options(None, torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5, 1e-3, rotary_dim)
    history = History.random(90, layer, seed=3)
    pool = NativePool(layer, [90], Setting(isa, 2), options)
    out = pool.whole(history, 33)

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        assert weight is not None
        x = x.double()
        x = x * (x.square().mean(-1, keepdim=True) + options.epsilon).rsqrt() * weight
        half = rotary_dim // 2
        angles = rotations(torch.arange(90), rotary_dim).double()[:, None]
        cos, sin, left, right = angles[..., :half], angles[..., half:rotary_dim], x[..., :half], x[..., half:rotary_dim]
        return torch.cat((left * cos - right * sin, right * cos + left * sin, x[..., rotary_dim:]), dim=-1)

    positions = torch.arange(90)
    kept = pool.stored()[pool.tables[0].long()[positions // 16], 0, positions % 16]
    torch.testing.assert_close(kept, turned(history.k, options.key_norm), rtol=0, atol=3e-6)
    pool.check(out, 0, turned(history.q, options.query_norm), 0, PRECISION)


def options_for(name: str) -> Options:
    layer = LAYERS[name]
    sinks = torch.linspace(-2, 3, layer.num_heads) if name in ("grouped", "window") else None
    return Options(sinks, rotary_dim=8 if name == "head-dim-80" else 0)


def alone(name: str, history: History, setting: Setting, chunk: int = 1 << 20) -> torch.Tensor:
    pool = NativePool(LAYERS[name], [len(history.q)], setting, options_for(name))
    return pool.whole(history, chunk)


@pytest.mark.parametrize(("isa", "cache", "name"), one_in(7, WAYS, LAYERS))
def test_same_bits_whatever_the_chunks_threads_and_blocks(isa: str, cache: str, name: str) -> None:
    history = History.random(330, LAYERS[name], seed=4)
    expected = alone(name, history, Setting(isa, 1, cache))
    for threads, block_size, chunk in ((2, 8, 7), (1, 128, 101), (3, 1, 300)):
        out = alone(name, history, Setting(isa, threads, cache, block_size, seed=9), chunk)
        assert torch.equal(out, expected), (threads, block_size, chunk)


@pytest.mark.parametrize(("isa", "cache", "name"), one_in(3, WAYS, ["grouped", "window", "head-dim-96"]))
def test_same_bits_alone_and_in_a_batch(isa: str, cache: str, name: str) -> None:
    lengths = [1, 2, 40, 64, 65, 130, 256, 257, 600]
    histories = [History.random(length, LAYERS[name], seed=10 + index) for index, length in enumerate(lengths)]
    pool = NativePool(LAYERS[name], lengths, Setting(isa, 2, cache), options_for(name))
    firsts = pool.step(histories, [(index, (length + 1) // 2) for index, length in enumerate(lengths)])
    seconds = pool.step(histories, [(index, length // 2) for index, length in enumerate(lengths) if length > 1])
    for index, history in enumerate(histories):
        whole = torch.cat((firsts[index], seconds[index - 1])) if index else firsts[0]
        assert torch.equal(whole, alone(name, history, Setting(isa, 1, cache))), index


@pytest.mark.skipif("amx" not in BF16_ISAS, reason="the machine has no tiles")
@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 80, 128, 136, 192, 256])
def test_tiles_have_the_bits_of_their_emulation(head_dim: int) -> None:
    """Every way to cut a head into tiles; items of one block of rows and of more; values of all sizes."""
    layer = LayerAttention(layer=0, num_heads=6, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5)
    for each, options in ((layer, Options()), (replace(layer, window=70, soft_cap=3.0), Options(torch.randn(6)))):
        history = History.random(300, each, seed=head_dim)
        history.v *= torch.logspace(-42, 30, 300)[:, None, None]
        outs = []
        for isa in ("amx", "amx_emulated"):
            pool = NativePool(each, [300], Setting(isa, 1, PRODUCTS), options)
            outs.append(torch.cat([pool.step([history], [(0, n)])[0] for n in (280, 6, 1, 13)]))
        assert torch.equal(outs[0].view(torch.int32), outs[1].view(torch.int32))


@pytest.mark.parametrize(("isa", "cache"), one_in(3, [way for way in WAYS if way[1] != "bfloat16"]))
def test_same_bits_when_a_long_context_is_split_over_threads(isa: str, cache: str) -> None:
    """One new token at a time after a long prompt: 1 thread takes whole items, more threads cut them."""
    history = History.random(1300, GROUPED, seed=5)
    outs = []
    for threads in (1, 2, 3):
        pool = NativePool(GROUPED, [1300], Setting(isa, threads, cache))
        pool.step([history], [(0, 1298)])
        assert (pool.plans.set(pool.batch([(0, 1)]))[0].num_merges > 0) == (threads > 1)
        outs.append(torch.cat([*pool.step([history], [(0, 1)]), *pool.step([history], [(0, 1)])]))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[0], NativePool(GROUPED, [1300], Setting(isa, 1, cache)).whole(history)[-2:])


def test_more_splits_than_places_for_them() -> None:
    """What would need more memory than there is stays in one piece."""
    layer = LayerAttention(layer=0, num_heads=64, num_kv_heads=1, head_dim=8, scale=0.3)
    length = 64 * 256 * 3 // 2
    pool = NativePool(layer, [length] * 2, Setting("auto", 3, block_size=64))
    pool.computed = [length - 1, length // 2 - 1]
    plan = pool.plans.set(pool.batch([(0, 1), (1, 1)]))[0]
    assert (plan.num_merges, plan.num_items) == (1, 1 + 8)


@every_way
def test_blocks_outside_the_window_may_be_gone(isa: str, cache: str) -> None:
    """Their entries point to block 0, which holds NaN."""
    history = History.random(300, LAYERS["window"], seed=8)
    expected = alone("window", history, Setting(isa, 1, cache))
    pool = NativePool(LAYERS["window"], [300], Setting(isa, 2, cache), options_for("window"))
    pool.step([history], [(0, 290)])
    pool.tables[0][: (290 - 49) // 16] = 0
    assert torch.equal(torch.cat(pool.step([history], [(0, 10)])), expected[-10:])


@every_way
def test_what_a_former_owner_left_behind_has_no_influence(isa: str, cache: str) -> None:
    history = History.random(70, GROUPED, seed=7)
    pools = [NativePool(GROUPED, [70], Setting(isa, 1, cache), options_for("grouped")) for _ in range(2)]
    pools[1].memory.random_(0, 255, generator=torch.Generator().manual_seed(1))
    assert torch.equal(pools[0].whole(history, 9), pools[1].whole(history, 9))


@every_way
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_an_input_that_is_not_finite_stays_in_its_sequence(isa: str, cache: str, poison: float) -> None:
    histories = [History.random(40, GROUPED, seed=20 + i) for i in range(3)]
    clean = NativePool(GROUPED, [40] * 3, Setting(isa, 2, cache)).step(histories, [(s, 40) for s in range(3)])
    histories[1].k[12, 0, 3] = poison
    out = NativePool(GROUPED, [40] * 3, Setting(isa, 2, cache)).step(histories, [(s, 40) for s in range(3)])
    assert torch.equal(out[0], clean[0])
    assert torch.equal(out[2], clean[2])
    assert out[1][12:, :3].isnan().any(), "the poisoned head shows it"
    assert torch.equal(out[1][:, 3:], clean[1][:, 3:])


def test_sequences_without_new_tokens() -> None:
    history = History.random(40, GROUPED, seed=30)
    pool = NativePool(GROUPED, [40, 40], Setting("auto", 2))
    first, none = pool.step([history, history], [(0, 40), (1, 0)])
    assert none.shape == (0, 6, 16)
    assert torch.equal(first, NativePool(GROUPED, [40], Setting("auto")).whole(history))


def test_fuzzed_tables_and_slots_are_refused() -> None:
    history = History.random(200, GROUPED, seed=31)
    draw = random.Random(5)
    for _ in range(300):
        pool = NativePool(GROUPED, [200, 90], Setting("auto", 2))
        pool.computed = [draw.randint(0, 150), draw.randint(0, 60)]
        batch = pool.batch([(0, draw.randint(1, 50)), (1, draw.randint(1, 30))])
        rows = history.rows(0, len(batch.slot_positions))
        table, slots = batch.block_tables[0].clone(), batch.slot_mapping[0].clone()
        what = draw.choice(["block", "slot", "start", "width", "rows"])
        bad = draw.choice([-1, -(2**31), pool.num_blocks, 2**31 - 1])
        if what == "block":
            sequence = draw.randint(0, 1)
            last = int(batch.slot_positions[batch.sequence_index == sequence].max()) // 16
            table[sequence, draw.randint(0, last)] = bad
        elif what == "slot":
            slots[draw.randrange(len(slots))] = bad if bad < 0 else pool.num_blocks * 16 + draw.randint(0, 9)
        elif what == "start":
            batch.start_positions[1] = draw.choice([-1, 2**40, 2**63 - 1, 16 * table.shape[1]])
        elif what == "width":
            table = table[:, : int(batch.slot_positions.max()) // 16].contiguous()
        else:
            batch.query_start[draw.randint(0, 1)] = draw.choice([-1, 1000, -(2**63), 2**63 - 1])
        batch = replace(batch, block_tables=(table,), slot_mapping=(slots,))
        with pytest.raises(ValueError):
            pool.run(batch, rows)


def test_a_table_that_is_never_read_may_hold_anything() -> None:
    history = History.random(100, GROUPED, seed=32)
    pool = NativePool(GROUPED, [100], Setting("auto"))
    batch = pool.batch([(0, 20)])
    batch.block_tables[0][0, 2:] = -7
    expected = NativePool(GROUPED, [100], Setting("auto")).step([history], [(0, 20)])[0]
    assert torch.equal(pool.run(batch, history.rows(0, 20)), expected)


def test_a_program_refuses_a_plan_that_is_not_its_own() -> None:
    history = History.random(20, GROUPED, seed=33)
    pool = NativePool(GROUPED, [20], Setting("auto"))
    other = NativePool(GROUPED, [200], Setting("auto"))
    batch = pool.batch([(0, 20)])
    for plans in ([], other.plans.set(other.batch([(0, 20)])), pool.plans.set(pool.batch([(0, 19)]))):
        with pytest.raises(ValueError, match="plan"):
            pool.program.bind(20, [], plans, [0, 0, 0], 0)()
    assert pool.run(batch, history.rows(0, 20)).isfinite().all()


def test_wrong_kinds_of_tensors_are_refused() -> None:
    pool = NativePool(GROUPED, [40], Setting("auto"))
    batch = pool.batch([(0, 20)])
    for bad in (
        replace(batch, query_start=batch.query_start.int()),
        replace(batch, start_positions=batch.start_positions.float()),
        replace(batch, block_tables=(batch.block_tables[0].long(),)),
        replace(batch, block_tables=(batch.block_tables[0].repeat(2, 1),)),
        replace(batch, slot_mapping=(batch.slot_mapping[0][:-1],)),
    ):
        with pytest.raises(ValueError, match="expected"):
            pool.plans.set(bad)


@pytest.mark.parametrize(
    ("block_size", "heads", "kv_heads", "head_dim"),
    [(0, 1, 1, 8), (24, 1, 1, 8), (2048, 1, 1, 8), (16, 3, 2, 8), (16, 1, 1, 12), (16, 1, 1, 264), (16, 1, 0, 8)],
)
def test_shapes_that_are_not_computed(block_size: int, heads: int, kv_heads: int, head_dim: int) -> None:
    with pytest.raises(ConfigError):
        check_shape(block_size, heads, kv_heads, head_dim)


@every_cache
@pytest.mark.parametrize(("block_size", "kv_heads", "head_dim"), [(1, 1, 8), (16, 3, 80), (1024, 8, 256)])
def test_a_block_holds_its_tokens_and_nothing_else(cache: str, block_size: int, kv_heads: int, head_dim: int) -> None:
    spec = AttentionSpec(kv_heads, head_dim, head_dim, CACHE_DTYPE_BYTES[cache], CACHE_SCALE_BYTES.get(cache, 0))
    assert block_bytes(block_size, kv_heads, head_dim, cache) == spec.page_bytes(block_size)


def copied(pages: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    out = []
    for page in pages:
        after = page.clone()
        for source, destination in pairs:
            after[destination] = page[source]
        out.append(after)
    return out


@pytest.mark.parametrize("block_bytes", [1, 96, 200_000])
def test_copies_read_all_sources_first(block_bytes: int) -> None:
    """Chains, swaps, rings, one source many times, in any order."""
    draw = random.Random(block_bytes)
    for threads in POOLS:
        for _ in range(40 if block_bytes < 1000 else 3):
            count = draw.randint(1, 12)
            pages = [torch.randint(0, 255, (12, block_bytes), dtype=torch.uint8) for _ in range(3)]
            pairs = [(draw.randrange(12), destination) for destination in draw.sample(range(12), count)]
            expected = copied(pages, pairs)
            paged_attention.copy_blocks(POOLS[threads], pages, block_bytes, 12, pairs)
            assert all(map(torch.equal, pages, expected)), pairs


def test_copies_of_rings() -> None:
    pages = [torch.arange(6.0).repeat(4, 1).T.contiguous()]
    paged_attention.copy_blocks(POOLS[1], pages, 16, 6, [(1, 2), (2, 3), (3, 1), (4, 5), (5, 4), (1, 0)])
    assert pages[0][:, 0].tolist() == [1.0, 3.0, 1.0, 2.0, 5.0, 4.0]
    paged_attention.copy_blocks(POOLS[1], pages, 16, 6, [])


@pytest.mark.parametrize("pairs", [[(0, 6)], [(-1, 2)], [(1, 2), (3, 2)]])
def test_copies_that_make_no_sense(pairs: list[tuple[int, int]]) -> None:
    page = torch.zeros(6, 4)
    with pytest.raises(ValueError, match="block"):
        paged_attention.copy_blocks(POOLS[1], [page], 16, 6, pairs)
    with pytest.raises(ValueError, match="page"):
        paged_attention.copy_blocks(POOLS[1], [page[:5]], 16, 6, [(0, 1)])


@pytest.mark.parametrize("arguments", [(16, 2**60, 1, 1, 0, 1), (16, 4, 2**60, 1, 0, 1), (16, 4, 2**13, 2**13, 0, 1)])
def test_counts_whose_products_overflow(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        _native.AttentionPlan(*arguments)
    with pytest.raises(ValueError, match="key/value heads"):
        _native.block_bytes(16, 2**55, 256, _native.CacheType.F32)


def test_a_negative_window_and_uneven_heads() -> None:
    for arguments in ((16, 0, 1, 1, 0, 1), (16, 4, 3, 2, 0, 1), (16, 4, 1, 1, -1, 1), (3, 4, 1, 1, 0, 1)):
        with pytest.raises(ValueError):
            _native.AttentionPlan(*arguments)
