"""The yardsticks really read what they are given, and count what they compute. Nothing is timed here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.cpu import _native

POOLS = {threads: _native.Pool(threads, pin=False, whole=True) for threads in (1, 2, 3)}
every_isa = pytest.mark.parametrize("isa", _native.available_isas())
every_pool = pytest.mark.parametrize("threads", list(POOLS))


@every_isa
@every_pool
def test_every_word_is_read(isa: str, threads: int) -> None:
    pieces = 5
    words = torch.randint(-(2**31), 2**31, (pieces * _native.READ_PIECE // 4,), dtype=torch.int64).to(torch.int32)
    expected = int(words.numpy().view(np.uint32).sum(dtype=np.uint64)) % 2**32
    assert _native.read_limit(isa, POOLS[threads], words.data_ptr(), words.nbytes) == expected
    words[-1] += 1
    assert _native.read_limit(isa, POOLS[threads], words.data_ptr(), words.nbytes) == (expected + 1) % 2**32


def test_only_whole_pieces_are_read() -> None:
    words = torch.zeros(1024)
    with pytest.raises(ValueError, match="READ_PIECE"):
        _native.read_limit("auto", POOLS[1], words.data_ptr(), words.nbytes)


@every_isa
@every_pool
def test_operations_are_those_of_the_units(isa: str, threads: int) -> None:
    for loop in (_native.float_limit, _native.integer_limit):
        one = loop(isa, POOLS[threads], 1)
        assert one > 0
        assert loop(isa, POOLS[threads], 7) == 7 * one
        assert loop(isa, POOLS[threads], 0) == 0


@every_isa
def test_integers_are_counted_as_the_instruction_set_multiplies_them(isa: str) -> None:
    """Four products of bytes where there are such instructions, else two of 16 bits (or one). A unit of tiles
    has 64 times as many."""
    ratio = _native.integer_limit(isa, POOLS[1], 1) / _native.float_limit(isa, POOLS[1], 1)
    assert ratio in ((1, 2) if isa == "portable" else (256,) if isa == "amx" else (4,))


@every_pool
def test_bfloat16_products_come_two_at_a_time(threads: int) -> None:
    """In vectors; a unit of tiles has 64 times as many."""
    for isa in ("bf16_emulated", *filter(_native.has_bf16_products, _native.available_isas())):
        for units in (0, 1, 7):
            count = _native.bf16_limit(isa, POOLS[threads], units)
            assert count == (128 if isa == "amx" else 2) * _native.float_limit(isa, POOLS[threads], units)
    with pytest.raises(ValueError, match="portable has no bfloat16 products"):
        _native.bf16_limit("portable", POOLS[threads], 1)


def test_an_instruction_set_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="instruction sets of this machine"):
        _native.float_limit("sse9", POOLS[1], 1)
