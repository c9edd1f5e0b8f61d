"""Rows of a table, exactly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.triton.embedding import embedding, mean_rows
from tests.kernels.triton.helpers import DTYPES, assert_near, random, spread_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 48, 1100])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_of_a_table(dtype: torch.dtype, size: int, index_dtype: torch.dtype, device: torch.device) -> None:
    table = random(device, 11, size, dtype=dtype)
    indices = torch.tensor([0, 10, 3, 3, 7], dtype=index_dtype, device=device)
    rows = F.embedding(indices, table)
    assert torch.equal(embedding(table, indices), rows)
    onto = spread_rows(random(device, 5, size, dtype=dtype, seed=1), 3)
    expected = onto + rows
    result = embedding(table, indices, onto)
    assert result.data_ptr() == onto.data_ptr()
    assert torch.equal(result, expected)


def test_what_lies_outside_the_table_reads_zeros(device: torch.device) -> None:
    table = random(device, 4, 20)
    indices = torch.tensor([-1, 2, 4, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    assert torch.equal(embedding(table, indices), table[2] * (indices == 2)[:, None])


def test_no_indices(device: torch.device) -> None:
    assert embedding(random(device, 4, 20), torch.empty(0, dtype=torch.int64, device=device)).shape == (0, 20)


def test_means_of_rows_that_follow_one_another(device: torch.device) -> None:
    x = random(device, 9, 200)
    spans = [(0, 1), (1, 6), (6, 9)]
    starts, ends = (torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*spans, strict=True))
    found = mean_rows(spread_rows(x, 3), starts, ends)
    expected = torch.stack([x[start:end].double().mean(0) for start, end in spans])
    assert_near(found, expected, roundings=4.0, scale=1.0)
