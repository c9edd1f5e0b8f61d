"""Native attention over a part of each sequence's tokens: the parts of all ranks, merged, are the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.attention.dealt import merge_parts
from quire.kernels.arguments import LayerAttention
from quire.kernels.cpu import _native
from quire.kv_cache.deal import Deal
from tests.kernels.cpu.attention_pool import WAYS, History, NativePool, Options, Setting
from tests.long import one_in

LAYER = LayerAttention(layer=0, num_heads=12, num_kv_heads=1, head_dim=40, scale=0.15, soft_cap=20.0)
PRECISION = 2e-5
DEALS = [(2, 1), (3, 4), (4, 16)]


def parts(setting: Setting, history: History, deal: tuple[int, int], *chunks: int) -> list[torch.Tensor]:
    """Each rank's, [T, num_heads * (head_dim + 1)], computed in these chunks."""
    count, run = deal
    found = []
    for rank in range(count):
        own = replace(setting, deal=Deal(count, rank, run))
        pool = NativePool(LAYER, [sum(chunks)], own, Options(rotary_dim=24))
        found.append(torch.cat([pool.step([history], [(0, chunk)])[0] for chunk in chunks]))
    return found


@pytest.mark.parametrize(("isa", "cache", "count", "run"), one_in(4, WAYS, DEALS))
def test_merged_parts_are_the_whole(isa: str, cache: str, count: int, run: int) -> None:
    """Of blocks smaller and larger than what kernels read at a time; whole numbers of 8 bits and pairs in bfloat16 have
    one scale for each 256 keys, which are others."""
    length = 700
    history = History.random(length, LAYER, seed=2)
    setting = Setting(isa, 2, cache, block_size=max(8, run))
    whole = NativePool(LAYER, [length], setting, Options(rotary_dim=24)).whole(history)
    found = merge_parts(parts(setting, history, (count, run), length), 0, 12, 40).view_as(whole)
    bound = PRECISION if cache in ("float32", "bfloat16") else 0.02
    torch.testing.assert_close(found, whole, atol=bound * float(whole.abs().max()), rtol=0)


@pytest.mark.parametrize(("isa", "cache"), one_in(5, WAYS))
def test_a_part_has_the_same_bits_in_every_chunk_and_on_every_thread(isa: str, cache: str) -> None:
    history = History.random(600, LAYER, seed=4)
    expected = parts(Setting(isa, 1, cache), history, (2, 1), 600)
    for threads, chunks in ((1, (1, 598, 1)), (3, (256, 344)), (3, (599, 1))):
        for found, part in zip(parts(Setting(isa, threads, cache), history, (2, 1), *chunks), expected, strict=True):
            assert torch.equal(found, part)


def test_a_rank_without_a_token_leaves_nothing() -> None:
    """The first token is the first rank's alone."""
    history = History.random(1, LAYER, seed=1)
    first, second = parts(Setting(_native.available_isas()[-1]), history, (2, 1), 1)
    assert (second[:, :480] == 0).all()
    assert (second[:, 480:] < -1e38).all()
    assert torch.equal(merge_parts([first, second], 0, 12, 40), first[:, :480])
    assert torch.equal(merge_parts([first, second], 3, 6, 40), first[:, 120:360])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 8}, "of windows or chosen keys"),
        ({"latent": True, "top": 4}, "of windows or chosen keys"),
        ({"run": 3}, "runs which do not divide a block"),
        ({"rank": 2}, "tokens that are dealt"),
    ],
    ids=str,
)
def test_deals_that_kernels_do_not_compute(options: dict[str, int], message: str) -> None:
    given = {
        "block_size": 16,
        "num_blocks": 4,
        "num_heads": 2,
        "num_kv_heads": 1,
        "window": 0,
        "threads": 1,
        "ranks": 2,
    }
    with pytest.raises(ValueError, match=message):
        _native.AttentionPlan(**{**given, **options})
