"""Queue depth 2: plans are made before the tokens of the step before them are known."""

from __future__ import annotations

import pytest

from quire.sampling_params import SamplingParams
from tests.worker.conftest import ON_A_CPU, MakeDriver
from tests.worker.driver import Driver, sampling_of

PROMPTS = [[5, 9, 2], list(range(1, 30)), [7, 7]]
SAMPLING = [
    sampling_of(SamplingParams(temperature=0)),
    sampling_of(SamplingParams(temperature=1.2, top_k=30, frequency_penalty=1.0), seed=5),
    sampling_of(SamplingParams(temperature=0, logprobs=1, presence_penalty=0.3)),
]
NUM_STEPS = 12


def run_ahead(driver: Driver, num_steps: int) -> None:
    """One plan is always in flight while the next one is submitted."""
    for step in range(num_steps):
        driver.submit({s: sequence.length - sequence.computed for s, sequence in driver.sequences.items()})
        if step > 0:
            driver.apply()
    driver.apply()


def start(driver: Driver) -> Driver:
    for seq_id, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
        driver.add(seq_id, prompt, sampling)
    return driver


@ON_A_CPU
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_same_tokens_as_step_by_step(make_driver: MakeDriver, queue_depth: int) -> None:
    ahead, steady = start(make_driver(queue_depth=queue_depth)), start(make_driver())
    run_ahead(ahead, NUM_STEPS)
    steady.decode(NUM_STEPS)
    for seq_id in range(3):
        assert ahead.sequences[seq_id].output == steady.sequences[seq_id].output
        assert ahead.sequences[seq_id].logprobs == steady.sequences[seq_id].logprobs


def test_a_sequence_that_is_run_once_too_often(make_driver: MakeDriver) -> None:
    """Its last plan is already in flight when its end is noticed; row and blocks go to a newcomer right after."""
    driver, steady = make_driver(queue_depth=2, max_num_seqs=2, num_blocks=5), make_driver()
    driver.add(0, PROMPTS[0])
    driver.add(1, PROMPTS[2])
    driver.submit({0: 3, 1: 2})
    driver.submit({0: 1, 1: 1})
    driver.apply()
    driver.release(0)
    driver.add(2, PROMPTS[1])
    driver.submit({2: 29, 1: 1})
    driver.apply()
    driver.submit({2: 1, 1: 1})
    driver.apply()
    driver.apply()
    steady.add(1, PROMPTS[2])
    steady.add(2, PROMPTS[1])
    steady.decode(4, [1])
    steady.decode(2, [2])
    for seq_id in (1, 2):
        assert driver.sequences[seq_id].output == steady.sequences[seq_id].output


def test_the_last_position_of_the_context_can_be_overrun(make_driver: MakeDriver) -> None:
    driver = make_driver(queue_depth=2, max_model_len=20, block_size=4)
    driver.add(0, list(range(1, 20)))
    driver.submit({0: 19})
    driver.submit({0: 1})
    first, second = driver.apply(), driver.apply()
    assert len(driver.sequences[0].tokens) == 21
    assert len(first.token_ids) == len(second.token_ids) == 1


def test_preempted_while_its_last_plan_runs(make_driver: MakeDriver) -> None:
    driver, steady = start(make_driver(queue_depth=2)), start(make_driver())
    driver.submit({0: 3, 1: 29, 2: 2})
    driver.submit({0: 1, 1: 1, 2: 1})
    driver.apply()
    in_flight = driver.sequences[1]
    driver.release(1)
    driver.submit({0: 1, 2: 1})
    (late_token,) = driver.apply().token_ids[1]
    driver.add(1, PROMPTS[1], SAMPLING[1], [*in_flight.output, late_token])
    driver.submit({0: 1, 1: 31, 2: 1})
    driver.apply()
    driver.apply()
    steady.decode(3)
    assert driver.sequences[1].output == steady.sequences[1].output
