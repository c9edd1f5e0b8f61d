"""Drafts in the simulator: plans of an engine whose worker accepted as many, and the speed that acceptance brings."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import pytest

from quire.cli.simulate import build_parser, make_scenario
from quire.clock import SystemClock
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.decoding import draft_numbers
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest
from quire.errors import UserError
from quire.executors.local import LocalExecutor
from quire.simulator.drafts import DraftWork, SimulatedDrafts
from quire.simulator.executor import SimulatedExecutor
from quire.simulator.metrics import Metrics
from quire.simulator.replica import EngineSettings, Replica
from quire.step import StepPlan
from tests.simulator.test_fidelity import REQUESTS, Recorder, cost_of, engine_request

MOST = 3
LIMITS: dict[str, Any] = {"num_blocks_override": 20, "max_num_seqs": 5, "max_num_batched_tokens": 48}
OPTIONS: dict[str, Any] = {
    **LIMITS,
    "load_format": "dummy",
    "block_size": 16,
    "kv_cache_dtype": "float32",
    "num_threads": 1,
    "preemption_mode": "recompute",
}


@pytest.fixture(autouse=True)
def times_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_numbers, "LEAST_SECONDS", 0.0)


class RecordedDrafts(DraftWork):
    """As many right drafts as in the engine's steps."""

    def __init__(self, accepted: dict[int, list[int]]) -> None:
        super().__init__(SimulatedDrafts(MOST, (0.0,)), 0)
        self._accepted = accepted

    def accepted(self, seq_id: int, length: int, num_drafts: int) -> int:
        return self._accepted[seq_id].pop(0) if num_drafts else 0


def run_engine(config: EngineConfig, texts: list[list[int]]) -> tuple[list[StepPlan], list[list[int]], Any]:
    """Plans of the real engine, each request's first text, and accepted drafts of each sequence's steps. texts: of an
    oracle."""
    executor = LocalExecutor(config)
    recorder, accepted = Recorder(executor), defaultdict[int, list[int]](list)
    core = EngineCore(config, recorder, SystemClock())
    update = core.scheduler.update

    def note(result: Any, *others: Any, **options: Any) -> Any:
        plan = core.scheduler._in_flight[result.step_id].plan  # type: ignore[attr-defined]
        for seq_id, source, tokens in zip(plan.sample_seq_ids, plan.sample_from, result.token_ids, strict=True):
            if plan.num_drafts and plan.num_drafts[source]:
                accepted[seq_id].append(len(tokens) - 1)
        return update(result, *others, **options)

    core.scheduler.update = note  # type: ignore[method-assign]
    found: list[list[int]] = [[] for _ in REQUESTS]
    waiting, num_steps = list(enumerate(REQUESTS)), 0
    while waiting or core.has_work:
        while waiting and (waiting[0][1][0] <= num_steps or not core.has_work):
            number, (_, request) = waiting.pop(0)
            asked = engine_request(number, request, config)
            if texts:
                asked = msgspec.structs.replace(asked, prediction=asked.prompt_token_ids + texts[number])
            core.handle(AddRequest(asked))
        for each in core.step().updates:
            if not each.index:
                found[int(each.request_id.partition("-")[2])] += each.new_token_ids
        num_steps += 1
    core.shutdown()
    return recorder.plans, found, accepted


@pytest.mark.parametrize("depth", [1, 2])
def test_plans_are_the_engines(depth: int) -> None:
    options = {**OPTIONS, "queue_depth": depth}
    _, texts, _ = run_engine(resolve(EngineOptions(**options)), [])
    drafts = {"method": "ngram", "num_speculative_tokens": MOST, "oracle": 0.6, "adaptive": False}
    config = resolve(EngineOptions(**options, speculative_config=drafts))
    expected, again, accepted = run_engine(config, texts)
    assert again == texts
    assert sum(map(sum, accepted.values())) > 50
    recorders: list[Recorder] = []

    def make_executor(cost: Any, clock: Any, queue_depth: int) -> Any:
        work = RecordedDrafts(accepted)
        recorders.append(Recorder(SimulatedExecutor(cost, clock, queue_depth=queue_depth, drafts=work)))
        return recorders[-1]

    settings = EngineSettings(
        max_model_len=config.model.max_model_len,
        queue_depth=depth,
        drafts=SimulatedDrafts(MOST, (0.0,), adapts=False),
        **LIMITS,
    )
    replica = Replica(cost_of(config), settings, make_executor=make_executor)
    waiting, num_steps = list(REQUESTS), 0
    while waiting or replica.core.has_work:
        while waiting and (waiting[0][0] <= num_steps or not replica.core.has_work):
            replica.offer(waiting.pop(0)[1])
        replica.step()
        num_steps += 1
    assert replica.finish_run().num_finished == len(REQUESTS)
    found = recorders[0].plans
    for number, (engine, simulated) in enumerate(zip(expected, found, strict=False)):
        assert simulated == engine, f"plan {number} differs"
    assert len(found) == len(expected)
    assert any(plan.trimmed_tables for plan in found)
    assert not any(accepted.values())


def simulate(*flags: str) -> Metrics:
    arguments = ["--workload", "sharegpt", "--rate", "2", "--num-requests", "8", "--model", "llama-3-8b"]
    return make_scenario(build_parser().parse([*arguments, *flags])).simulate()


def tpot(metrics: Metrics) -> float:
    mean: float = metrics.latencies["tpot"].mean
    return mean


def test_acceptance_brings_speed() -> None:
    plain, right, half, dear = (
        simulate(),
        simulate("--draft-acceptance", "1", "--draft-tokens", "3"),
        simulate("--draft-acceptance", "0.5,0.2", "--draft-tokens", "3"),
        simulate("--draft-acceptance", "1", "--draft-tokens", "3", "--draft-time", "4ms"),
    )
    assert 3.5 < tpot(plain) / tpot(right) < 4
    assert 1.2 < tpot(plain) / tpot(half) < 1.7
    assert tpot(right) < tpot(dear) < tpot(plain)
    assert len({each.num_output_tokens for each in (plain, right, half, dear)}) == 1
    stats = half.stats
    assert 0.4 < stats.accepted_drafts_by_position[0] / stats.drafts_total < 0.6
    assert 0.1 < stats.accepted_drafts_by_position[1] / stats.accepted_drafts_by_position[0] < 0.3
    assert right.stats.accepted_draft_tokens_total == right.stats.draft_tokens_total > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--draft-tokens", "3"), "need --draft-acceptance"),
        (("--draft-acceptance", "0.5,x"), "numbers from 0 to 1"),
        (("--draft-acceptance", "1.5"), "numbers from 0 to 1"),
        (("--draft-acceptance", "0.5", "--draft-tokens", "32"), "from 1 to 31"),
        (("--draft-acceptance", "0.5", "--draft-time", "4"), "a time with its unit"),
        (("--draft-acceptance", "0.5", "--pp", "2"), "--pp"),
    ],
)
def test_what_is_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        simulate(*flags)
