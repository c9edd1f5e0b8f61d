"""Grouped products of experts against their plain twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels.arguments import ExpertWeights, Gating, Routing
from quire.kernels.experts import experts, route
from quire.kernels.triton.adapters import AdapterMatrices
from quire.kernels.triton.experts import (
    MANY_TILES,
    ExpertAdapterMatrices,
    ExpertMatrices,
    ExpertPlan,
    ExpertProducts,
    apply_experts,
    expert_tiles,
)
from quire.kernels.triton.runtime import has_hopper_memory
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


@pytest.mark.parametrize(("limit", "weighs_input", "top_k"), [(None, False, 2), (0.7, True, 2), (None, True, 1)])
def test_adapters_by_slot_and_expert(limit: float | None, weighs_input: bool, top_k: int, device: torch.device) -> None:
    """Against the plain twin of matrices that have an adapter merged; rows without one keep their bits."""
    num_slots, max_rank, num_experts = 2, 16, 5
    matrices = case(device, torch.float32, bias=True)
    wide = AdapterMatrices.empty(num_slots * num_experts, max_rank, 40, [(0, 24), (24, 24)], torch.float32, device)
    down = AdapterMatrices.empty(num_slots * num_experts, max_rank, 24, [(0, 40)], torch.float32, device)
    merged = [[each.codes.clone() for each in (matrices.gate_up, matrices.down)] for _ in range(num_slots + 1)]
    for slot, expert, part, rank in (
        (1, 0, 0, 3),
        (1, 0, 1, 16),
        (1, 2, 2, 5),
        (2, 2, 1, 2),
        (2, 3, 2, 16),
        (2, 4, 0, 1),
    ):
        outputs, inputs = ((24, 40), (24, 40), (40, 24))[part]
        a, b = (random(device, rank, each, seed=10 * slot + expert) * 0.3 for each in (inputs, outputs))
        own, piece = (down, 0) if part == 2 else (wide, part)
        own.store((slot - 1) * num_experts + expert + 1, piece, int(own.places[piece, 2]), a, b, 0.5)
        rows = slice(24 * piece, 24 * piece + outputs) if part < 2 else slice(None)
        merged[slot][part // 2][expert, rows] += 0.5 * b.T @ a
    x, residual = random(device, 70, 40), random(device, 70, 40, seed=3)
    routing = route(Routing(num_experts, top_k, renormalise=top_k > 1), random(device, 70, num_experts, seed=4))
    slots = torch.randint(0, 3, (70,), generator=torch.Generator().manual_seed(1)).to(device)
    gated = "silu" if limit is None else "quick_gelu", limit, weighs_input
    adapters = ExpertAdapterMatrices(wide, down, slots, num_slots)
    found = apply_experts(replace(matrices, adapters=adapters), x, routing, residual, *gated)
    for slot, (gate_up_codes, down_codes) in enumerate(merged):
        gate_up, of_down = StoredMatrix.plain(gate_up_codes), StoredMatrix.plain(down_codes)
        whole = ExpertMatrices(gate_up, of_down, matrices.gate_up_bias, matrices.down_bias)
        wanted, own = apply_experts(whole, x, routing, residual, *gated), slots == slot
        torch.testing.assert_close(found[own], wanted[own], rtol=1e-5, atol=1e-5)
        assert torch.equal(found[own], wanted[own]) == (slot == 0)
    for row in (3, 40):
        alone = ExpertAdapterMatrices(wide, down, slots[row : row + 1], num_slots)
        part_of = [each[row : row + 1] for each in (x, routing, residual)]
        assert torch.equal(apply_experts(replace(matrices, adapters=alone), *part_of, *gated)[0], found[row])


def test_a_prompt_whose_experts_have_uneven_loads(device: torch.device) -> None:
    """Against float64. Every row chooses expert 3, one of them expert 0, the others expert 4; two have no rows."""
    matrices, num_rows = case(device, torch.bfloat16, bias=True), 140
    x, residual = (random(device, num_rows, 40, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    chosen = torch.tensor([3, 4], device=device).repeat(num_rows, 1)
    chosen[7] = torch.tensor([0, 3])
    shares = random(device, num_rows, 2, seed=5).abs()
    expected = residual.double()
    for experts_of_rows, share in zip(chosen.T, shares.double().T.unsqueeze(2), strict=True):
        gate, up = in_float64(matrices.gate_up, matrices.gate_up_bias, experts_of_rows, x).chunk(2, 1)
        inner = torch.nn.functional.silu(gate) * up
        expected += in_float64(matrices.down, matrices.down_bias, experts_of_rows, inner) * share
    rows = x, torch.cat((chosen.float(), shares), 1), residual
    for _, plan in MANY_TILES:
        result = ExpertProducts(matrices, plan, "silu", None, False).apply(*rows)
        assert (result.double() - expected).norm() < 4e-3 * expected.norm()
        order = replace(plan, together=0 if plan.together else 3)
        again = ExpertProducts(matrices, order, "silu", None, False).apply(*rows)
        assert torch.equal(again, result), "programs in another order"


def in_float64(
    matrix: StoredMatrix, bias: torch.Tensor | None, experts_of_rows: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Each row times its expert's matrix."""
    assert bias is not None
    weights = matrix.codes.double()[experts_of_rows]
    return torch.einsum("rnk,rk->rn", weights, x.double()) + bias.double()[experts_of_rows]


def test_tiles_of_prompts(device: torch.device) -> None:
    """They change with the number of rows only where bits may."""
    matrices = case(device, torch.bfloat16, bias=False)

    def tiles(pairs: float, *, batch_invariant: bool = True, dtype: torch.dtype = torch.bfloat16) -> ExpertPlan:
        return expert_tiles(matrices, dtype, pairs, device, batch_invariant=batch_invariant)

    assert tiles(0.1) == tiles(30) == tiles(1e6)
    assert not tiles(1e6).narrows
    for least, plan in MANY_TILES if has_hopper_memory(device) else ():
        assert tiles(least, batch_invariant=False) == plan
    assert tiles(1e6, batch_invariant=False, dtype=torch.float32) == tiles(1e6, dtype=torch.float32)


def test_no_rows(device: torch.device) -> None:
    x, routing = random(device, 0, 40), torch.zeros(0, 4, device=device)
    assert apply_experts(case(device, torch.float32, bias=False), x, routing, None, "silu", None, False).shape == (
        0,
        40,
    )
