"""Products and functions of torch in a fixed order of operations, for tests that compare bits.

MKL or oneDNN chooses the order in which torch's own products add, for the processor that it finds, and `exp`, `erf` and
`tanh` come from MKL as well: with them the verdict of a test would depend on the machine. Here both are made of NumPy's
loops and of single additions and products, which IEEE 754 defines to the last bit.

What is promised of a BLAS (docs/decisions/0002-batch-invariance.md), and nothing more, holds of these products: a row
has the same bits at every place of a product of a given number of rows. Asked for another number of rows they add in
another order, as a BLAS does. (For batched products: another number modulo 16.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

ROWS = 16


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch.nn.functional.linear. x: [..., K], weight: [N, K], bias: [N] -> [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    out = _products(rows[None], weight[None], rows.shape[0] % rows.shape[1], True)[0]
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.bmm. a: [B, M, K], b: [B, K, N] -> [B, M, N]."""
    return _products(a, b.transpose(1, 2), a.shape[1] % ROWS, False).to(a.dtype)


@torch.library.custom_op(
    "quire_tests::products", mutates_args=(), schema="(Tensor left, Tensor right, int start, bool is_weight) -> Tensor"
)
def _products(left: torch.Tensor, right: torch.Tensor, start: int, is_weight: bool) -> torch.Tensor:
    """left: [B, M, K], right: [B, N, K] -> [B, M, N], float32 or float64. Sums begin at `start` of K. is_weight:
    `right` comes again.

    An operator of torch's, so that a capture of graphs records it as one.
    """
    rows = _rolled(left, start)
    columns = _rolled_weight(right, start) if is_weight else _rolled(right, start)
    # The sum over k is the innermost loop, one call of it for each element of the result. Rows of zeros are padding.
    present = rows[0].any(-1) if is_weight else np.ones(rows.shape[1], bool)
    out = np.zeros((*rows.shape[:2], columns.shape[1]), rows.dtype)
    out[:, present] = np.einsum("bmk,bnk->bmn", rows[:, present], columns, optimize=False)
    return torch.from_numpy(out).clone()


def _rolled(x: torch.Tensor, start: int) -> np.ndarray:
    """An array of its own: memory that NumPy sees can no longer be given back by an engine that sleeps."""
    wide = x.detach().to(x.dtype if x.dtype == torch.float64 else torch.float32)
    array: np.ndarray = wide.roll(-start, -1).contiguous().numpy()
    return array


MOST_KEPT = 2**26
"""Numbers, in copies of weights."""
_kept: dict[tuple[int, torch.Size], tuple[torch.Tensor, dict[int, np.ndarray]]] = {}
"""By address and shape of a weight: its bits, and its rolls by their start."""


def _rolled_weight(weight: torch.Tensor, start: int) -> np.ndarray:
    """The same, without a copy if the weight is that of an earlier call, to the last bit."""
    if weight.dtype != torch.float32 or weight.shape[-1] % 2 or not weight.is_contiguous():
        return _rolled(weight, start)
    key, bits = (weight.data_ptr(), weight.shape), weight.detach().view(torch.int64)
    known = _kept.get(key)
    if known is None or not torch.equal(known[0], bits):
        known = _kept[key] = bits.clone(), {}
    rolls = known[1]
    if start not in rolls:
        if sum(each.size for _, others in _kept.values() for each in others.values()) > MOST_KEPT:
            _kept.clear()
        rolls[start] = _rolled(weight, start)
    return rolls[start]


def exp(x: torch.Tensor) -> torch.Tensor:
    """torch.exp, to a few units in the last place of float64, without numbers below 1e-300."""
    wide = x.double().clamp(-690.0, 709.0)
    powers = (wide * (1 / math.log(2))).round()
    rest = wide - powers * math.log(2)
    series = torch.zeros_like(wide)
    for n in range(16, -1, -1):
        series = series * rest + 1 / math.factorial(n)
    scale = ((powers.long() + 1023) << 52).view(torch.float64)
    return torch.where(x.isnan(), torch.nan, torch.where(x == torch.inf, torch.inf, series * scale)).to(x.dtype)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """torch.tanh."""
    wide = x.double()
    return (1 - 2 / (exp(2 * wide) + 1)).to(x.dtype)


def erf(x: torch.Tensor) -> torch.Tensor:
    """torch.erf to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    wide = x.double().abs()
    t = 1 / (1 + 0.3275911 * wide)
    series = torch.zeros_like(t)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + factor) * t
    return ((1 - series * exp(-wide * wide)) * torch.where(x < 0, -1.0, 1.0)).to(x.dtype)


@contextmanager
def fixed_order() -> Iterator[None]:
    """In place of torch's own, in all threads of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", linear)
        for function in (bmm, exp, tanh, erf):
            patch.setattr(torch, function.__name__, function)
        patch.setattr(torch.Tensor, "tanh_", lambda x: x.copy_(tanh(x)))
        yield
