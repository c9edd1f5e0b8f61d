"""Memory for weights: zero, of its own, and such as the system backs with huge pages."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from quire.errors import InsufficientMemoryError
from quire.kernels.cpu.memory import ALIGNMENT, HUGE_PAGE, allocate
from quire.kernels.cpu.packing import Arena

SMAPS = Path("/proc/self/smaps")


def test_memory_is_zero_and_begins_a_page() -> None:
    memory = allocate(12345)
    assert memory.dtype == torch.uint8
    assert memory.shape == (12345,)
    assert not memory.any()
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert allocate(0).shape == (0,)


def test_more_than_there_can_be_is_an_error() -> None:
    with pytest.raises(InsufficientMemoryError, match="refuses"):
        allocate(1 << 60)


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not describe its mappings")
def test_large_memory_is_private_and_asks_for_huge_pages() -> None:
    """Shared memory, which anonymous mappings are by default in Python, mostly gets none."""
    memory = allocate(4 * HUGE_PAGE)
    mappings = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) .*?^VmFlags: (.*?)$", SMAPS.read_text(), re.M | re.S)
    (found,) = [
        (permissions, flags.split())
        for start, end, permissions, flags in mappings
        if int(start, 16) <= memory.data_ptr() < int(end, 16)
    ]
    assert found[0] == "rw-p"
    assert "hg" in found[1]


def test_tensors_of_an_arena_lie_side_by_side() -> None:
    arena = Arena(1 << 16)
    first, second, third = (arena.allocate(size) for size in (100, 64, 1))
    assert [each.data_ptr() - first.data_ptr() for each in (second, third)] == [128, 192]
    first.fill_(1)
    second.fill_(2)
    assert not third.any()
    assert (first.sum(), second.sum()) == (100, 128)


def test_a_full_mapping_is_followed_by_another() -> None:
    arena = Arena(1 << 16)
    kept = [arena.allocate(30000).fill_(i) for i in range(5)]
    assert [int(each.max()) for each in kept] == [int(each.min()) for each in kept] == [0, 1, 2, 3, 4]
    assert all(each.data_ptr() % ALIGNMENT == 0 for each in kept)


def test_what_is_larger_than_a_mapping_gets_its_own() -> None:
    arena = Arena(1 << 16)
    small, large, next_small = arena.allocate(64), arena.allocate(1 << 17), arena.allocate(64)
    assert large.shape == (1 << 17,)
    assert next_small.data_ptr() - small.data_ptr() == 64


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not describe its mappings")
@pytest.mark.parametrize("size", [3 * HUGE_PAGE + 100, 16 * HUGE_PAGE])
def test_the_system_has_given_what_an_arena_hands_out(size: int) -> None:
    """Of a mapping's part, and of a mapping of its own."""
    memory = Arena(8 * HUGE_PAGE).allocate(size)
    assert resident_bytes(memory) >= size
    assert not memory.any()


def resident_bytes(memory: torch.Tensor) -> int:
    """Bytes that the system has given of the mapping in which a tensor lies."""
    mappings = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^Rss: +(\d+) kB", SMAPS.read_text(), re.M | re.S)
    (resident,) = [
        int(kilobytes) << 10 for start, end, kilobytes in mappings if int(start, 16) <= memory.data_ptr() < int(end, 16)
    ]
    return resident


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not describe its mappings")
def test_an_arena_gives_back_what_it_took_ahead() -> None:
    """What was handed out stays, and what is asked for later is zero."""
    arena = Arena(64 * HUGE_PAGE)
    kept = [arena.allocate(HUGE_PAGE + 100).fill_(1) for _ in range(31)]
    taken = resident_bytes(kept[0])
    assert taken >= 31 * HUGE_PAGE
    arena.trim()
    assert resident_bytes(kept[0]) <= taken - HUGE_PAGE
    assert all(each.all() for each in kept)
    assert not arena.allocate(4 * HUGE_PAGE).any()
