"""Replicas that share experts: engine cores in threads of this process, each with requests of its own."""

from __future__ import annotations

import os
import random
import select
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.clock import SystemClock
from quire.engine.core import EngineCore
from quire.engine.messages import Abort, AddRequest, Call
from quire.executors.choice import make_executor
from quire.parallel import expert_exchange
from quire.parallel.replica_memory import CommonMemory, CommonSteps
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from tests.executors.test_multiprocess import configured, everything
from tests.fakes.masks import AllowedByPosition
from tests.long import all_but_long
from tests.models.families import qwen2_moe
from tests.models.harness import randomize, save

PATIENCE = 60.0
NUM_BLOCKS = 12
"""So few that running requests are preempted."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank each": {},
    "rounds of few rows": {},
    "in turns": {"expert_placement_strategy": "round_robin"},
    "two steps in flight": {"queue_depth": 2},
    "two threads": {"num_threads": 2},
    "two ranks each": {"tensor_parallel_size": 2},
    "two stages each": {"pipeline_parallel_size": 2},
    "two ranks and stages each": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}

ADDED_AS_ONE_RANK: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {"step_interval": 10**6},
}
"""Two ranks that add up experts' results in the order of the experts."""
Tokens = dict[str, list[Any]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven experts and a shared one in each of two layers."""
    return save(randomize(qwen2_moe(decoder_sparse_step=1, mlp_only_layers=[])), tmp_path_factory.mktemp("qwen2-moe"))


@pytest.fixture(autouse=True)
def runtime_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))


class Replica:
    """An engine core, driven as in its process: it sleeps while it has no work."""

    def __init__(self, core: EngineCore, steps: CommonSteps) -> None:
        self.core = core
        self.steps = steps
        self.num_steps = 0

    def turn(self) -> Tokens:
        found: Tokens = {}
        if not self.core.has_work or self.core.is_blocked:
            select.select([self.steps.bell], [], [], 0.05)
            self.steps.hush()
        if self.core.has_work:
            self.num_steps += 1
            for update in self.core.step().updates:
                found.setdefault(update.request_id, []).extend(
                    zip(update.new_token_ids, update.logprobs or [], strict=True)
                )
        return found

    def follow(self, end: threading.Event) -> None:
        while not end.is_set() or self.core.has_work:
            assert not self.turn()


@contextmanager
def replicas(path: Path, count: int = 2, **options: Any) -> Iterator[list[Replica]]:
    memory = CommonMemory(count)
    shared = {"data_parallel_size": count, "enable_expert_parallel": True, "expert_counts": True}
    config = configured(path, num_blocks_override=NUM_BLOCKS, **shared, **options)
    with ExitStack() as stack:
        stack.callback(memory.close)
        made = []
        for number in range(count):
            own = replace(config, replicas=memory.of_replica(number))
            steps = CommonSteps(own.replicas)
            masks = AllowedByPosition()
            core = EngineCore(own, make_executor(own), SystemClock(), masks=masks, steps=steps)
            stack.callback(core.shutdown)
            made.append(Replica(core, steps))
        yield made


def together(works: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as threads:
        return [future.result(PATIENCE) for future in [threads.submit(*work) for work in works]]


def alone(path: Path, requests: Sequence[EngineRequest], **options: Any) -> Tokens:
    """Tokens and log-probabilities of one engine with all experts and much memory; `options` shares its layers out."""
    config = configured(path, num_blocks_override=300, **options)
    core = EngineCore(config, make_executor(config), SystemClock(), masks=AllowedByPosition())
    for request in requests:
        core.handle(AddRequest(request))
    found: Tokens = {}
    while core.has_work:
        for update in core.step().updates:
            found.setdefault(update.request_id, []).extend(
                zip(update.new_token_ids, update.logprobs or [], strict=True)
            )
    core.shutdown()
    return found


def mixed(rng: random.Random, name: str) -> list[EngineRequest]:
    made = []
    for number in range(rng.randrange(1, 9)):
        prompt = [rng.randrange(97) for _ in range(rng.randrange(2, 90))]
        if rng.random() < 0.3:
            prompt = [7] * 20 + prompt
        max_tokens = rng.randrange(1, 25)
        params = SamplingParams(max_tokens=max_tokens, temperature=rng.choice([0.0, 1.0]), ignore_eos=True, logprobs=2)
        constraint = "5" if rng.random() < 0.2 else ""
        made.append(
            EngineRequest(
                request_id=f"{name}{number}",
                prompt_token_ids=prompt,
                params=params,
                max_tokens=max_tokens,
                seed=number,
                constraint=constraint,
            )
        )
    return made


def drive(replica: Replica, requests: Sequence[EngineRequest], rng: random.Random, end: threading.Barrier) -> Tokens:
    """Add the requests at different steps, abort some of them, then follow until all replicas are done."""
    waiting, aborted, found = list(requests), set(), dict[str, list[Any]]()
    while waiting or replica.core.scheduler.has_requests:
        while waiting and rng.random() < 0.4:
            replica.core.handle(AddRequest(waiting.pop()))
        if rng.random() < 0.03 and found:
            name = rng.choice(list(found))
            aborted.add(name)
            replica.core.handle(Abort(name))
        for name, tokens in replica.turn().items():
            found.setdefault(name, []).extend(tokens)
    done = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(lambda: (end.wait(PATIENCE), done.set()))
        replica.follow(done)
        waits.result()
    replica.core.scheduler.check()
    return {name: tokens for name, tokens in found.items() if name not in aborted}


@pytest.mark.parametrize("layout", all_but_long(LAYOUTS, ["rounds of few rows", "two ranks each"]))
def test_random_requests_get_the_bits_of_one_engine(
    model_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts beside decodes, idle replicas, preemption, prefix hits, constraints, aborts."""
    options = LAYOUTS[layout]
    if layout == "rounds of few rows":
        monkeypatch.setattr(expert_exchange, "MOST_RESULT_BYTES", 1)
    reference = ADDED_AS_ONE_RANK if "tensor_parallel_size" in options else {}
    with replicas(model_path, **options) as both:
        for seed in range(4):
            rng = random.Random(seed)
            given = [mixed(rng, name) for name in "ab"]
            if seed == 3:
                given[1] = []
            end = threading.Barrier(2)
            found = together(
                [(drive, each, own, random.Random(seed), end) for each, own in zip(both, given, strict=True)]
            )
            for own, tokens in zip(given, found, strict=True):
                expected = alone(model_path, own, **reference)
                assert tokens == {name: expected[name] for name in tokens}
        assert sum(each.core.stats().preemptions_total for each in both) > 0


def test_three_replicas_and_one_with_work(model_path: Path) -> None:
    """The rows of its requests are counted, and no others; all begin as many steps, and none while all are idle."""
    config = configured(model_path, expert_counts=True, num_blocks_override=NUM_BLOCKS)
    core = EngineCore(config, make_executor(config), SystemClock(), masks=AllowedByPosition())
    expected, counts = everything(core), core._executor.expert_counts()
    core.shutdown()
    with replicas(model_path, 3) as all_three:
        end = threading.Event()

        def work() -> Any:
            found = everything(all_three[1].core)
            end.set()
            return found

        _, found, _ = together([(all_three[0].follow, end), (work,), (all_three[2].follow, end)])
        assert found == expected
        assert all_three[0].num_steps == all_three[2].num_steps > 0
        assert not any(each.core.has_work for each in all_three)
        nothing = [[0] * 7] * 2
        assert [each.core._executor.expert_counts() for each in all_three] == [nothing, counts, nothing]


@pytest.mark.parametrize("state", ["paused", "asleep"])
def test_a_replica_that_takes_no_requests_joins(model_path: Path, state: str) -> None:
    call = Call(1, "pause", "all") if state == "paused" else Call(1, "sleep", "1")
    config = configured(model_path)
    core = EngineCore(config, make_executor(config), SystemClock(), masks=AllowedByPosition())
    expected = everything(core)
    core.shutdown()
    with replicas(model_path) as (one, other):
        answer = one.core.handle(call)
        assert answer is not None
        assert answer.error is None
        end = threading.Event()

        def work() -> Any:
            found = everything(other.core)
            end.set()
            return found

        _, found = together([(one.follow, end), (work,)])
        assert found == expected
        refused = other.core.handle(Call(2, "sleep", "2"))
        assert refused is not None
        assert refused.error == "sleep at level 2 is not possible: other replicas need this one's experts"


def test_steps_begin_when_all_are_there(model_path: Path) -> None:
    memory = CommonMemory(2)
    config = configured(model_path, data_parallel_size=2, enable_expert_parallel=True)
    with ExitStack() as stack:
        stack.callback(memory.close)

        def start(number: int) -> Replica:
            own = replace(config, replicas=memory.of_replica(number))
            assert own.replicas is not None
            steps = CommonSteps(own.replicas)
            core = EngineCore(own, make_executor(own), SystemClock(), steps=steps)
            stack.callback(core.shutdown)
            return Replica(core, steps)

        one = start(0)
        request = next(each for each in mixed(random.Random(0), "a") if not each.constraint)
        one.core.handle(AddRequest(request))
        assert not one.core.step().updates
        assert one.core.is_blocked
        other, end = start(1), threading.Event()

        def work() -> Tokens:
            found: Tokens = {}
            while one.core.scheduler.has_requests:
                found |= one.turn()
            end.set()
            return found

        found, _ = together([(work,), (other.follow, end)])
        assert list(found) == [request.request_id]


def test_bells() -> None:
    """A step rings where it has not begun, and once more never blocks."""
    memory = CommonMemory(2)
    one, two = (CommonSteps(memory.of_replica(number)) for number in range(2))
    one.arrive()
    assert not one.may_begin
    assert not two.is_behind, "that was no step"
    two.hush()
    two.arrive()
    assert one.may_begin
    assert not one.is_behind
    one.count_step()
    assert two.is_behind
    assert select.select([two.bell], [], [], 0)[0]
    two.hush()
    assert not select.select([two.bell], [], [], 0)[0]
    two.count_step()
    assert not one.is_behind
    assert not two.is_behind
    assert not select.select([one.bell], [], [], 0)[0], "it had begun that step"
    for _ in range(70000):
        one.count_step()
    assert two.is_behind
    memory.renew()
    assert not CommonSteps(memory.of_replica(1)).is_behind
    open_files = len(os.listdir("/proc/self/fd"))
    memory.close()
    one.close()
    two.close()
    assert len(os.listdir("/proc/self/fd")) < open_files
