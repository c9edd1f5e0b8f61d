"""Swapping on a device: the same as the plain mover, in whatever chunks and runs; and the order of streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec
from quire.step import StepPlan, StoreTransfers
from quire.worker.kv_connector.offload import HostBlocks, OffloadWorker
from quire.worker.kv_transfer import Pairs
from quire.worker.platform.cpu_blocks import move_blocks
from quire.worker.platform.device_memory import HostMemory, PinnedPool
from quire.worker.platform.stream_transfers import StreamTransfers, runs
from quire.worker.platform.streams import HostStreams
from quire.worker.preemption_costs import time_copies
from tests.fakes.streams import LoggingStreams

NUM_BLOCKS, NUM_HOST_BLOCKS, NUM_PAGES, PAGE_BYTES = 9, 7, 3, 48


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def pools() -> tuple[list[torch.Tensor], torch.Tensor]:
    pages = [random_bytes(NUM_BLOCKS, PAGE_BYTES) for _ in range(NUM_PAGES)]
    return pages, random_bytes(NUM_HOST_BLOCKS, NUM_PAGES, PAGE_BYTES)


def distinct(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, count - 1), unique=True, max_size=count)


@settings(max_examples=25)
@given(
    saved=distinct(NUM_HOST_BLOCKS),
    loaded=distinct(NUM_BLOCKS),
    staged=st.integers(1, 4),
    draw=st.randoms(use_true_random=False),
)
def test_the_same_as_the_plain_mover(saved: list[int], loaded: list[int], staged: int, draw: object) -> None:
    """Sources may repeat, destinations are distinct; loads come after stores, from the same blocks too."""
    choose = draw.randrange  # type: ignore[attr-defined]
    swap_out = [(choose(NUM_BLOCKS), host_block) for host_block in saved]
    swap_in = [(choose(NUM_HOST_BLOCKS), block) for block in loaded]
    pages, host = pools()
    expected, expected_host = [page.clone() for page in pages], host.clone()
    for sources, destinations, pairs in (
        (expected, expected_host.unbind(1), swap_out),
        (expected_host.unbind(1), expected, swap_in),
    ):
        if pairs:
            move_blocks(sources, destinations, pairs)
    transfers = StreamTransfers(HostStreams(), pages, host, staged * NUM_PAGES * PAGE_BYTES)
    transfers.start(swap_out, swap_in)
    assert transfers.is_reading([block for block, _ in swap_out]) == bool(swap_out)
    transfers.synchronize()
    assert not transfers.is_reading(range(NUM_BLOCKS))
    assert all(torch.equal(page, other) for page, other in zip(pages, expected, strict=True))
    assert torch.equal(host, expected_host)


@pytest.mark.parametrize(
    ("swap_out", "swap_in"),
    [([(NUM_BLOCKS, 1)], []), ([(1, NUM_HOST_BLOCKS)], []), ([], [(-1, 1)]), ([], [(1, NUM_BLOCKS)])],
)
def test_blocks_that_do_not_exist(swap_out: Pairs, swap_in: Pairs) -> None:
    pages, host = pools()
    with pytest.raises(IndexError, match="does not exist"):
        StreamTransfers(HostStreams(), pages, host).start(swap_out, swap_in)


def test_neighbours_go_over_in_one_copy() -> None:
    assert list(runs(np.array([4, 5, 6, 1, 3, 2, 3]))) == [(0, 4, 3), (3, 1, 1), (4, 3, 1), (5, 2, 2)]
    assert list(runs(np.array([0]))) == [(0, 0, 1)]


def test_streams_wait_for_one_another_and_the_host_for_none() -> None:
    """The transfer stream waits for what was computed; the compute stream waits for the transfers only where `wait` is
    called, the host only where `synchronize` is."""
    streams = LoggingStreams()
    pages, host = pools()
    transfers = StreamTransfers(streams, pages, host)
    transfers.start([(1, 2)], [(3, 4)])
    assert streams.log == ["record 1 on compute", "transfer waits for 1", "record 2 on transfer"]
    transfers.wait()
    assert streams.log[3:] == ["compute waits for 2"]
    transfers.start([], [(3, 4)])
    # The staging buffer and the blocks are free again behind the order before.
    assert streams.log[4:] == [
        "compute waits for 2",
        "record 3 on compute",
        "transfer waits for 3",
        "record 4 on transfer",
    ]
    transfers.synchronize()
    assert streams.log[8:] == ["compute waits for 4", "host waits for 4"]


def test_nothing_to_do_costs_nothing() -> None:
    streams = LoggingStreams()
    transfers = StreamTransfers(streams, *pools())
    transfers.start([], [])
    transfers.wait()
    transfers.synchronize()
    assert streams.log == []


def layout() -> KVCacheLayout:
    spec = AttentionSpec(num_kv_heads=1, key_dim=4, value_dim=4, dtype_bytes=2)
    groups, layers_per_group = group_layers([spec] * NUM_PAGES, 4)
    return KVCacheLayout(4, NUM_BLOCKS, groups, layers_per_group, num_host_blocks=NUM_HOST_BLOCKS - 1)


class RegisteredPrefixes(HostMemory):
    def __init__(self) -> None:
        self.pinned: list[int] = []

    def pin(self, memory: torch.Tensor) -> None:
        self.pinned.append(memory.data_ptr())

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned.remove(memory.data_ptr())


def test_the_host_pool_is_pinned_and_a_block_of_it_is_in_one_piece() -> None:
    memory = RegisteredPrefixes()
    pool = PinnedPool(layout(), memory)
    assert pool.blocks.shape == (NUM_HOST_BLOCKS, NUM_PAGES, layout().block_bytes // NUM_PAGES)
    assert pool.blocks[2].is_contiguous()
    assert memory.pinned == [pool.blocks.data_ptr()]
    pool.pages[1][3] = 7
    assert pool.blocks[3, 1].eq(7).all()
    assert int(pool.blocks.sum()) == 7 * layout().block_bytes // NUM_PAGES
    pool.close()
    assert memory.pinned == []


def plan(**orders: Any) -> StepPlan:
    return StepPlan(
        step_id=1, seq_ids=[], start_positions=[], num_tokens=[], sample_seq_ids=[], sample_from=[], **orders
    )


def test_the_disk_tier_sees_blocks_that_have_arrived() -> None:
    """Stores wait for the copies to the host; loads wait for the steps that read what they overwrite."""
    streams = LoggingStreams()
    pages, host = pools()
    transfers = StreamTransfers(streams, pages, host)
    stored = []

    class Store:
        def store_block(self, host_block: int, group: int, block_hash: bytes) -> None:
            stored.append([bytes(page) for page in HostBlocks(host.unbind(1))(host_block)])

        def load_block(self, group: int, block_hash: bytes, host_block: int) -> None:
            assert streams.log[-1].startswith("host waits")

        def take_report(self) -> None:
            return None

    tier = OffloadWorker(Store(), transfers)  # type: ignore[arg-type]
    transfers.start([(5, 2)], [])
    tier.finished(plan(transfers=StoreTransfers(stores=[(2, 0, b"x")])))
    assert streams.log[-1] == "host waits for 2"
    assert stored == [[bytes(page[5].numpy()) for page in pages]]
    transfers.start([], [(2, 5)])
    tier.start_load(plan(transfers=StoreTransfers(loads=[(0, b"x", 2)])))
    assert streams.log[-1] == "host waits for 4"


def test_copies_are_timed_to_their_end() -> None:
    streams = LoggingStreams()
    device_pages = [
        torch.ones(NUM_BLOCKS, layout().block_bytes // NUM_PAGES, dtype=torch.uint8) for _ in range(NUM_PAGES)
    ]
    transfers = StreamTransfers(streams, device_pages, PinnedPool(layout(), HostMemory()).blocks)
    assert time_copies(transfers, layout()) > 0
    assert sum(line.startswith("host waits") for line in streams.log) == 3
