"""Teams of more threads than a machine has cores compute what one thread computes."""

from __future__ import annotations

from threading import Event, Thread

import pytest
import torch

from quire.kernels.arguments import LayerAttention
from tests.kernels.cpu.attention_pool import History, NativePool, Setting
from tests.kernels.cpu.linear_calls import pool as pool_of
from tests.kernels.cpu.linear_calls import precision_of, random_matrix, run_linear

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
