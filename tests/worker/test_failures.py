"""Non-finite logits, and what happens after any failure."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from quire.errors import InsufficientMemoryError, QuireError
from quire.executors.local import LocalExecutor
from quire.layers.batch import ForwardBatch, ForwardResult
from quire.sampling_params import SamplingParams
from tests.worker.conftest import MakeDriver
from tests.worker.driver import Driver, sampling_of

SpoilLogits = Callable[[Driver, int], None]


@pytest.fixture
def spoil_logits(executors: list[LocalExecutor], monkeypatch: pytest.MonkeyPatch) -> SpoilLogits:
    """Make the logits NaN wherever the model reads the given token."""

    def apply(driver: Driver, token: int) -> None:
        model = executors[-1]._worker._model
        forward = model.forward

        def broken(batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
            result = forward(batch)
            token_ids = batch.token_ids if batch.logits_rows is None else batch.token_ids[batch.logits_rows]
            result.hidden[token_ids == token] = math.nan
            return result

        monkeypatch.setattr(model, "forward", broken)

    return apply


@pytest.mark.parametrize("params", [{"temperature": 0}, {"logprobs": 2, "top_p": 0.9, "seed": 4}], ids=str)
def test_nonfinite_logits_name_the_sequence(make_driver: MakeDriver, spoil_logits: SpoilLogits, params: dict) -> None:
    prompts = {70: [1, 2, 3], 71: [4, 50], 72: [50, 6], 73: [7, 8, 50]}
    sampling = sampling_of(SamplingParams(**params))
    results = []
    for is_nonfinite in (False, True):
        driver = make_driver()
        if is_nonfinite:
            spoil_logits(driver, 50)
        for seq_id, prompt in prompts.items():
            driver.add(seq_id, prompt, sampling)
        results.append(driver.step({72: 2, 71: 2, 70: 3, 73: 3}))
    sound, found = results
    assert found.nonfinite == [71, 73]
    assert sound.nonfinite == []
    # The others get what they get without it.
    assert [found.token_ids[index] for index in (0, 2)] == [sound.token_ids[index] for index in (0, 2)]
    assert found.logprobs == {index: entry for index, entry in sound.logprobs.items() if index in (0, 2)}


def test_a_nonfinite_sequence_has_a_token_that_exists(make_driver: MakeDriver, spoil_logits: SpoilLogits) -> None:
    """A plan that is in flight already computes it."""
    driver = make_driver(queue_depth=2)
    spoil_logits(driver, 50)
    driver.add(1, [50])
    driver.submit({1: 1})
    driver.submit({1: 1})
    results = [driver.apply(), driver.apply()]
    assert results[0].nonfinite == [1]
    assert 0 <= results[0].token_ids[0][0] < 50


def test_nonfinite_prompt_logits_name_the_sequence(
    make_driver: MakeDriver, spoil_logits: SpoilLogits, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make_driver()
    spoil_logits(driver, 50)
    driver.add(70, [1, 2, 3], sampling_of(SamplingParams(prompt_logprobs=0)))
    driver.add(72, [50, 6], sampling_of(SamplingParams(prompt_logprobs=0)))
    result = driver.step({70: 3, 72: 2})
    assert result.nonfinite == [72]
    assert list(result.prompt_logprobs) == [70]
    assert "NaN or infinite logits for sequence 72;" in caplog.text


def test_a_prompt_with_nonfinite_logits_is_named_once(make_driver: MakeDriver, spoil_logits: SpoilLogits) -> None:
    driver = make_driver()
    spoil_logits(driver, 50)
    sampling = sampling_of(SamplingParams(prompt_logprobs=0, max_tokens=3))
    driver.add(71, [50, 1, 6], sampling)
    driver.add(70, [1, 2, 3], sampling)
    driver.add(72, [50, 6], sampling)
    result = driver.step({71: 3, 70: 3, 72: 2})
    assert result.nonfinite == [71, 72]
    assert list(result.prompt_logprobs) == [70]


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_nothing_runs_after_a_failure(
    make_driver: MakeDriver,
    executors: list[LocalExecutor],
    monkeypatch: pytest.MonkeyPatch,
    queue_depth: int,
) -> None:
    """The next plan may be in flight already; it must not run over rows that lack a token."""
    driver = make_driver(queue_depth=queue_depth)

    def broken(*_args: object) -> torch.Tensor:
        raise QuireError("the device is gone")

    monkeypatch.setattr(executors[-1]._worker._model, "forward", broken)
    driver.add(1, [50])
    driver.submit({1: 1})
    driver.submit({1: 1})
    with pytest.raises(QuireError, match="the device is gone"):
        driver.apply()
    with pytest.raises(QuireError, match="step 1 was not run, because an earlier step failed"):
        driver.apply()


def test_a_pool_that_the_system_refuses(make_driver: MakeDriver) -> None:
    with pytest.raises(InsufficientMemoryError, match="refuses to reserve"):
        make_driver(num_blocks=2**45)
