"""The choice of experts and the order of pairs against their plain twins."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import experts
from quire.kernels.arguments import Routing
from quire.kernels.triton.routing import gate_rows, route, sort_by_expert
from tests.kernels.triton.helpers import random

ROUTINGS = {
    "softmax": Routing(60, 4),
    "softmax of all": Routing(8, 2, renormalise=False, factor=2.5),
    "sigmoid": Routing(32, 1, "sigmoid", renormalise=False),
    "groups": Routing(40, 6, num_groups=4, top_groups=2, renormalise=False, factor=16.0),
    "groups and bias": Routing(
        32,
        8,
        "sigmoid",
        factor=2.5,
        bias=torch.linspace(-0.4, 0.4, 32).roll(5),
        num_groups=8,
        top_groups=4,
        group_best=2,
    ),
    "all": Routing(3, 3),
}


def on(device: torch.device, routing: Routing) -> Routing:
    fields = {name: getattr(routing, name) for name in Routing.__slots__}
    return Routing(**fields | {"bias": None if routing.bias is None else routing.bias.to(device)})


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choice(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """In bfloat16 many logits are equal: the lower number is chosen."""
    routing = ROUTINGS[name]
    logits = random(device, 37, 2 * routing.num_experts, dtype=dtype)[:, : routing.num_experts]
    expected = experts.route(routing, logits.cpu())
    actual = route(on(device, routing), logits)
    assert torch.equal(actual[:, : routing.top_k].cpu(), expected[:, : routing.top_k])
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-6)
    for first, last in ((3, 4), (10, 30)):
        assert torch.equal(route(on(device, routing), logits[first:last]), actual[first:last])


@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_of_padding_choose_experts_that_exist(name: str, device: torch.device) -> None:
    routing = ROUTINGS[name]
    logits = random(device, 6, routing.num_experts)
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        logits[row] = value
    logits[3, ::2] = float("nan")
    chosen = route(on(device, routing), logits)[:, : routing.top_k].long()
    assert (chosen.diff(dim=1) > 0).all()
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < routing.num_experts


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k", "block_m"),
    [(1, 128, 8, 16), (700, 6, 3, 64), (50, 6, 3, 16), (4300, 7, 2, 128)],
)
def test_tiles_belong_to_one_expert_each(
    num_rows: int, num_experts: int, top_k: int, block_m: int, device: torch.device
) -> None:
    logits = random(device, num_rows, num_experts)
    logits[:, 1] = -50.0  # an expert that no row chose
    routing = route(Routing(num_experts, top_k), logits)
    order = sort_by_expert(routing, num_experts, block_m)
    chosen, ordered = routing[:, :top_k].flatten().cpu().long().sort(stable=True)
    assert torch.equal(order.pairs.cpu().long(), ordered)
    expected = []
    for expert in range(num_experts):
        places = (chosen == expert).nonzero().flatten().tolist()
        expected += [[expert, first, places[-1] + 1] for first in places[::block_m]]
    tiles = order.tiles.tolist()
    assert tiles[: len(expected)] == expected
    assert all(tile[0] == -1 for tile in tiles[len(expected) :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_rows(dtype: torch.dtype, device: torch.device) -> None:
    x, gate = random(device, 9, 1100, dtype=dtype), random(device, 9, 2, dtype=dtype)[:, :1]
    torch.testing.assert_close(gate_rows(x, gate), experts.gate_rows(x, gate))


def test_no_rows(device: torch.device) -> None:
    assert route(Routing(8, 2), torch.zeros(0, 8, device=device)).shape == (0, 4)
    assert gate_rows(torch.zeros(0, 8, device=device), torch.zeros(0, 1, device=device)).shape == (0, 8)
