"""Teams of more threads than a machine has cores compute what one thread computes."""

from __future__ import annotations

from threading import Event, Thread

import pytest
import torch

from quire.kernels.arguments import LayerAttention
from quire.kernels.cpu import _native
from quire.kernels.cpu._native import Activation
from tests.kernels.cpu.attention_pool import History, NativePool, Setting
from tests.kernels.cpu.linear_calls import GuardedRows, precision_of, random_matrix, run_linear
from tests.kernels.cpu.linear_calls import pool as pool_of

THREADS = (2, 3, 8)


@pytest.mark.parametrize("rows", [1, 40, 300])
@pytest.mark.parametrize("kind", ["bf16", "i8_rounded", "i4"])
def test_products(kind: str, rows: int) -> None:
    """Rows that each thread packs for itself, and rows that threads share; panels widened once for many rows."""
    matrix = random_matrix(kind, 577, 134, group_size=64)
    x = torch.randn(rows, 577, generator=torch.Generator().manual_seed(1))
    alone, *teams = (
        run_linear(matrix, x, isa="auto", precision=precision_of(kind), threads=threads) for threads in (1, *THREADS)
    )
    assert all(torch.equal(each, alone) for each in teams)


def test_attention() -> None:
    """A prompt, and a token whose context is cut into pieces for the threads."""
    layer = LayerAttention(layer=0, num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25)
    history = History.random(1100, layer, seed=5)
    outs = []
    for threads in (1, *THREADS):
        pool = NativePool(layer, [1100], Setting("auto", threads, "bfloat16"))
        outs.append(torch.cat([*pool.step([history], [(0, 1099)]), *pool.step([history], [(0, 1)])]))
    assert all(torch.equal(each, outs[0]) for each in outs)


@pytest.mark.parametrize("threads", THREADS)
def test_threads_join_at_the_kernel_that_the_others_have_reached(threads: int) -> None:
    """Runs of many kernels, each of which reads what the one before has written, with the helpers that come in time."""
    matrix, rows, depth = random_matrix("bf16", 64, 64), 24, 40
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))
    expected = x
    for _ in range(depth):
        expected = run_linear(matrix, expected, isa="auto", residual=expected)
    program = _native.Program("auto", _native.Pool(threads, pin=False), rows, precision_of("bf16"))
    given = [GuardedRows(rows, 64, x) for _ in range(3)]
    first, *places = [_native.Ref(number, 0, each.stride) for number, each in enumerate(given)]
    for number in range(depth):
        source, out = places[number % 2 - 1] if number else first, places[number % 2]
        program.linear(matrix.as_native(), 0, source, source, out, Activation.NONE, None)
    scratch = torch.zeros(program.scratch_bytes + 64, dtype=torch.uint8)
    start = scratch.data_ptr() + -scratch.data_ptr() % 64
    run = program.bind(rows, [], [], [each.address() for each in given], start)
    for _ in range(30):
        run()
        assert torch.equal(given[-1].values, expected)
        given[-1].values.zero_()


@pytest.mark.parametrize("threads", [1, *THREADS])
def test_helpers_that_are_woken_early_wait_for_the_run(threads: int) -> None:
    """Before, between and beside runs, whether they sleep or not."""
    matrix = random_matrix("bf16", 64, 32)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    expected, pool, is_over = run_linear(matrix, x, isa="auto", threads=1), pool_of(threads), Event()

    def wake() -> None:
        while not is_over.is_set():
            pool.wake()

    beside = Thread(target=wake)
    beside.start()
    try:
        for _ in range(20):
            pool.wake()
            assert torch.equal(run_linear(matrix, x, isa="auto", threads=threads), expected)
    finally:
        is_over.set()
        beside.join()
