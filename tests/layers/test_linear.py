"""Layers that ranks share: each rank loads its part, and the parts add up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from quire.layers.context import LayerContext
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.parallel.single import SingleRank
from tests.layers.helpers import torch_context


@dataclass(frozen=True)
class Rank:
    """One of several ranks, which the test adds up itself."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor


def context(rank: int = 0, size: int = 1) -> LayerContext:
    return torch_context(group=Rank(rank, size))


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


QUERY, KEY, VALUE, BIAS = randn(8, 6, seed=1), randn(4, 6, seed=2), randn(4, 6, seed=3), randn(16, seed=4)
X, RESIDUAL = randn(5, 6, seed=5), randn(5, 16, seed=6)


def fill(layer: ColumnParallelLinear, *, fused: bool, transposed: bool) -> None:
    weights, biases = [QUERY, KEY, VALUE], list(BIAS.split([8, 4, 4]))
    names = ["q", "k", "v"]
    if fused:
        weights, biases, names = [torch.cat(weights)], [BIAS], ["qkv"]
    slots = layer.slots(names, transposed=transposed)
    assert sorted(slots) == sorted(f"{name}.{suffix}" for name in names for suffix in ("weight", "bias"))
    for name, weight, bias in zip(names, weights, biases, strict=True):
        weight = weight.t() if transposed else weight
        assert slots[f"{name}.weight"].shape == tuple(weight.shape)
        slots[f"{name}.weight"].load(weight)
        slots[f"{name}.bias"].load(bias)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_parts_over_ranks(size: int, fused: bool, transposed: bool) -> None:
    shares = []
    for rank in range(size):
        layer = ColumnParallelLinear(6, (8, 4, 4), bias=True, context=context(rank, size))
        fill(layer, fused=fused, transposed=transposed)
        assert layer.local_parts == (8 // size, 4 // size, 4 // size)
        shares.append(layer(X).split(layer.local_parts, dim=-1))
    whole = torch.cat([torch.cat(part, dim=-1) for part in zip(*shares, strict=True)], dim=-1)
    torch.testing.assert_close(whole, F.linear(X, torch.cat((QUERY, KEY, VALUE)), BIAS))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_row_shares_add_up_with_one_bias(size: int, transposed: bool) -> None:
    total = torch.zeros(5, 16)
    weight = randn(16, 6, seed=7)
    for rank in range(size):
        layer = RowParallelLinear(6, 16, bias=True, context=context(rank, size))
        slots = layer.slots("o", transposed=transposed)
        slots["o.weight"].load(weight.t() if transposed else weight)
        slots["o.bias"].load(BIAS)
        total += layer(X.chunk(size, dim=-1)[rank], RESIDUAL) - RESIDUAL
    torch.testing.assert_close(total, F.linear(X, weight, BIAS))


def test_replicated_context_ignores_the_ranks() -> None:
    layer = ColumnParallelLinear(6, (16,), bias=False, context=context(1, 2).replicated())
    assert layer.local_parts == (16,)


def test_single_rank_changes_nothing() -> None:
    group = SingleRank()
    assert (group.rank, group.size) == (0, 1)
    assert torch.equal(group.all_reduce(X), X)
    assert torch.equal(group.all_gather(X, dim=1), X)
