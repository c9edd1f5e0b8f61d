"""The Triton back end step by step, against plain torch in float64, and the same bits whatever the schedule."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from quire.attention import triton_backend
from quire.attention.device_batch import DeviceBatch
from quire.attention.triton_backend import TritonAttention
from quire.kernels.arguments import HeadWeights, LayerAttention
from quire.kernels.triton import attention_tiles
from quire.kernels.triton.attention_tiles import DeviceLimits, SplitPlan, Tiles
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec, SlidingWindowSpec

WINDOW = 24
LAYERS = (
    LayerAttention(0, 2, 1, 16, 0.25),
    LayerAttention(1, 2, 1, 16, 0.25, window=WINDOW),
)
BLOCK = 8
Work = list[tuple[int, int]]
"""(sequence, new tokens) in batch order."""


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits and tiles that short sequences have several of."""
    monkeypatch.setattr(attention_tiles, "FIXED_KEYS", 32)
    monkeypatch.setattr(triton_backend, "SPLITTING_PAYS", 40)
    monkeypatch.setattr(attention_tiles, "_float32_tiles", lambda shape: Tiles(16, 16, 4, 1))


class Pool:
    """Two layers, one of them with a window, over sequences of random queries, keys and values."""

    def __init__(
        self, lengths: list[int], device: torch.device, *, invariant: bool, seed: int = 0, max_num_seqs: int = 8
    ) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(1)
        self.qkv = [torch.randn(length, 2, 4 * 16, generator=generator) for length in lengths]
        groups, size = group_layers(
            [AttentionSpec(1, 16, 16, 4), SlidingWindowSpec(1, 16, 16, 4, window=WINDOW)], BLOCK
        )
        counts = [-(-length // BLOCK) for length in lengths]
        num_blocks = 1 + 2 * sum(counts)
        pages = torch.full((num_blocks, 2, BLOCK, 1, 16), float("nan"))
        scattered = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)).int() + 1
        self.tables = [torch.full((len(lengths) + 1, 32), 10**6, dtype=torch.int32) for _ in range(2)]
        parts = iter(scattered.split(counts * 2))
        for table in self.tables:
            for row, count in enumerate(counts, 1):
                table[row, :count] = next(parts)
        self.backend = TritonAttention(
            KVCacheLayout(BLOCK, num_blocks, groups, size),
            dict.fromkeys(range(2), pages.to(device)),
            DeviceLimits(num_multiprocessors=8),
            num_heads=2,
            dtype=torch.float32,
            max_num_seqs=max_num_seqs,
            max_model_len=256,
            batch_invariant=invariant,
        )
        (scratch,) = self.backend.scratch.values()
        for part in (scratch.values, scratch.maxima, scratch.totals):
            part.fill_(float("nan"))
        self.computed = [0] * len(lengths)

    def batch(self, work: Work) -> DeviceBatch:
        """With one sequence and one token of padding."""
        ends = [self.computed[sequence] + new for sequence, new in work]
        starts = torch.tensor([0, *(new for _, new in work)]).cumsum(0)
        positions = torch.cat([torch.arange(self.computed[s], self.computed[s] + new) for s, new in work])
        rows = torch.cat([torch.full((new,), sequence + 1) for sequence, new in work])
        slots = [
            torch.cat((table[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK, torch.tensor([-1])))
            for table in self.tables
        ]
        column = partial(torch.tensor, dtype=torch.int32, device=self.device)
        return DeviceBatch(
            num_seqs=len(work) + 1,
            num_tokens=len(positions) + 1,
            max_query_len=max(new for _, new in work),
            max_seq_len=max(ends),
            rows=column([*(sequence + 1 for sequence, _ in work), 0]),
            query_start=torch.cat((starts, starts[-1:])).int().to(self.device),
            seq_lens=column([*ends, 0]),
            slot_positions=torch.cat((positions, torch.zeros(1, dtype=torch.int64))).to(self.device),
            slot_mapping=tuple(slot.to(self.device) for slot in slots),
            block_tables=tuple(table.to(self.device) for table in self.tables),
        )

    def kernels(self, work: Work) -> tuple[Tiles | None, SplitPlan | None]:
        """Those that compute full attention."""
        return self.backend.kernels(self.batch(work), self.backend.layers[0].shape, None)

    def step(self, work: Work) -> list[torch.Tensor]:
        """[new tokens, layers, 32] of each sequence."""
        step, outs = self.backend.plan(self.batch(work)), []
        for index, layer in enumerate(LAYERS):
            rows = [self.qkv[s][self.computed[s] : self.computed[s] + new, index] for s, new in work]
            qkv = torch.cat((*rows, torch.full((1, 64), float("nan")))).to(self.device)
            outs.append(step.attend(HeadWeights(layer, None, None), qkv, None)[:-1].cpu())
        for sequence, new in work:
            self.computed[sequence] += new
        return list(torch.stack(outs, dim=1).split([new for _, new in work]))

    def forget_what_left_the_window(self) -> None:
        """As the pool's manager does: blocks that no later token sees get another owner."""
        for sequence, computed in enumerate(self.computed):
            self.tables[1][sequence + 1, : max(0, computed - WINDOW + 1) // BLOCK] = 0

    def expected(self, sequence: int) -> torch.Tensor:
        """[length, layers, 32] float64."""
        outs = []
        for index, layer in enumerate(LAYERS):
            query, key, value = self.qkv[sequence][:, index].double().split([32, 16, 16], dim=1)
            scores = torch.einsum("ihd,jd->hij", query.view(-1, 2, 16), key) * layer.scale
            distance = torch.arange(len(key))[:, None] - torch.arange(len(key))
            hidden = (distance < 0) | (distance >= (layer.window or len(key)))
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
            outs.append(torch.einsum("hij,jd->ihd", weights, value).flatten(1))
        return torch.stack(outs, dim=1)


SCHEDULE: list[Work] = [[(0, 40), (1, 3)], [(1, 1), (0, 9), (2, 1)], [(2, 1), (0, 1), (1, 1)], [(0, 1)]]
"""A prompt beside another, a chunk between decodes, decodes alone, one of them long."""
LENGTHS = [51, 5, 2]


@pytest.mark.parametrize("invariant", [False, True])
def test_equals_float64(invariant: bool, small_parts: None, device: torch.device) -> None:
    pool = Pool(LENGTHS, device, invariant=invariant)
    outs: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for work in SCHEDULE:
        for (sequence, _), out in zip(work, pool.step(work), strict=True):
            outs[sequence].append(out)
        pool.forget_what_left_the_window()
    for sequence, parts in enumerate(outs):
        torch.testing.assert_close(torch.cat(parts).double(), pool.expected(sequence), rtol=0, atol=1e-5)


def test_batch_invariant_bits(small_parts: None, device: torch.device) -> None:
    """Whole and alone; in the schedule above; with blocks elsewhere; single tokens by either kernel."""
    alone = Pool(LENGTHS, device, invariant=True)
    expected = alone.step([(0, 51)])[0]
    pool = Pool(LENGTHS, device, invariant=True, seed=5)
    parts = [
        out for work in SCHEDULE for (sequence, _), out in zip(work, pool.step(work), strict=True) if sequence == 0
    ]
    assert torch.equal(torch.cat(parts), expected)
    pool.computed[0] = 50
    assert pool.kernels([(0, 1)])[0] is None, "the last token was the split kernel's"
    # Nine sequences fill the device: no split kernel.
    many = Pool([51] + [1] * 8, device, invariant=True, max_num_seqs=10)
    many.step([(0, 50)])
    work = [(0, 1), *((other, 1) for other in range(1, 9))]
    assert many.kernels(work)[1] is None
    assert torch.equal(many.step(work)[0], expected[50:])


def test_out_is_written_where_the_caller_says(device: torch.device) -> None:
    pool = Pool([6], device, invariant=False)
    out = torch.full((7, 32), float("nan"), device=device)
    qkv = torch.cat((pool.qkv[0][:, 0], torch.zeros(1, 64))).to(device)
    returned = pool.backend.plan(pool.batch([(0, 6)])).attend(HeadWeights(LAYERS[0], None, None), qkv, None, out)
    assert returned is out
    torch.testing.assert_close(out[:6].cpu().double(), pool.expected(0)[:, 0], rtol=0, atol=1e-5)
    assert out[6].isnan().all()


def test_which_kernels_run(small_parts: None, device: torch.device) -> None:
    """From sizes on the host alone."""
    pool = Pool([120, 120], device, invariant=False)
    pool.computed = [100, 30]
    varlen, split = pool.kernels([(0, 1), (1, 1)])
    assert varlen is None
    assert split is not None
    varlen, split = pool.kernels([(0, 1), (1, 20)])
    assert varlen is not None, "the chunk's"
    assert split is not None, "the long decode's"
    pool.computed = [10, 10]
    varlen, split = pool.kernels([(0, 1), (1, 20)])
    assert varlen is not None
    assert split is None, "short sequences are as well off in the varlen kernel"


@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("invariant", [False, True])
def test_every_kernel_is_known_at_the_start(group: int, invariant: bool) -> None:
    """No length of a chunk needs tiles that the lengths to compile do not."""
    spec = AttentionSpec(1, 64, 64, 2)
    backend = TritonAttention(
        KVCacheLayout(BLOCK, 4, *group_layers([spec], BLOCK)),
        {0: torch.zeros(4, 2, BLOCK, 1, 64, dtype=torch.bfloat16)},
        DeviceLimits(),
        num_heads=group,
        dtype=torch.bfloat16,
        max_num_seqs=4,
        max_model_len=4096,
        batch_invariant=invariant,
    )

    def used(longest: int, seq_len: int) -> set[Tiles]:
        column = torch.zeros(3, dtype=torch.int32)
        batch = DeviceBatch(2, longest + 1, longest, seq_len, column, column, column, column, (column,), (column,))
        varlen, split = backend.kernels(batch, backend.layers[0].shape, None)
        return {tiles for tiles in (varlen, split and split.tiles) if tiles is not None}

    compiled = set().union(*(used(*lengths) for lengths in backend.lengths_to_compile(4096)))
    assert compiled == set().union(*(used(length, seq_len) for length in range(1, 300) for seq_len in (300, 4096)))
