"""The stand-ins for torch's products and functions: right, and in the stated order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import fixed_order

FUNCTIONS = [(fixed_order.exp, torch.exp), (fixed_order.tanh, torch.tanh), (fixed_order.erf, torch.erf)]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products(dtype: torch.dtype) -> None:
    x, weight, bias = normal(5, 33).to(dtype), normal(7, 33).to(dtype), normal(7).to(dtype)
    eps = torch.finfo(dtype).eps
    for given in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
        torch.testing.assert_close(fixed_order.linear(x, weight, given).double(), exact, rtol=eps, atol=8 * eps)
    a, b = normal(3, 5, 33).to(dtype), normal(3, 33, 4).to(dtype)
    torch.testing.assert_close(fixed_order.bmm(a, b).double(), a.double() @ b.double(), rtol=eps, atol=16 * eps)


@pytest.mark.parametrize(("ours", "torchs"), FUNCTIONS)
def test_functions(ours: type[torch.exp], torchs: type[torch.exp]) -> None:
    special = torch.tensor([0.0, -torch.inf, torch.inf, torch.nan])
    x = torch.cat((torch.linspace(-20, 20, 1001), torch.tensor([-200.0, 80.0]), special))
    torch.testing.assert_close(ours(x), torchs(x), rtol=2e-7, atol=2e-7, equal_nan=True)
    assert torch.equal(torch.cat([ours(part) for part in x.split(7)]).nan_to_num(), ours(x).nan_to_num())


def test_a_row_has_the_same_bits_at_every_place_and_others_among_other_rows() -> None:
    x, weight = normal(16, 64), normal(48, 64)
    product = fixed_order.linear(x, weight)
    batched = fixed_order.bmm(x.expand(3, 16, 64), weight.T.expand(3, 64, 48))
    for shift in range(16):
        assert torch.equal(fixed_order.linear(x.roll(shift, 0), weight), product.roll(shift, 0))
        rolled = fixed_order.bmm(x.roll(shift, 0).expand(2, 16, 64), weight.T.expand(2, 64, 48))
        assert torch.equal(rolled[0], batched[2].roll(shift, 0))
    assert not torch.equal(fixed_order.linear(x[:5], weight), product[:5])
    assert not torch.equal(fixed_order.bmm(x[None, :5], weight.T[None])[0], batched[0, :5])


def test_they_are_in_place_only_while_asked_for() -> None:
    own = torch.exp
    with fixed_order.fixed_order():
        assert torch.exp is fixed_order.exp
        assert F.linear is fixed_order.linear
    assert torch.exp is own


def test_a_weight_that_changes_in_place_is_read_again() -> None:
    """As an engine's that has slept; and each number of rows has its own order of sums."""
    weight = normal(48, 64)
    for _ in range(2):
        for rows in (1, 3, 63):
            x = normal(rows, 64)
            kept = np.einsum("mk,nk->mn", *(each.roll(-rows, -1).numpy() for each in (x, weight)), optimize=False)
            assert np.array_equal(fixed_order.linear(x, weight).numpy(), kept)
        weight[5, 7] += 1


def test_padding_changes_no_bit() -> None:
    weight, x = normal(48, 64), normal(16, 64)
    product = fixed_order.linear(x, weight)
    for rows in range(16):
        padded = x.clone()
        padded[rows:] = 0
        found = fixed_order.linear(padded, weight)
        assert torch.equal(found[:rows], product[:rows])
        assert not found[rows:].any()
