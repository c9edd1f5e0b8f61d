"""A pool's first blocks have memory before they are written."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import pytest
import torch

from quire.kernels.cpu.memory import HUGE_PAGE, allocate
from quire.worker.platform import prefault as module
from quire.worker.platform.prefault import NoPrefault, PrefaultThread, prefault

SMALL_PAGE = 4096


def resident_bytes(tensor: torch.Tensor) -> list[bool]:
    """Whether each small page of a tensor has memory."""
    pages = (ctypes.c_ubyte * (tensor.nbytes // SMALL_PAGE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), pages) == 0
    return [bool(page & 1) for page in pages]


def test_the_first_blocks_of_every_tensor_and_no_byte_changes() -> None:
    pool = [allocate(16 * HUGE_PAGE) for _ in range(3)]
    pool[1][5] = 7
    prefault(pool, 3 * 4 * HUGE_PAGE).wait()
    for tensor in pool:
        found = resident_bytes(tensor)
        each = HUGE_PAGE // SMALL_PAGE
        assert all(found[: 4 * each])
        assert not any(found[6 * each :]), "beyond what was asked for"  # a huge page may begin before the limit
    assert pool[1][5] == 7
    assert sum(int(tensor[: 4 * HUGE_PAGE].sum()) for tensor in pool) == 7


def test_a_pool_smaller_than_the_limit() -> None:
    pool = [allocate(3 * SMALL_PAGE)]
    prefault(pool, 1 << 30).wait()
    assert all(resident_bytes(pool[0]))
    assert isinstance(prefault([], 1 << 30), NoPrefault)


def test_it_stops_when_the_pool_is_to_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, asked = threading.Event(), list[int]()

    def populate(address: int, _num_bytes: int) -> bool:
        asked.append(address)
        begun.set()
        started.wait()
        return True

    started = threading.Event()
    monkeypatch.setattr(module, "_populate", populate)
    pool: Sequence[torch.Tensor] = [allocate(64 * HUGE_PAGE)]
    thread = PrefaultThread(pool, 64 * HUGE_PAGE)
    begun.wait()
    closing = threading.Thread(target=thread.close)
    closing.start()
    while not thread._is_closed:
        pass
    started.set()
    closing.join()
    assert asked == [pool[0].data_ptr()]
    thread.close()


def test_a_system_that_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr(module, "_populate", lambda address, _num_bytes: bool(asked.append(address)))
    prefault([allocate(4 * HUGE_PAGE)], 4 * HUGE_PAGE).wait()
    assert len(asked) == 1
