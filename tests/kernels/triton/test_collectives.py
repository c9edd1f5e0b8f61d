"""Sums of gathered parts against a loop."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.triton.norm import SUM_BLOCK, sum_parts
from tests.kernels.triton.helpers import DTYPES, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 5), (2, 7, SUM_BLOCK // 7), (3, SUM_BLOCK + 1), (8, 2 * SUM_BLOCK)])
def test_sums_in_the_order_of_the_ranks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    parts = random(device, *shape, dtype=dtype)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    assert torch.equal(sum_parts(parts), expected.to(dtype))
