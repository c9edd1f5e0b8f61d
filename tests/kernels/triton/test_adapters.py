"""Grouped products of adapters against float64, and bits that no other row changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from quire.kernels.triton.adapters import ROWS, AdapterMatrices, SlotTiles, add_adapted, add_looked_up
from tests.kernels.triton.helpers import assert_near, random, spread_rows
from tests.long import all_but_long

NUM_SLOTS, MAX_RANK, INPUTS = 3, 24, 1100
PIECES = [(0, 70), (70, 33)]
RANKS = {(1, 0): 16, (1, 1): 5, (2, 1): 24, (3, 0): 1, (3, 1): 16}
"""By slot and piece; slot 2 has nothing for the first."""
Low = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, float]]


def adapters(
    device: torch.device, dtype: torch.dtype, order: Sequence[int] = (1, 2, 3), inputs: int = INPUTS
) -> tuple[AdapterMatrices, Low]:
    """Adapters in their slots, and the same as A, B and scale in float64. order: by adapter, its slot."""
    matrices = AdapterMatrices.empty(NUM_SLOTS, MAX_RANK, inputs, PIECES, dtype, device)
    for each in (matrices.a, matrices.b):
        each.fill_(torch.nan)  # nothing is read that no adapter has stored
    plain: Low = {}
    for (adapter, piece), rank in RANKS.items():
        host = torch.device("cpu")
        a = (random(host, rank, inputs, seed=7 * adapter + piece) * inputs**-0.5).to(dtype)
        b = random(host, rank, PIECES[piece][1], seed=11 * adapter + piece).to(dtype)
        start = int(matrices.places[piece, 2])
        matrices.store(order[adapter - 1], piece, start, a, b, 0.5 * adapter)
        plain[adapter, piece] = a.double(), b.double(), 0.5 * adapter
    return matrices, plain


def twin(plain: Low, x: torch.Tensor, y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """In float64."""
    found = y.cpu().double()
    for (adapter, piece), (a, b, scale) in plain.items():
        start, width = PIECES[piece]
        own = (slots == adapter).cpu()
        found[own, start : start + width] += scale * (x.cpu().double()[own] @ a.T) @ b
    return found


@pytest.mark.parametrize(
    ("dtype", "stored"),
    all_but_long(
        [
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.float16),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.bfloat16),
        ],
        [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ),
)
def test_against_float64(dtype: torch.dtype, stored: torch.dtype, device: torch.device) -> None:
    matrices, plain = adapters(device, stored)
    x, y = spread_rows(random(device, 45, INPUTS, dtype=dtype), 3), random(device, 45, 103, dtype=dtype, seed=2)
    slots = torch.randint(0, 4, (45,), generator=torch.Generator().manual_seed(1))
    wanted = twin(plain, x, y, slots)
    found = spread_rows(y, 5)
    add_adapted(matrices, x, found, SlotTiles.of(slots.to(device), NUM_SLOTS))
    # The inner values are rounded to the dtype of both, where they have one; sums of 16 of them have errors of several.
    assert_near(found.cpu(), wanted, roundings=3, scale=8)
    assert torch.equal(found[slots == 0], y[slots == 0])
    assert torch.equal(found[slots == 2, :70], y[slots == 2, :70])


def test_rows_that_share_an_input_and_have_factors(device: torch.device) -> None:
    """As the pairs of a token and its experts."""
    matrices, plain = adapters(device, torch.float32, inputs=160)
    x, y = random(device, 15, 160), random(device, 45, 103, seed=2)
    slots = torch.randint(0, 4, (45,), generator=torch.Generator().manual_seed(1))
    factors = random(device, 45, seed=6).abs()
    added = twin(plain, x.repeat_interleave(3, 0), torch.zeros_like(y), slots)
    found = y.clone()
    add_adapted(matrices, x, found, SlotTiles.of(slots.to(device), NUM_SLOTS), factors, repeats=3)
    assert_near(found.cpu(), y.cpu().double() + factors.cpu().double()[:, None] * added, roundings=3, scale=8)
    assert torch.equal(found[slots == 0], y[slots == 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_table(dtype: torch.dtype, device: torch.device) -> None:
    """Against float64, and the same bits alone."""
    num_rows, size, host = 50, 70, torch.device("cpu")
    matrices = AdapterMatrices.empty(2, 24, num_rows, [(0, size)], dtype, device)
    pairs = []
    for slot, rank in ((1, 24), (2, 5)):
        a, b = (random(host, rank, each, seed=slot).to(dtype) for each in (num_rows, size))
        matrices.store(slot, 0, 0, a, b, 0.5 * slot)
        pairs.append(0.5 * slot * a.double().T @ b.double())
    indices = torch.randint(0, num_rows, (40,), generator=torch.Generator().manual_seed(3))
    slots = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(4))
    y = random(device, 40, size, dtype=dtype, seed=9)
    table = torch.stack([torch.zeros_like(pairs[0]), *pairs])
    found = y.clone()
    add_looked_up(matrices, indices.to(device), found, SlotTiles.of(slots.to(device), 2))
    assert_near(found.cpu(), y.cpu().double() + table[slots, indices], roundings=3, scale=8)
    assert torch.equal(found[slots == 0], y[slots == 0])
    for row in (int((slots == 1).nonzero()[-1]), int((slots == 2).nonzero()[0])):
        own = y[row : row + 1].clone()
        add_looked_up(
            matrices, indices[row : row + 1].to(device), own, SlotTiles.of(slots[row : row + 1].to(device), 2)
        )
        assert torch.equal(own[0], found[row])


def test_the_same_bits_in_any_batch_order_and_slot(device: torch.device) -> None:
    matrices, _ = adapters(device, torch.bfloat16, inputs=160)
    elsewhere, _ = adapters(device, torch.bfloat16, (3, 1, 2), inputs=160)
    moved = torch.tensor([0, 3, 1, 2])
    x, y = (random(device, 40, size, dtype=torch.bfloat16, seed=3) for size in (160, 103))
    slots = torch.randint(0, 4, (40,), generator=torch.Generator().manual_seed(4))
    together = y.clone()
    add_adapted(matrices, x, together, SlotTiles.of(slots.to(device), NUM_SLOTS))
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(5))
    for rows in (shuffled, torch.tensor([7]), torch.arange(11, 30)):
        part, own = y[rows].clone(), moved[slots[rows]]
        add_adapted(elsewhere, x[rows], part, SlotTiles.of(own.to(device), NUM_SLOTS))
        assert torch.equal(part, together[rows])
    assert not torch.equal(together, y)


def test_a_cleared_slot_adds_nothing(device: torch.device) -> None:
    matrices, _ = adapters(device, torch.float32, inputs=64)
    matrices.clear(1)
    x, y = random(device, 5, 64), random(device, 5, 103)
    found = y.clone()
    add_adapted(matrices, x, found, SlotTiles.of(torch.tensor([1, 1, 0, 2, 1], device=device), NUM_SLOTS))
    assert torch.equal(found[[0, 1, 2, 4]], y[[0, 1, 2, 4]])
    assert not torch.equal(found[3], y[3])


@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 17, 100])
def test_tiles_belong_to_one_slot_each(num_rows: int, device: torch.device) -> None:
    slots = torch.randint(0, 6, (num_rows,), generator=torch.Generator().manual_seed(num_rows)).to(device)
    order = SlotTiles.of(slots, 5)
    seen = []
    for slot, first, end in order.tiles.tolist():
        if slot:
            own = order.rows[first : min(first + ROWS, end)].long()
            assert len(own) > 0
            assert (slots[own] == slot).all()
            seen += own.tolist()
    assert sorted(seen) == slots.nonzero().flatten().tolist()
