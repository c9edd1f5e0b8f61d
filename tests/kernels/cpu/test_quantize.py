"""The native search for 4-bit weights against its plain twin."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu import _native
from quire.kernels.cpu.quantize import fit_int4
from quire.quantization.quantize import CLIPPING, NUDGES, FittedGroups, fit_groups

pytestmark = pytest.mark.parametrize("isa", _native.available_isas())


def fitted(groups: torch.Tensor, isa: str) -> FittedGroups:
    found = fit_int4(groups, CLIPPING, NUDGES, isa=isa)
    assert found is not None
    return FittedGroups(*found)


def error(found: FittedGroups, groups: torch.Tensor) -> torch.Tensor:
    """[M]: squared, in float64."""
    weights = found.offsets.double() + found.steps.double() * found.values.double()
    return (weights - groups.double()).square().sum(1)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_as_good_as_the_plain_search(isa: str, size: int) -> None:
    """Sums round otherwise, so that now and then another of two equal candidates wins."""
    generator = torch.Generator().manual_seed(size)
    groups = torch.randn(203, size, generator=generator)
    groups[50:100] /= torch.rand(50, size, generator=generator) + 0.1
    groups[100:] += 3.0
    groups[7], groups[8] = 0.0, -2.5
    groups[9] *= 1e-30
    ours, plain = fitted(groups, isa), fit_groups(groups)
    assert plain is not None
    assert ours.values.dtype == torch.uint8
    assert (ours.values == plain.values).float().mean() > 0.98
    torch.testing.assert_close(ours.means, ours.values.float().mean(1, keepdim=True))
    assert (error(ours, groups) <= 1.02 * error(plain, groups) + 1e-9).all()
    assert error(ours, groups).sum() <= 1.001 * error(plain, groups).sum()
    same = (ours.values == plain.values).all(1)
    torch.testing.assert_close(ours.steps[same], plain.steps[same], rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(ours.offsets[same], plain.offsets[same], rtol=1e-4, atol=1e-5)


def test_a_group_does_not_depend_on_the_others(isa: str) -> None:
    groups = torch.randn(3000, 32, generator=torch.Generator().manual_seed(1))
    whole = fitted(groups, isa)
    for part in (slice(0, 1), slice(5, 18), slice(1020, 1030), slice(2999, 3000)):
        for all_of_it, alone in zip(whole, fitted(groups[part], isa), strict=True):
            assert torch.equal(all_of_it[part], alone)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 17, 2499])
def test_infinities_and_nan_are_found(isa: str, bad: float, place: int) -> None:
    groups = torch.randn(2500, 32)
    groups[place, 31] = bad
    assert fit_int4(groups, CLIPPING, NUDGES, isa=isa) is None


def test_what_does_not_fit_is_refused(isa: str) -> None:
    with pytest.raises(ValueError, match=r"groups of 1 to 128 weights"):
        fit_int4(torch.zeros(2, 129), CLIPPING, NUDGES, isa=isa)
    with pytest.raises(ValueError, match=r"float32 \[M, G\] expected, got torch.bfloat16"):
        fit_int4(torch.zeros(2, 32, dtype=torch.bfloat16), CLIPPING, NUDGES, isa=isa)
