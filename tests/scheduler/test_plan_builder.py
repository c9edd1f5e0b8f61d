"""Plans of steady sequences, and what else a plan orders."""

from __future__ import annotations

from typing import Any

import pytest

from quire.decoding.parallel import create_sequences
from quire.decoding.sequence import Request
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.scheduler.plan_builder import PlanBuilder, PlanChanges
from quire.step import HostTransfers, StepPlan


def steady_plan(changes: PlanChanges | None = None, **parts: Any) -> StepPlan:
    source = EngineRequest(request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(), max_tokens=9, seed=0)
    request = Request(source, 0.0)
    create_sequences(request, source, iter(range(9)))
    request.sequences[0].fast_path_until = 5
    builder = PlanBuilder(3, 10)
    assert builder.place_steady(request.sequences, 0) == 1
    for name, value in parts.items():
        setattr(builder, name, value)
    return builder.build(changes or PlanChanges())


def test_rows() -> None:
    assert steady_plan() == StepPlan(3, [0], [0], [1], [0], [0])


def test_changes_are_carried_once() -> None:
    changes = PlanChanges()
    changes.released, changes.trimmed = [7], {8: [1]}
    plan = steady_plan(changes)
    assert (plan.released, plan.trimmed_tables) == ([7], {8: [1]})
    assert steady_plan(changes) == steady_plan()


@pytest.mark.parametrize("name", ["swap_in", "swap_out"])
def test_swaps(name: str) -> None:
    transfers = steady_plan(**{name: [(1, 2)]}).transfers
    assert isinstance(transfers, HostTransfers)
    assert getattr(transfers, name) == [(1, 2)]
