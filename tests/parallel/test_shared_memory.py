"""Collectives over shared memory: threads of this process are the ranks, each with a view of one piece of memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from quire.kernels.cpu import _native
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.recorder import Buffer, Recorder
from quire.kernels.cpu.runtime import NativeRuntime
from quire.layers.native import NativeOperations

SLOT = 2**18
"""Values that pass through a slot at a time."""


class Rank:
    """The part of a ProcessGroup that programs record."""

    def __init__(self, memory: torch.Tensor, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.native = _native.SharedRanks(memory.data_ptr(), rank, size, 100, 60.0)


def on_every_rank(size: int, work: Callable[[Rank], Any]) -> list[Any]:
    memory = allocate(_native.SharedRanks.num_bytes(size))
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, [Rank(memory, rank, size) for rank in range(size)]))


def parts(size: int, *shape: int) -> list[torch.Tensor]:
    return list(torch.randn(size, *shape, generator=torch.Generator().manual_seed(0)))


def in_order(given: list[torch.Tensor]) -> torch.Tensor:
    total = given[0].clone()
    for part in given[1:]:
        total += part
    return total


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 1000, 2 * SLOT + 5])
def test_sums_in_the_order_of_the_ranks(size: int, count: int) -> None:
    """Bit by bit, and again over the same memory."""
    given = parts(size, 3, count)

    def work(rank: Rank) -> list[torch.Tensor]:
        found = []
        for x in given[rank.rank]:
            found.append(torch.empty(count))
            rank.native.all_reduce(x.data_ptr(), found[-1].data_ptr(), 1, count)
        return found

    for found in on_every_rank(size, work):
        assert torch.equal(torch.stack(found), in_order(given))


def computed(rank: Rank, record: Callable[[Buffer], Buffer], x: torch.Tensor, width: int) -> torch.Tensor:
    """What a program of two threads gives that copies x, records a collective and doubles its result."""
    recorder, operations = Recorder(), NativeOperations()
    source, target = recorder.external(x.shape[1], x.shape[1]), recorder.external(width, width)
    result = operations.scale(record(operations.scale(source, 1.0)), 2.0)
    recorder.redirect(result, target)
    program = recorder.finish_program(result, NativeRuntime("auto", 2), max(64, len(x)))
    out = torch.zeros(max(64, len(x)), width)
    program.run(len(x), externals=[x, out])
    return out[: len(x)]


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("width", [24, 1500])
def test_sums_inside_a_program(rows: int, width: int) -> None:
    given = parts(2, rows, width)

    def work(rank: Rank) -> torch.Tensor:
        return computed(rank, lambda x: NativeOperations().all_reduce(rank, x), given[rank.rank], width)

    for found in on_every_rank(2, work):
        assert torch.equal(found, 2 * in_order(given))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("size", "width"), [(2, 97), (3, 97), (4, 13), (2, 2 * SLOT + 1001)])
def test_gathered_columns_inside_a_program(rows: int, size: int, width: int) -> None:
    """The last rank has fewer, or one has more than pass through a slot at a time."""
    if width > SLOT and rows > 1:
        rows = 2
    whole = parts(1, rows, width)[0]
    shares = whole.split(-(-width // size), dim=1)

    def work(rank: Rank) -> torch.Tensor:
        own = shares[rank.rank].contiguous()
        return computed(rank, lambda x: NativeOperations().all_gather(rank, x, width), own, width)

    for found in on_every_rank(size, work):
        assert torch.equal(found, 2 * whole)


def test_a_rank_that_does_not_come_ends_the_run() -> None:
    memory = allocate(_native.SharedRanks.num_bytes(2))
    ranks = _native.SharedRanks(memory.data_ptr(), 0, 2, 100, 0.01)
    x = torch.ones(8)
    for _ in range(2):  # and every later one
        with pytest.raises(RuntimeError, match="a rank has not come to a sum of all ranks in time"):
            ranks.all_reduce(x.data_ptr(), x.data_ptr(), 1, 8)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_its_group_is_refused(rank: int) -> None:
    memory = allocate(_native.SharedRanks.num_bytes(2))
    with pytest.raises(ValueError, match="a rank is one of its group"):
        _native.SharedRanks(memory.data_ptr(), rank, 2, 100, 1.0)


@pytest.mark.parametrize(
    "sizes", [(0, 1, 1, 1, 1), (1, 0, 1, 1, 1), (1, 1, 0, 1, 1), (1, 1, 1, 0, 1), (65, 1, 1, 1, 1)]
)
def test_an_exchange_without_room_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="an exchange of rows needs sizes of at least 1, and few replicas"):
        _native.ExpertExchange.num_bytes(*sizes)
