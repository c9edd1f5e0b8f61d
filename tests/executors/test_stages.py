"""Stages of a pipeline as processes: the bits of one rank, several plans at a time, and an end that leaves nothing."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.clock import SystemClock
from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import Abort, AddRequest
from quire.errors import EngineDeadError
from quire.executors.interface import Executor
from quire.executors.local import LocalExecutor
from quire.executors.multiprocess import RankProcesses
from quire.executors.ranked import RankedExecutor, SampledTokens
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.step import SamplingInputs, StepPlan, StepResult
from tests.e2e.draft_models import changed, noisy
from tests.executors.test_multiprocess import NUM_BLOCKS, Reused, configured, everything, pool, run, sleep_and_wake
from tests.fakes.masks import AllowedByPosition
from tests.models.families import FAMILIES, qwen3
from tests.models.harness import randomize, save
from tests.processes import has_ended
from tests.warm_interpreters import HELPERS, WarmInterpreter


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(randomize(qwen3(num_hidden_layers=3)), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(autouse=True)
def runtime_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("QUIRE_RUNTIME_DIR", str(directory))
    return directory


def make_core(config: EngineConfig, executor: Executor) -> EngineCore:
    return EngineCore(config, executor, SystemClock(), masks=AllowedByPosition())


def staged(config: EngineConfig, ranks: Any) -> EngineCore:
    return make_core(config, RankedExecutor(ranks, config.parallel.pp))


def open_files() -> set[str]:
    """What this process has open, without what is opened anew at any time: the listing itself."""
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            found.add(os.readlink(entry.path))
        except FileNotFoundError:
            continue
    return {name for name in found if "/proc/" not in name}


def left_in_shared_memory(known: set[str], timeout: float = 60.0) -> set[str]:
    """Names in /dev/shm that are not known and stay. Those of other processes of the machine come and go."""
    deadline = time.monotonic() + timeout
    while (found := set(os.listdir("/dev/shm")) - known) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_the_bits_of_one_rank(model_path: Path, runtime_directory: Path, warm_interpreter: WarmInterpreter) -> None:
    """With prefix hits, preemption, constraints, an abort and a pooled request; asleep and awake again. At the end no
    process, descriptor or file is left."""
    config = configured(model_path)
    alone = make_core(config, LocalExecutor(config))
    expected, vector, bits = run(alone), pool(alone, [7] * 31), everything(alone)
    alone.shutdown()
    for warm in (warm_interpreter, HELPERS):  # theirs is no file that is left
        warm.is_here()
    before, shared = open_files(), set(os.listdir("/dev/shm"))
    config = configured(model_path, pipeline_parallel_size=2)
    ranks = RankProcesses(config)
    core = staged(config, ranks)
    processes = [psutil.Process(pid) for pid in ranks.pids]
    try:
        assert run(core) == expected
        assert pool(core, [7] * 31) == vector
        assert everything(core) == bits
        stats = core.stats()
        assert stats.preemptions_total > 0
        assert stats.prefix_cache_hits_total > 0
        sleep_and_wake(core)
        assert run(core) == expected
        assert "on each of 2 ranks in 2 stages" in core.ready.backend
    finally:
        core.shutdown()
    assert all(has_ended(process) for process in processes)
    assert list(runtime_directory.iterdir()) == []
    assert open_files() <= before
    assert left_in_shared_memory(shared) == set()


def random_requests(rng: random.Random) -> list[EngineRequest]:
    """Greedy and drawn, alone, in groups and as searches, with penalties and constraints, some with a beginning in
    common."""
    made = []
    for number in range(10):
        prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 60))]
        if rng.random() < 0.4:
            prompt = [7] * rng.randrange(16, 40) + prompt
        settings: dict[str, Any] = {"max_tokens": rng.randrange(1, 24), "ignore_eos": True}
        kind = rng.choice(("greedy", "drawn", "group", "search", "constraint"))
        if kind == "search":
            settings |= {"n": 2, "use_beam_search": True}
        else:
            settings["temperature"] = 0.0 if kind in ("greedy", "constraint") else 1.3
        if kind == "group":
            settings["n"] = 3
        if kind in ("greedy", "drawn"):
            settings |= {"presence_penalty": 0.5, "logprobs": 2}
        params = SamplingParams(**settings)
        made.append(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                params=params,
                max_tokens=settings["max_tokens"],
                seed=rng.randrange(2**32),
                constraint="5" if kind == "constraint" else "",
            )
        )
    return made


def outcome(core: EngineCore, seed: int) -> dict[tuple[str, int], tuple[list[Any], ...]]:
    """Tokens of all sequences, and what was told of them, of requests that come while others run. Some are aborted when
    they begin, and have no place here."""
    rng = random.Random(seed)
    waiting = random_requests(rng)
    found: dict[tuple[str, int], tuple[list[Any], ...]] = {}
    aborted = {request.request_id for request in waiting if rng.random() < 0.15}
    while core.has_work or waiting:
        while waiting and (not core.has_work or rng.random() < 0.3):
            core.handle(AddRequest(waiting.pop()))
        for update in core.step().updates:
            if update.request_id in aborted:
                core.handle(Abort(update.request_id))
                continue
            told = found.setdefault((update.request_id, update.index), ([], [], []))
            ends = [] if update.finish_reason is None else [update.finish_reason]
            for known, new in zip(told, (update.new_token_ids, update.logprobs, ends), strict=True):
                known += new or []
    core.scheduler.check()
    return found


TWO_RANKS = {"tensor_parallel_size": 2}
DRAFTS = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False, "prompt_lookup_min": 1}
}
SHARED = {"prefill_context_parallel_size": 2}
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "three stages": ("qwen3", {}, {"pipeline_parallel_size": 3}),
    "two stages of two ranks": ("qwen3", TWO_RANKS, {**TWO_RANKS, "pipeline_parallel_size": 2}),
    "three stages, drafts": ("qwen3", {}, {**DRAFTS, "pipeline_parallel_size": 3}),
    "two stages of two ranks, drafts": ("qwen3", TWO_RANKS, {**TWO_RANKS, **DRAFTS, "pipeline_parallel_size": 2}),
    "stages of shared prompts, drafts": ("qwen3", {}, {**DRAFTS, **SHARED, "pipeline_parallel_size": 2}),
    "stages of unlike layers, drafts": ("qwen3-next", {}, {**DRAFTS, "pipeline_parallel_size": 2}),
    "stages, drafts of a model": ("qwen3", {}, {"pipeline_parallel_size": 2}),
    "stages of two ranks, drafts of a model": ("qwen3", TWO_RANKS, {**TWO_RANKS, "pipeline_parallel_size": 2}),
    "stages of shared prompts": ("qwen3", {}, {**SHARED, "pipeline_parallel_size": 2}),
    "shared prompts": ("qwen3", {}, SHARED),
    "shared latents": ("deepseek-v3.2", {}, SHARED),
    "shared prompts, drafts": ("qwen3", DRAFTS, {**DRAFTS, **SHARED}),
    "shared prompts of whole experts": (
        "qwen3-moe",
        {**TWO_RANKS, "enable_expert_parallel": True},
        {**TWO_RANKS, "enable_expert_parallel": True, **SHARED},
    ),
}
"""Model, options of a layout, and of another one with the same bits."""
WAYS: list[dict[str, Any]] = [
    {"num_blocks_override": 300, "max_num_batched_tokens": 32},
    {"max_prefill_chunk": 9, "num_blocks_override": 2 * NUM_BLOCKS},
    {"preemption_mode": "swap", "swap_space": "16MiB", "num_blocks_override": 2 * NUM_BLOCKS},
    {"queue_depth": 1, "num_blocks_override": 300},
]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_schedules(model_path: Path, tmp_path: Path, layout: str) -> None:
    model, plain, dealt = LAYOUTS[layout]
    if model != "qwen3":
        model_path = save(randomize(FAMILIES[model]()), tmp_path)
    if "of a model" in layout:
        draft = changed(model_path, tmp_path / "draft", noisy)
        dealt = {**dealt, "speculative_config": {"model": str(draft), "num_speculative_tokens": 3, "adaptive": False}}
    found: list[list[Any]] = []
    num_accepted = 0
    for options in (plain, dealt):
        config = configured(model_path, **options)
        ranks = RankProcesses(config) if config.parallel.num_devices > 1 else None
        found.append([])
        for seed in range(8):
            own = configured(model_path, **{**options, **WAYS[seed % len(WAYS)]})
            executor = LocalExecutor(own) if ranks is None else RankedExecutor(Reused(ranks), own.parallel.pp)
            core = make_core(own, executor)
            found[-1].append(outcome(core, seed))
            num_accepted += core.stats().accepted_draft_tokens_total
            core.shutdown()
        if ranks is not None:
            ranks.close()
    for expected, dealt_found in zip(*found, strict=True):
        assert dealt_found == expected
    assert bool(num_accepted) == ("drafts" in layout)


@pytest.mark.long
def test_random_schedules_of_two_ranks(model_path: Path) -> None:
    """Sums of ranks have the bits of no other layout; every way has the same ones."""
    ranks = RankProcesses(configured(model_path, tensor_parallel_size=2))
    try:
        for seed in range(4):
            found = []
            for way in WAYS:
                core = make_core(configured(model_path, tensor_parallel_size=2, **way), RankedExecutor(Reused(ranks)))
                found.append(outcome(core, seed))
                core.shutdown()
            assert all(each == found[0] for each in found)
    finally:
        ranks.close()


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma2", "qwen3-next", "deepseek-v3"])
def test_groups_of_unlike_layers(tmp_path: Path, family: str) -> None:
    """Windows, states and latents: each stage has its pages of the groups' blocks, also on disk."""
    path = save(randomize(FAMILIES[family]()), tmp_path / "model")
    options = {"num_blocks_override": 300, "swap_space": "16MiB", "kv_offload_dir": str(tmp_path / "kv")}
    config = configured(path, num_blocks_override=300)
    alone = make_core(config, LocalExecutor(config))
    expected = everything(alone)
    alone.shutdown()
    config = configured(path, pipeline_parallel_size=2, **options)
    ranks = RankProcesses(config)
    try:
        for _ in range(2):
            core = staged(config, Reused(ranks))
            assert everything(core) == expected
            core.shutdown()
            ranks.call("sleep", 1)
    finally:
        ranks.close()
    assert len([each for each in (tmp_path / "kv").iterdir() if each.is_dir()]) == 2


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_a_stage_that_is_killed_ends_the_others(model_path: Path, killed: int) -> None:
    """While prompts are computed, of which there are plans in flight."""
    config = configured(model_path, pipeline_parallel_size=2)
    ranks = RankProcesses(config)
    core = staged(config, ranks)
    processes = [psutil.Process(pid) for pid in ranks.pids]
    for seed in range(3):
        for request in random_requests(random.Random(seed)):
            core.handle(AddRequest(EngineRequest(**{**_fields(request), "request_id": f"{seed} {request.request_id}"})))
    for _ in range(4):
        core.step()
    processes[killed].kill()
    with pytest.raises(EngineDeadError, match=rf"rank {killed} of 2 \(process \d+\) was killed by signal 9"):
        drain(core)
    deadline = time.monotonic() + 60
    while not all(has_ended(process) for process in processes):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.01)
    core.shutdown()


def drain(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def _fields(request: EngineRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


def plan(step_id: int, samples: list[int], released: list[int]) -> StepPlan:
    count = len(samples)
    return StepPlan(step_id, samples, [0] * count, [1] * count, samples, list(range(count)), released=released)


def test_tokens_come_with_the_next_plan() -> None:
    """Those of sequences that were released meanwhile, of discarded and of pooled samples do not."""
    tokens = SampledTokens()
    assert tokens.bring(plan(1, [10, 11, 12, 13, 14], [])).sampled == []
    assert tokens.bring(plan(2, [20], [11])).sampled == []
    tokens.discard(SamplingInputs(1, {}, [2]))
    tokens.take(StepResult(1, [[5], [6], [7], [], [8]]))
    assert tokens.bring(plan(3, [10], [10])).sampled == [(10, 1, [5]), (14, 1, [8])]
    tokens.take(StepResult(2, [[9]]))
    tokens.take(StepResult(3, [[4]]))
    assert tokens.bring(plan(4, [], [])).sampled == [(20, 1, [9]), (10, 1, [4])]


def test_drafts_come_with_the_next_plan() -> None:
    """Those that the last stage has made, behind all accepted tokens; none for a sequence that came anew meanwhile."""
    tokens = SampledTokens()
    tokens.bring(plan(1, [10, 11, 12], []))
    tokens.take(StepResult(1, [[5], [6], [7]], draft_token_ids={0: [8, 9], 1: [3, 4]}))
    asked = StepPlan(2, [10, 11, 12], [1, 1, 1], [3, 2, 2], [10, 11, 12], [0, 1, 2], num_drafts=[2, 1, 1])
    asked.drafts = {12: [1]}
    brought = tokens.bring(asked)
    assert brought.drafts == {10: [8, 9], 11: [3, 4], 12: [1]}
    assert asked.drafts == {12: [1]}
    tokens.take(StepResult(2, [[8, 9, 2], [7], [1, 6]], draft_token_ids={0: [5], 1: [5], 2: [5]}))
    again = StepPlan(3, [10, 11], [4, 2], [2, 2], [10, 11], [0, 1], num_drafts=[1, 1], released=[11])
    brought = tokens.bring(again)
    assert brought.sampled == [(10, 2, [8, 9, 2]), (11, 2, [7]), (12, 2, [1, 6])]
    assert brought.drafts == {10: [5], 11: []}
