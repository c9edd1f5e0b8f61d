"""Steps that are enqueued one behind another: the copy of one runs beside the kernels of the one before, and nothing
reads a buffer that is being filled, nor fills one that is being read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.executors.local import LocalExecutor
from quire.sampling_params import SamplingParams
from quire.step import SequenceFork, StepPlan, StepResult
from tests.fakes import host_math
from tests.fakes.stream_order import CheckedStreams
from tests.worker.driver import Driver, sampling_of
from tests.worker.platform.conftest import MakeDriver

SAMPLED = sampling_of(SamplingParams(temperature=0.8, top_k=5), seed=3)
MakeChecked = Callable[[], tuple[Driver, CheckedStreams]]


@pytest.fixture
def make_checked(
    make_driver: MakeDriver, executors: list[LocalExecutor], monkeypatch: pytest.MonkeyPatch
) -> MakeChecked:
    """A driver over an executor with checked streams, whose plans count every access to the buffers of uploads."""

    def make() -> tuple[Driver, CheckedStreams]:
        streams = CheckedStreams()
        monkeypatch.setattr(host_math, "LateStreams", lambda: streams)
        make_driver(block_size=4, num_blocks=40, queue_depth=2)
        executor = executors[-1]
        upload = executor._worker._runner._compute.upload

        def execute(plan: StepPlan) -> object:
            with streams.checked():
                streams.watched = {buffer.untyped_storage().data_ptr() for buffer in upload._devices}
                return executor.execute(plan)

        return Driver(execute, block_size=4, num_blocks=40), streams

    return make


def run(driver: Driver) -> list[StepResult]:
    """Prompts, a fork with copies of blocks, and decodes, each enqueued before the one before was collected."""
    driver.add(0, [5, 9, 2, 8, 1])
    driver.add(1, [7, 7], SAMPLED)
    driver.submit({0: 5, 1: 2}, [SequenceFork(0, 2, SAMPLED)])
    results = []
    for _ in range(4):
        driver.submit({0: 1, 1: 1, 2: 1})
        results.append(driver.apply())
    results.append(driver.apply())
    return results


def test_kernels_and_copies_of_other_steps_do_not_meet(make_checked: MakeChecked) -> None:
    driver, streams = make_checked()
    run(driver)
    assert streams.races == []
    assert streams.num_accesses > 5 * 6, "prepare, the samples' columns, the sampler and the writes were seen"
    assert streams.overlaps >= 4, "the copy of each later step may run before the kernels of the step before have ended"
    assert streams.host_waits == 2, "two of the three host buffers are filled again, behind events"


@pytest.mark.parametrize(
    ("lost", "shows"),
    [
        (("compute", "copy in"), "prepare"),  # kernels that do not wait for their inputs
        (("copy in", "compute"), "copy_"),  # a copy into a buffer that kernels still read
    ],
)
def test_an_event_that_is_left_out_is_a_race(make_checked: MakeChecked, lost: tuple[str, str], shows: str) -> None:
    driver, streams = make_checked()
    streams.lost.add(lost)
    run(driver)
    assert any(shows in race for race in streams.races)
