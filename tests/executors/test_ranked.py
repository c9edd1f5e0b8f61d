"""Several ranks as one executor: how their answers become one, and what crosses the sockets."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import EngineDeadError, InsufficientMemoryError, QuireError
from quire.executors import wire
from quire.executors.calls import PendingCall
from quire.executors.rank import NOTHING, RankAnswer, RankError
from quire.executors.ranked import RankedExecutor
from quire.executors.wire import decode, encode
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.sizing import DeviceShare, MemoryProfile
from quire.kv_cache.spec import AttentionSpec, ChunkedSpec, LatentSpec, LayerSpec, SlidingWindowSpec, StateSpec
from quire.scheduler.preemption import PreemptionCosts
from quire.step import StepPlan, StepResult, StoreReport

PLAN = StepPlan(4, [], [], [], [], [])


class FakeWorkers:
    """Answers as it is told. calls: what was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[Any, ...]] = []
        self.death: EngineDeadError | None = None

    def call(self, method: str, *arguments: Any) -> list[Any]:
        self.calls.append((method, *arguments))
        return self.answers

    def execute(self, plan: StepPlan) -> Future[list[StepResult]]:
        self.calls.append(("execute", plan))
        future: Future[list[StepResult]] = Future()
        future.set_result(self.answers)
        return future

    def check(self) -> None:
        if self.death is not None:
            raise self.death

    def close(self) -> None:
        self.calls.append(("close",))


def test_the_ranks_keep_the_same_in_the_cache() -> None:
    specs = [AttentionSpec(2, 8, 8, 4), SlidingWindowSpec(2, 8, 8, 4, window=5)]
    assert RankedExecutor(FakeWorkers(specs, list(specs))).load_model() == specs
    with pytest.raises(QuireError, match="the ranks disagree on what the layers keep"):
        RankedExecutor(FakeWorkers(specs, [AttentionSpec(1, 8, 8, 4), specs[1]])).load_model()


def test_the_host_has_the_memory_once() -> None:
    first, second = MemoryProfile(available=1000, activations=70, weights=300), MemoryProfile(900, 80, 290)
    profile = RankedExecutor(workers := FakeWorkers(first, second)).profile(128, 16)
    assert profile == MemoryProfile(available=450, activations=80, weights=300)
    assert workers.calls == [("profile", 128, 16)]


def test_a_device_is_a_ranks_own_and_the_hosts_memory_is_not() -> None:
    first = MemoryProfile(1000, 70, 300, DeviceShare(total=8000, used=500, graphs=10, tables=5, host_available=600))
    second = MemoryProfile(900, 80, 290, DeviceShare(total=7000, used=400, graphs=20, tables=6, host_available=700))
    share = DeviceShare(total=7000, used=500, graphs=20, tables=6, host_available=300)
    profile = RankedExecutor(FakeWorkers(first, second)).profile(128, 16)
    assert profile == MemoryProfile(available=900, activations=80, weights=300, device=share)


def test_the_slowest_rank_sets_the_costs() -> None:
    costs = RankedExecutor(FakeWorkers(PreemptionCosts(3.0, 1.0), PreemptionCosts(2.0, 5.0))).measure_preemption_costs()
    assert costs == PreemptionCosts(3.0, 5.0)


def test_the_first_ranks_result_counts() -> None:
    first = StepResult(4, [7, 8], nonfinite=[3])
    assert RankedExecutor(FakeWorkers(first, StepResult(4, [7, 8]))).execute(PLAN).result() is first


def test_a_failure_of_any_rank_is_reported() -> None:
    results = StepResult(4, [7, 8], nonfinite=[9, 3]), StepResult(4, [7, 8], nonfinite=[3, 5])
    assert RankedExecutor(FakeWorkers(*results)).execute(PLAN).result().nonfinite == [3, 5, 9]


def reported(executor: RankedExecutor, *reports: StoreReport | None) -> StoreReport | None:
    executor._workers.answers = [StepResult(4, [], transfers=report) for report in reports]  # type: ignore[attr-defined]
    return executor.execute(PLAN).result().transfers


def test_a_transfer_has_ended_when_it_has_on_every_rank() -> None:
    executor = RankedExecutor(FakeWorkers())
    one, other = (0, b"one"), (1, b"other")
    assert reported(executor, None, None) is None
    both = StoreReport(found=[one], loaded=[4], released=[8], num_stored=1, num_bytes=10, is_scanning=True)
    slow = StoreReport(found=[other], failed=[5], num_store_failures=1, load_seconds=0.5)
    early = reported(executor, both, slow)
    assert early == StoreReport(num_stored=1, num_store_failures=1, num_bytes=10, load_seconds=0.5, is_scanning=True)
    late = StoreReport(found=[one], loaded=[4], released=[8], num_stored=1, num_bytes=30, token_seconds=0.2)
    found = reported(executor, StoreReport(found=[other], loaded=[5], num_bytes=20), late)
    assert found == StoreReport(
        found=[other, one], loaded=[4], failed=[5], released=[8], num_stored=1, num_bytes=30, token_seconds=0.2
    )


def test_a_block_that_is_gone_from_one_rank_is_gone() -> None:
    executor, key = RankedExecutor(FakeWorkers()), (0, b"key")
    held, gone = StoreReport(found=[key]), StoreReport(gone=[key])
    assert reported(executor, held, held) == held
    assert reported(executor, None, gone) == gone
    assert reported(executor, None, gone) == StoreReport()  # the engine knows it
    assert reported(executor, gone, held) == StoreReport()
    assert reported(executor, held, None) == held


def test_ranks_that_compute_other_vectors_fail_the_step() -> None:
    first, same = StepResult(4, [[]], pooled={0: [0.5, 1.0]}, checksum=7), StepResult(4, [], checksum=7)
    assert RankedExecutor(FakeWorkers(first, same)).execute(PLAN).result() is first
    future = RankedExecutor(FakeWorkers(first, StepResult(4, [], checksum=8))).execute(PLAN)
    with pytest.raises(QuireError, match="ranks 0 and 1 disagree on the pooled vectors of step 4"):
        future.result()


@pytest.mark.parametrize("other", [StepResult(4, [], checksum=2), StepResult(5, [], checksum=1)])
def test_ranks_that_disagree_fail_the_step(other: StepResult) -> None:
    first, second = StepResult(4, [[7], [8]], checksum=1), StepResult(4, [], checksum=1)
    future = RankedExecutor(FakeWorkers(first, second, other)).execute(PLAN)
    with pytest.raises(QuireError, match="ranks 0 and 2 disagree on the tokens of step 4"):
        future.result()


def test_every_call_goes_to_the_ranks() -> None:
    executor = RankedExecutor(workers := FakeWorkers("plain torch", "plain torch"))
    assert executor.describe_backend() == "plain torch, on each of 2 ranks"
    executor.sleep(2)
    executor.wake_weights()
    executor.wake_up()
    executor.shutdown()
    assert workers.calls == [("describe_backend",), ("sleep", 2), ("wake_weights",), ("wake_up",), ("close",)]


def test_an_idle_engine_notices_the_end_of_a_rank() -> None:
    executor = RankedExecutor(workers := FakeWorkers())
    assert not executor.idle()
    workers.death = EngineDeadError("rank 1 of 2 was killed")
    with pytest.raises(EngineDeadError, match="rank 1"):
        executor.idle()


def test_configurations_and_layouts_arrive_as_they_were() -> None:
    config = resolve(EngineOptions(tensor_parallel_size=2, step_log="log"))
    groups, layers_per_group = group_layers([AttentionSpec(2, 8, 8, 4), SlidingWindowSpec(2, 8, 8, 4, window=5)], 16)
    layout = KVCacheLayout(16, 9, groups, layers_per_group)
    profile = MemoryProfile(1, 2, 3, DeviceShare(1, 2, 3, 4, 5))
    for value in (config, layout, profile, [], (), {}, None, [1.5, True, b"x", "y", (2**70, -(2**70))]):
        assert decode(encode(value)) == value


def test_every_record_that_a_layer_may_keep_can_be_sent() -> None:
    windowed = [kind(2, 8, 8, 4, window=5) for kind in (SlidingWindowSpec, ChunkedSpec)]
    specs = [AttentionSpec(2, 8, 8, 4), *windowed, LatentSpec(24, 4, index_width=8, top=3), StateSpec(100)]
    assert {type(spec) for spec in specs} == set(get_args(LayerSpec))
    assert decode(encode(specs)) == specs


def test_a_record_within_a_record_is_found() -> None:
    assert wire._find_records(Outer, {}) == {"Outer": Outer, "Inner": Inner}


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Outer:
    parts: Mapping[str, tuple[Inner, ...]] | None


def test_what_a_configuration_says_is_not_taken_for_a_record() -> None:
    config = resolve(EngineOptions())
    strange = {"list": ["tuple", 1], "KVGroup": [["path", "/"]], "mapping": {"path": ["integer", "x"]}}
    found = decode(encode(replace(config, model=replace(config.model, hf=strange))))
    assert found.model.hf == strange


def test_nothing_else_is_sent() -> None:
    with pytest.raises(TypeError, match="a set cannot be sent to a rank"):
        encode({"a": {1}})
    with pytest.raises(KeyError, match="Popen"):
        decode(b"\x91\xa5Popen")


def answered(*errors: RankError | None) -> PendingCall:
    call = PendingCall("execute", decode, len(errors))
    call.answers = [RankAnswer(NOTHING, error) for error in errors]
    return call


def test_a_failure_names_its_rank_unless_it_is_everyones() -> None:
    refusal = RankError("no memory for 3 GiB", "InsufficientMemoryError", None)
    assert str(answered(refusal, refusal).error()) == "no memory for 3 GiB"
    alone = answered(None, refusal).error()
    assert isinstance(alone, InsufficientMemoryError)
    assert str(alone) == "rank 1 failed: no memory for 3 GiB"
    assert str(answered(None, RankError("KeyError: 5", None, None)).error()) == "rank 1 failed: KeyError: 5"
    assert answered(None, None).error() is None
