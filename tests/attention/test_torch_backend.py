"""The plain torch back end: right, and the same bits whatever surrounds a query."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from quire.attention import tiles
from quire.attention.interface import AttentionBatch
from quire.attention.torch_backend import TorchAttention
from quire.kernels.arguments import CacheScale, HeadWeights, LayerAttention, LengthScale
from quire.kernels.reference import copy_blocks, paged_attention_dense
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec
from tests.long import one_in

GROUPED = LayerAttention(layer=0, num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25)
LAYERS = {
    "grouped": GROUPED,
    "multi-head": LayerAttention(layer=0, num_heads=3, num_kv_heads=3, head_dim=20, scale=0.3),
    "one-key-head": LayerAttention(layer=0, num_heads=12, num_kv_heads=1, head_dim=8, scale=0.4),
    "window": LayerAttention(layer=0, num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, window=50),
    "window-of-one": LayerAttention(layer=0, num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, window=1),
    "chunks": replace(GROUPED, window=50, is_chunked=True),
    "chunks-of-tiles": replace(GROUPED, window=64, is_chunked=True, length_scale=LengthScale(20, 0.5)),
    "soft-cap": LayerAttention(layer=0, num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, soft_cap=2.0),
    "wide-group": LayerAttention(layer=0, num_heads=24, num_kv_heads=1, head_dim=16, scale=0.25),
    "sinks": replace(GROUPED, sinks=torch.linspace(-2, 3, 6)),
    "narrow-values": replace(GROUPED, value_dim=10),
    "wide-values": replace(GROUPED, value_dim=24, window=50, sinks=torch.linspace(3, -2, 6)),
}


@dataclass
class History:
    """The queries, keys and values of one whole sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, length: int, layer: LayerAttention, seed: int) -> History:
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int, width: int = layer.head_dim) -> torch.Tensor:
            return torch.randn(length, heads, width, generator=generator)

        keys = draw(layer.num_heads) * 2, draw(layer.num_kv_heads) * 2
        return cls(*keys, draw(layer.num_kv_heads, layer.value_width))


class Pool:
    """A pool of one layer that computes histories step by step."""

    def __init__(
        self,
        layer: LayerAttention,
        histories: list[History],
        block_size: int = 16,
        seed: int = 3,
        page_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layer, self.histories, self.block_size = layer, histories, block_size
        per_sequence = [-(-len(history.q) // block_size) for history in histories]
        num_blocks = 1 + sum(per_sequence)
        spec = AttentionSpec(layer.num_kv_heads, layer.head_dim, layer.value_width, 4)
        groups, size = group_layers([spec], block_size)
        self.pages = torch.full((num_blocks, *spec.page_shape(block_size)), 3.0).to(page_dtype)
        self.backend = TorchAttention(KVCacheLayout(block_size, num_blocks, groups, size), {0: self.pages})
        scattered = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1).split(
            per_sequence
        )
        self.tables = [blocks.int() for blocks in scattered]
        self.computed = [0] * len(histories)

    def batch(self, work: list[tuple[int, int]]) -> AttentionBatch:
        counts = torch.tensor([count for _, count in work])
        starts = torch.tensor([self.computed[sequence] for sequence, _ in work])
        table = torch.nn.utils.rnn.pad_sequence([self.tables[sequence] for sequence, _ in work], batch_first=True)
        index = torch.repeat_interleave(torch.arange(len(work)), counts)
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        slots = table[index, positions // self.block_size].long() * self.block_size + positions % self.block_size
        query_start = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        return AttentionBatch(query_start, starts, positions, index, (table,), (slots,))

    def step(self, work: list[tuple[int, int]]) -> list[torch.Tensor]:
        batch = self.batch(work)

        def rows(name: str) -> torch.Tensor:
            return torch.cat(
                [getattr(self.histories[s], name)[self.computed[s] : self.computed[s] + n] for s, n in work]
            )

        planned = self.backend.plan(batch)
        heads = HeadWeights(self.layer, None, None)
        qkv = torch.cat([rows(name).flatten(1) for name in "qkv"], dim=1)
        out = planned.attend(heads, qkv, None).unflatten(1, (-1, self.layer.value_width))
        for sequence, count in work:
            self.computed[sequence] += count
        return list(out.split([count for _, count in work]))

    def run(self, sequence: int, chunk: int) -> torch.Tensor:
        """One sequence alone, `chunk` tokens a step."""
        parts = []
        while left := len(self.histories[sequence].q) - self.computed[sequence]:
            parts += self.step([(sequence, min(chunk, left))])
        return torch.cat(parts)


@pytest.mark.parametrize(("name", "chunk"), one_in(2, LAYERS, [3, 200]))
def test_equals_dense_attention_in_float64(name: str, chunk: int) -> None:
    layer = LAYERS[name]
    history = History.random(137, layer, seed=1)
    pool = Pool(layer, [history])
    out = pool.run(0, chunk)
    expected = paged_attention_dense(pool.pages, pool.tables[0], history.q.double(), 0, layer)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_more_than_one_wave_of_key_tiles() -> None:
    length = tiles.WAVE_TILES * tiles.KEY_TILE * 2 + 70
    history = History.random(length, GROUPED, seed=2)
    pool = Pool(GROUPED, [history])
    whole = pool.run(0, length)
    rows = torch.tensor([0, 63, 64, 1023, 1024, 2047, 2048, length - 1])
    for row in rows.tolist():
        expected = paged_attention_dense(pool.pages, pool.tables[0], history.q[row : row + 1].double(), row, GROUPED)
        torch.testing.assert_close(whole[row : row + 1].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("fixed_order")
def test_same_bits_behind_more_than_one_wave_of_key_tiles() -> None:
    length = tiles.WAVE_TILES * tiles.KEY_TILE * 2 + 70
    history = History.random(length, GROUPED, seed=2)
    whole, stepwise = Pool(GROUPED, [history]).run(0, length), Pool(GROUPED, [history])
    stepwise.step([(0, length - 1)])
    assert torch.equal(stepwise.step([(0, 1)])[0][0], whole[-1])


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("name", one_in(2, LAYERS))
def test_same_bits_whatever_the_chunks(name: str) -> None:
    """Whole, in chunks, and a token at a time behind a prompt."""
    layer = LAYERS[name]
    history = History.random(260, layer, seed=4)
    expected = Pool(layer, [history]).run(0, 260)
    for chunk in (7, 64, 99):
        assert torch.equal(Pool(layer, [history]).run(0, chunk), expected), chunk
    pool = Pool(layer, [history])
    first = pool.step([(0, 230)])
    assert torch.equal(torch.cat([*first, *(pool.step([(0, 1)])[0] for _ in range(30))]), expected)


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("name", ["grouped", "window"])
@pytest.mark.parametrize("block_size", [1, 8, 32, 128])
def test_same_bits_whatever_the_block_size(name: str, block_size: int) -> None:
    layer = LAYERS[name]
    history = History.random(200, layer, seed=5)
    expected = Pool(layer, [history], block_size=16).run(0, 64)
    assert torch.equal(Pool(layer, [history], block_size=block_size, seed=9).run(0, 64), expected)


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("name", one_in(3, LAYERS))
def test_same_bits_alone_and_in_a_batch(name: str) -> None:
    """Small and large query tiles, long and short contexts side by side."""
    layer = LAYERS[name]
    lengths = [1, 2, 40, 64, 65, 130, 200, 300] + [20 + i for i in range(24)]
    histories = [History.random(length, layer, seed=10 + index) for index, length in enumerate(lengths)]
    pool = Pool(layer, histories)
    firsts = pool.step([(index, max(1, length // 2)) for index, length in enumerate(lengths)])
    seconds = pool.step(
        [(index, left) for index, length in enumerate(lengths) if (left := length - length // 2 - (length == 1))]
    )
    alone = Pool(layer, histories)
    expected = [alone.run(index, 1000) for index in range(len(lengths))]
    assert torch.equal(firsts[0], expected[0])
    for first, second, whole in zip(firsts[1:], seconds, expected[1:], strict=True):
        assert torch.equal(torch.cat((first, second)), whole)


@pytest.mark.usefixtures("fixed_order")
def test_same_bits_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many items fit the working memory changes nothing."""
    history = History.random(1500, GROUPED, seed=6)
    expected = Pool(GROUPED, [history]).run(0, 1500)
    monkeypatch.setattr("quire.attention.torch_backend.CHUNK_BYTES", 1)
    assert torch.equal(Pool(GROUPED, [history]).run(0, 1500), expected)


@pytest.mark.usefixtures("fixed_order")
def test_what_a_former_owner_left_behind_has_no_influence() -> None:
    history = History.random(70, GROUPED, seed=7)
    expected = Pool(GROUPED, [history]).run(0, 9)
    pool = Pool(GROUPED, [history])
    pool.pages[1:] = float("nan")
    pool.pages[1:, 1, :, 0] = float("inf")
    assert torch.equal(pool.run(0, 9), expected)


@pytest.mark.usefixtures("fixed_order")
def test_blocks_outside_the_window_may_be_gone() -> None:
    layer = LAYERS["window"]
    history = History.random(300, layer, seed=8)
    expected = Pool(layer, [history]).run(0, 300)
    pool = Pool(layer, [history])
    pool.step([(0, 299)])
    pool.tables[0][: (299 - 49) // 16] = 0
    assert torch.equal(pool.step([(0, 1)])[0][0], expected[-1])


@pytest.mark.usefixtures("fixed_order")
def test_shared_blocks_after_a_copy() -> None:
    """A fork that copies its last block and goes on sees what its parent saw."""
    parent = History.random(40, GROUPED, seed=11)
    pool = Pool(GROUPED, [parent, parent])
    pool.step([(0, 39)])
    shared, own = pool.tables[0], pool.tables[1]
    copy_blocks([pool.pages], [(int(shared[2]), int(own[2]))])
    pool.tables[1] = torch.cat((shared[:2], own[2:]))
    pool.computed[1] = 39
    left, right = pool.step([(0, 1), (1, 1)])
    assert torch.equal(left, right)


def test_copies_read_all_sources_first() -> None:
    pages = torch.arange(4.0).view(4, 1, 1, 1, 1).expand(4, 2, 2, 1, 3).contiguous()
    copy_blocks([pages], [(1, 2), (2, 3), (3, 1)])
    assert pages[:, 0, 0, 0, 0].tolist() == [0.0, 3.0, 1.0, 2.0]
    copy_blocks([pages], [])
    assert pages[:, 0, 0, 0, 0].tolist() == [0.0, 3.0, 1.0, 2.0]


@pytest.mark.usefixtures("fixed_order")
def test_bfloat16_pages_and_queries() -> None:
    history = History.random(150, GROUPED, seed=12)
    narrow = History(history.q.bfloat16(), history.k.bfloat16(), history.v.bfloat16())
    pool, chunked = Pool(GROUPED, [narrow]), Pool(GROUPED, [narrow])
    for each in (pool, chunked):
        each.pages = each.pages.bfloat16()
        each.backend._layers = {0: (0, each.pages)}
    out = pool.run(0, 150)
    assert out.dtype == torch.bfloat16
    expected = paged_attention_dense(pool.pages, pool.tables[0], narrow.q.double(), 0, GROUPED)
    torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0.01)
    assert torch.equal(chunked.run(0, 7), out)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("grouped", CacheScale()), ("window", CacheScale(0.3, 2.0)), ("wide-values", CacheScale(7.7, 1.0))],
)
def test_pages_of_8_bit_floats(name: str, scale: CacheScale) -> None:
    """What is attended is what pages hold, divided by the layer's scales and rounded once; the bits are the same in
    chunks."""
    layer = replace(LAYERS[name], cache_scale=scale)
    history = History.random(90, layer, seed=5)
    history.k[40, 0, 3] = 1e6
    pools = [Pool(layer, [history], page_dtype=torch.float8_e4m3fn) for _ in range(2)]
    whole = pools[0].step([(0, 90)])[0]
    chunks = torch.cat([pools[1].step([(0, count)])[0] for count in (31, 1, 58)])
    assert torch.equal(whole, chunks)
    if layer.sinks is None:
        expected = paged_attention_dense(pools[0].pages, pools[0].tables[0], history.q.double(), 0, layer)
        torch.testing.assert_close(whole.double(), expected, rtol=0, atol=1e-4)
    assert float(pools[0].pages.float().abs().amax()) == 448
    block, place = int(pools[0].tables[0][5]), 89 % 16
    page = pools[0].pages[block]
    key = page[0, place] if page.dim() == 4 else page[place, :, : layer.head_dim]
    assert torch.equal(key.float(), (history.k[89] / scale.key).to(torch.float8_e4m3fn).float())


def test_pages_of_8_bit_floats_keep_what_is_not_finite() -> None:
    history = History.random(30, GROUPED, seed=5)
    history.v[4, 1, 2] = float("inf")
    pool = Pool(GROUPED, [history], page_dtype=torch.float8_e4m3fn)
    pool.step([(0, 20)])
    assert pool.step([(0, 10)])[0][:, 3:].isnan().any()
