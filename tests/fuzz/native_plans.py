"""The native module's plans and their checked wrappers, with arguments from anywhere: done, or an exception."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import torch

from quire.attention.interface import AttentionBatch
from quire.errors import QuireError
from quire.kernels.cpu import _native
from quire.kernels.cpu.packing import PackedMatrix
from quire.kernels.cpu.paged_attention import AttentionPlans, block_bytes, copy_blocks, move_blocks
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec, SlidingWindowSpec
from tests.fuzz.child import cases_of
from tests.fuzz.harness import Fuzzer

REFUSALS = (QuireError, ValueError, TypeError, OverflowError, RuntimeError, MemoryError)
"""What arguments may be answered with: the interpreter's own for values that are no 64-bit integers, torch's and
Python's for sizes that no memory has."""
EXTREMES = (-(2**63), -(2**31), -1, 0, 1, 2, 7, 8, 16, 17, 64, 255, 1024, 4096, 2**16, 2**31 - 1, 2**31, 2**32)
HUGE = (2**40, 2**52, 2**60, 2**62, 2**63 - 1, 2**63, 2**64)


def number(rng: Random, usual: int) -> int:
    """Mostly what works, so that later checks are reached too."""
    kind = rng.random()
    if kind < 0.7:
        return usual
    return rng.choice(EXTREMES if kind < 0.9 else HUGE) + rng.choice((0, 0, -1, 1))


def numbers(rng: Random, usual: list[int], dtype: torch.dtype) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    found = [max(limits.min, min(limits.max, number(rng, value))) for value in usual]
    return torch.tensor(found, dtype=dtype)


def attention_plan(rng: Random) -> None:
    """A step's plan over raw tables: lengths, positions, blocks and slots from anywhere."""
    plan = _native.AttentionPlan(
        number(rng, 16), number(rng, 40), number(rng, 8), number(rng, 2), number(rng, 0), rng.choice((1, 2, 4))
    )
    num = rng.randrange(4)
    starts = numbers(rng, [0, 3, 4, 10][: num + 1], torch.int64)
    positions = numbers(rng, [5, 40, 0][:num], torch.int64)
    table = numbers(rng, [rng.randrange(40) for _ in range(num * 4)], torch.int32).view(num, 4)
    slots = numbers(rng, [rng.randrange(640) for _ in range(64)], torch.int64)
    if int(starts.abs().max()) > len(slots):
        return  # the wrapper compares the number of slots
    plan.set(num, starts.data_ptr(), positions.data_ptr(), table.data_ptr(), 4, 4, slots.data_ptr())
    assert plan.num_items >= 0


def attention_batch(rng: Random) -> None:
    """The wrapper, whose tensors may have other shapes and dtypes."""
    spec: Any = AttentionSpec(2, 8, 8, 4)
    if rng.random() < 0.5:
        spec = SlidingWindowSpec(2, 8, 8, 4, window=number(rng, 9))
    groups, per_group = group_layers([spec], 16)
    plans = AttentionPlans(KVCacheLayout(16, number(rng, 40), groups, per_group), number(rng, 8), 2)
    dtype = rng.choice((torch.int64, torch.int64, torch.int64, torch.int32, torch.float32))
    num = rng.choice((2, 2, 2, 1, 3))
    batch = AttentionBatch(
        numbers(rng, [0, 3, 10], torch.int64),
        numbers(rng, [5, 40, 7][:num], torch.int64).to(dtype),
        torch.arange(10),
        torch.zeros(10, dtype=torch.int64),
        (numbers(rng, [1, 2, 3, 4] * num, torch.int32).view(num, 4)[:, :: rng.choice((1, 1, 2))],),
        (numbers(rng, list(range(rng.choice((10, 10, 9)))), torch.int64),),
    )
    plans.set(batch)


def step_inputs(rng: Random) -> None:
    """A step over tables with entries from anywhere, in memory of other sizes too."""

    def size(usual: int) -> int:
        return usual - (rng.random() < 0.03)

    plan = _native.AttentionPlan(16, 40, 8, 2, 0, 2)
    table = numbers(rng, [rng.randrange(40) for _ in range(4 * 5)], torch.int32).view(4, 5).numpy()
    inputs = _native.StepInputs(
        _native.Pool(1, False),
        np.zeros((size(4), 64), np.int32),
        [table],
        [number(rng, 16) if rng.random() < 0.3 else 16],
        [rng.choice((plan, plan, None))],
        [np.zeros((4, size(5)), np.int32)],
        *(np.zeros(size(each), np.int64) for each in (4, 4, 4, 5)),
    )
    token_ids, positions, index, *slots = (np.zeros(size(32), np.int64) for _ in range(4))
    inputs.place_tokens(token_ids, positions, index, slots[: size(1)])
    num = rng.randrange(1, 5)
    inputs.set_rows(numbers(rng, [3, 1, 0, 2][:num], torch.int64).numpy())
    inputs.gather([number(rng, usual) for usual in (5, 40, 0, 60)[:num]], [number(rng, 3) for _ in range(num)])


def sizes(rng: Random) -> None:
    _native.block_bytes(number(rng, 16), number(rng, 2), number(rng, 64), rng.choice(list(_CACHES)))
    block_bytes(number(rng, 16), number(rng, 2), number(rng, 64), "float32")


def copies(rng: Random) -> None:
    pages = [torch.zeros(6, 32, dtype=torch.uint8) for _ in range(2)]
    pairs = [(number(rng, rng.randrange(6)), number(rng, rng.randrange(6))) for _ in range(rng.randrange(8))]
    if rng.random() < 0.5:
        copy_blocks(_native.Pool(1, False), pages, number(rng, 32), number(rng, 6), pairs)
    else:
        move_blocks(pages, [torch.zeros(6, rng.choice((32, 32, 31)), dtype=torch.uint8) for _ in range(2)], pairs)


def packed(rng: Random) -> None:
    kind = rng.choice((_native.WeightType.F32, _native.WeightType.BF16, _native.WeightType.I8, _native.WeightType.I4))
    is_integer = kind in (_native.WeightType.I8, _native.WeightType.I4)
    group_size = number(rng, 8) if is_integer and rng.random() < 0.7 else None
    matrix = PackedMatrix(
        kind, number(rng, 24), number(rng, 40), group_size=group_size, gated=rng.random() < 0.3, with_offsets=is_integer
    )
    if matrix.nbytes > 2**24:
        return  # reserved, not touched
    rows, first = rng.choice((1, 7, 40)), number(rng, 0)
    if is_integer:
        dtype = torch.int8 if kind == _native.WeightType.I8 else torch.uint8
        groups = rng.choice((matrix.num_groups, matrix.num_groups, 1))
        values = torch.zeros(rows, rng.choice((24, 24, 23)), dtype=dtype)
        matrix.load_integer(values, torch.ones(rows, groups), torch.ones(rows, groups), first_row=first)
    else:
        matrix.load_dense(torch.ones(rows, rng.choice((24, 24, 23))), first)


_CACHES = (_native.CacheType.F32, _native.CacheType.BF16, _native.CacheType.I8)
TARGETS = (attention_plan, attention_plan, attention_batch, step_inputs, step_inputs, sizes, copies, packed)


def case(seed: str) -> None:
    rng = Random(seed)
    for _ in range(20):
        try:
            rng.choice(TARGETS)(rng)
        except REFUSALS:
            continue


FUZZER = Fuzzer("native_plans", lambda: cases_of("tests.fuzz.native_plans:case"), num_test_cases=60)
