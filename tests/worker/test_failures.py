"""Damaged logits, and what happens after any failure."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from quire.errors import InsufficientMemoryError, QuireError
from quire.executors.inprocess import InProcessExecutor
from quire.sampling_params import SamplingParams
from tests.worker.conftest import MakeDriver
from tests.worker.driver import Driver, sampling_of

Damage = Callable[[Driver, int], None]


@pytest.fixture
def damage(executors: list[InProcessExecutor], monkeypatch: pytest.MonkeyPatch) -> Damage:
    """Make the logits NaN wherever the model reads the given token."""

    def apply(driver: Driver, token: int) -> None:
        model = executors[-1]._worker._model
        forward = model.forward

        def broken(token_ids: torch.Tensor, *args: object) -> torch.Tensor:
            hidden = forward(token_ids, *args)
            hidden[token_ids == token] = math.nan
            return hidden

        monkeypatch.setattr(model, "forward", broken)

    return apply


def test_damaged_logits_name_the_sequence(make_driver: MakeDriver, damage: Damage) -> None:
    driver = make_driver()
    damage(driver, 50)
    driver.add(70, [1, 2, 3])
    driver.add(71, [4, 50])
    driver.add(72, [50, 6])
    with pytest.raises(QuireError, match=r"NaN or infinite logits for sequence 71;"):
        driver.step({72: 2, 71: 2, 70: 3})


def test_damaged_prompt_logits_name_the_sequence(make_driver: MakeDriver, damage: Damage) -> None:
    driver = make_driver()
    damage(driver, 50)
    driver.add(70, [1, 2, 3])
    driver.add(72, [50, 6], sampling_of(SamplingParams(prompt_logprobs=0)))
    with pytest.raises(QuireError, match=r"NaN or infinite logits for sequence 72;"):
        driver.step({70: 3, 72: 2})


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_nothing_runs_after_a_failure(make_driver: MakeDriver, damage: Damage, queue_depth: int) -> None:
    """The next plan may be in flight already; it must not run over rows that lack a token."""
    driver = make_driver(queue_depth=queue_depth)
    damage(driver, 50)
    driver.add(1, [50])
    driver.submit({1: 1})
    driver.submit({1: 1})
    with pytest.raises(QuireError, match="NaN"):
        driver.apply()
    with pytest.raises(QuireError, match="step 1 was not run, because an earlier step failed"):
        driver.apply()


def test_a_pool_that_the_system_refuses(make_driver: MakeDriver) -> None:
    with pytest.raises(InsufficientMemoryError, match="refuses to reserve"):
        make_driver(num_blocks=2**45)
