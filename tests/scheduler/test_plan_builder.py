"""Plans of steady sequences are built the short way, and leave nothing out."""

from __future__ import annotations

from typing import Any

import pytest

from quire.decoding.parallel import create_sequences
from quire.decoding.sequence import Request
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.scheduler.plan_builder import PlanBuilder, PlanChanges
from quire.step import HostTransfers, StepPlan

WITH_A_DECISION = {
    "appended", "block_copies", "drafts", "forks", "new_blocks", "num_drafts", "num_tokens", "pooled",
    "replaced_blocks", "sample_from", "start_positions", "step_id",
}  # fmt: skip
"""What every plan has, and what comes with a sequence that `place_steady` does not take."""


def steady_plan(**parts: Any) -> StepPlan:
    source = EngineRequest(request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(), max_tokens=9, seed=0)
    request = Request(source, 0.0)
    create_sequences(request, source, iter(range(9)))
    request.sequences[0].fast_path_until = 5
    builder, changes = PlanBuilder(3, 10), PlanChanges()
    assert builder.place_steady(request.sequences, 0) == 1
    for name, value in parts.items():
        setattr(changes if hasattr(changes, name) else builder, name, value)
    return builder.build(changes)


def test_rows() -> None:
    assert steady_plan() == StepPlan(3, [0], [0], [1], [0], [0])


@pytest.mark.parametrize(
    "name", sorted({*vars(PlanBuilder(0, 0)), "released"}.intersection(StepPlan.__struct_fields__) - WITH_A_DECISION)
)
def test_what_else_a_plan_orders(name: str) -> None:
    ordered: Any = HostTransfers(swap_in=[(1, 2)])
    if isinstance(getattr(steady_plan(), name), list):
        ordered = [7]
    given = {7: 7} if name == "new_sequences" else ordered
    assert getattr(steady_plan(**{name: given}), name) == ordered


@pytest.mark.parametrize("name", ["swap_in", "swap_out"])
def test_swaps(name: str) -> None:
    transfers = steady_plan(**{name: [(1, 2)]}).transfers
    assert isinstance(transfers, HostTransfers)
    assert getattr(transfers, name) == [(1, 2)]
