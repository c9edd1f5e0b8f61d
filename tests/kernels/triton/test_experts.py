"""Grouped products of experts against their plain twin."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.arguments import ExpertWeights, Gating, Routing
from quire.kernels.experts import experts, route
from quire.kernels.triton.experts import ExpertMatrices, apply_experts
from quire.kernels.triton.weight_formats import StoredMatrix
from tests.kernels.triton.helpers import random


def plain(matrices: ExpertMatrices, x: torch.Tensor, routing: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """The twin in float32."""

    def product(part: tuple[torch.Tensor, torch.Tensor | None], rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, part[0].float(), None if part[1] is None else part[1].float())

    return experts(weights, x.float(), routing, None, product)


def case(device: torch.device, dtype: torch.dtype, *, bias: bool) -> ExpertMatrices:
    num_experts, size, intermediate = 5, 40, 24
    shapes = (num_experts, 2 * intermediate, size), (num_experts, size, intermediate)
    weights = [(random(device, *shape, seed=1) * shape[-1] ** -0.5).to(dtype) for shape in shapes]
    biases = [random(device, *shape[:2], seed=2).to(dtype) if bias else None for shape in shapes]
    return ExpertMatrices(*map(StoredMatrix.plain, weights), *biases)


@pytest.mark.parametrize(
    ("dtype", "limit", "weighs_input"),
    [(torch.float32, None, False), (torch.float32, 0.7, True), (torch.bfloat16, None, False)],
)
def test_against_the_plain_twin(
    dtype: torch.dtype, limit: float | None, weighs_input: bool, device: torch.device
) -> None:
    matrices = case(device, dtype, bias=limit is not None)
    x, residual = random(device, 70, 40, dtype=dtype), random(device, 70, 40, dtype=dtype, seed=3)
    logits = random(device, 70, 5, seed=4)
    logits[:, 1] = -50  # an expert that no row chose
    routing = route(Routing(5, 2), logits)
    activation = "silu" if limit is None else "quick_gelu"
    parts = [
        [(weight, None if bias is None else bias[e]) for e, weight in enumerate(each.codes)]
        for each, bias in ((matrices.gate_up, matrices.gate_up_bias), (matrices.down, matrices.down_bias))
    ]
    expected = plain(matrices, x, routing, ExpertWeights(*parts, Gating(activation, limit), weighs_input))
    actual = apply_experts(matrices, x, routing, residual, activation, limit, weighs_input)
    assert actual.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(actual.float(), expected + residual.float(), rtol=tolerance, atol=tolerance)
    for first, last in ((3, 4), (10, 30)):
        rows = slice(first, last)
        part = apply_experts(matrices, x[rows], routing[rows], residual[rows], activation, limit, weighs_input)
        assert torch.equal(part, actual[rows]), "a row has the same bits whatever else is computed"
    few = apply_experts(
        matrices, x[:20], routing[:20], residual[:20], activation, limit, weighs_input, batch_invariant=False
    )
    torch.testing.assert_close(few.float(), (expected + residual.float())[:20], rtol=tolerance, atol=tolerance)


def test_no_rows(device: torch.device) -> None:
    x, routing = random(device, 0, 40), torch.zeros(0, 4, device=device)
    assert apply_experts(case(device, torch.float32, bias=False), x, routing, None, "silu", None, False).shape == (
        0,
        40,
    )
