"""Norms: the value of the definition, and the same bits for a row whatever stands beside it."""

from __future__ import annotations

import pytest
import torch

from quire.layers.norm import LayerNorm, RMSNorm, UnitOffsetRMSNorm
from tests.layers.helpers import torch_context

Norm = RMSNorm | LayerNorm


def build(kind: type[Norm], size: int, dtype: torch.dtype = torch.float32) -> Norm:
    norm = kind(size, 1e-5, torch_context(dtype))
    for index, slot in enumerate(norm.slots().values()):
        slot.load(torch.randn(slot.shape, generator=torch.Generator().manual_seed(index)))
    return norm


def weights(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    return first.double(), second.double()


def test_rms_norm() -> None:
    x = torch.randn(9, 50, generator=torch.Generator().manual_seed(5)).double() * 4
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights(50)[0]
    torch.testing.assert_close(build(RMSNorm, 50)(x.float()).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_added_to_one_is_rounded_with_the_result_alone(dtype: torch.dtype) -> None:
    norm = UnitOffsetRMSNorm(50, 1e-5, torch_context(dtype))
    weight = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2**-9
    (slot,) = norm.slots().values()
    slot.load(weight)
    x = (torch.randn(9, 50, generator=torch.Generator().manual_seed(5)) * 4).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + weight.double())
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x).double(), expected, rtol=1.01 * torch.finfo(dtype).eps / 2, atol=1e-6)
    assert (slot.dummy_mean, slot.dummy_std) == (0.0, 0.0)


def test_layer_norm() -> None:
    x = torch.randn(9, 50, generator=torch.Generator().manual_seed(5)).double() * 4
    centred = x - x.mean(-1, keepdim=True)
    weight, bias = weights(50)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(build(LayerNorm, 50)(x.float()).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [RMSNorm, UnitOffsetRMSNorm, LayerNorm])
@pytest.mark.parametrize("size", [33, 64, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_their_number_or_place(kind: type[Norm], size: int, dtype: torch.dtype) -> None:
    norm = build(kind, size, dtype)
    x = torch.randn(300, size, generator=torch.Generator().manual_seed(5)).to(dtype)
    expected = norm(x)
    for first, last in ((0, 1), (1, 4), (7, 71), (3, 300)):
        assert torch.equal(norm(x[first:last]), expected[first:last])
        shifted = torch.cat((x.new_zeros(last - first, 3), x[first:last]), dim=1)[:, 3:]
        assert torch.equal(norm(shifted), expected[first:last])
