"""Observers of a core see enough of a run to repeat it on another executor."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine.messages import Call
from quire.engine.observer import CoreObserver, StepEnd
from quire.executors.interface import StepFuture
from quire.kv_cache.layout import KVCacheLayout
from quire.step import SamplingInputs, StepPlan
from tests.fakes.core import CoreClient, make_config
from tests.fakes.masks import MaskingExecutor


class Recorder(CoreObserver):
    """Keeps every event in its order, encoded at once: what changes later is not what was observed."""

    def __init__(self) -> None:
        self.events: list[bytes | str] = []
        self.results: dict[int, bytes] = {}
        self.layout: KVCacheLayout | None = None
        self.backend = ""

    def allocated(self, layout: KVCacheLayout, backend: str) -> None:
        assert not self.events
        self.layout, self.backend = layout, backend

    def executes(self, plan: StepPlan) -> StepEnd:
        self.events.append(b"p" + msgspec.msgpack.encode(plan))

        def note(future: StepFuture) -> None:
            self.results[plan.step_id] = msgspec.msgpack.encode(future.result())

        return note

    def sends(self, inputs: SamplingInputs) -> None:
        self.events.append(b"i" + msgspec.msgpack.encode(inputs))

    def calls(self, call: Call) -> None:
        self.events.append(f"call {call.method}")

    def ends(self) -> None:
        self.events.append("end")

    def replay(self, executor: MaskingExecutor) -> dict[int, bytes]:
        """The results of the recorded plans on a fresh executor."""
        assert self.layout is not None
        executor.load_model()
        executor.allocate(self.layout)
        futures: dict[int, StepFuture] = {}
        for event in self.events:
            if isinstance(event, str):
                continue
            if event[:1] == b"p":
                plan = msgspec.msgpack.decode(event[1:], type=StepPlan)
                futures[plan.step_id] = executor.execute(plan)
            else:
                executor.send_sampling_inputs(msgspec.msgpack.decode(event[1:], type=SamplingInputs))
        return {step_id: msgspec.msgpack.encode(future.result()) for step_id, future in futures.items()}


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_recorded_run_is_repeated(queue_depth: int) -> None:
    config, recorder = make_config(num_blocks=14, queue_depth=queue_depth), Recorder()
    executor = MaskingExecutor(windows=config.model.sliding_windows)
    client = CoreClient(config, executor, observers=[CoreObserver(), recorder])
    for number in range(5):  # more than the blocks hold at once
        constraint = {"constraint": "5"} if number % 2 else {}
        client.add(f"request-{number}", list(range(3 + 5 * number)), n=1 + number % 3, max_tokens=9, **constraint)
    client.run()
    client.core.handle(Call(7, "reset_prefix_cache"))
    client.core.shutdown()
    client.core.shutdown()  # idempotent: observers end once
    assert client.core.stats().preemptions_total > 0
    assert recorder.backend == "fake executor"
    assert recorder.events[-2:] == ["call reset_prefix_cache", "end"]
    assert any(event[:1] == b"i" for event in recorder.events), "masks were sent"
    assert recorder.replay(MaskingExecutor(windows=config.model.sliding_windows)) == recorder.results


def test_an_observer_sees_the_end_of_a_failed_plan() -> None:
    class Failures(CoreObserver):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def executes(self, plan: StepPlan) -> StepEnd:
            return lambda future: self.seen.append(str(future.exception()))

    config, failures = make_config(), Failures()
    client = CoreClient(config, MaskingExecutor(fail_at_step=1), observers=[failures])
    client.add("request", [1, 2, 3])
    with pytest.raises(RuntimeError, match="injected"):
        client.run()
    assert failures.seen[0] == "None"
    assert "injected" in failures.seen[1]
