"""Two ranks as processes over gloo: the tokens of one rank, and an end that leaves nothing behind."""

from __future__ import annotations

import ctypes
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.clock import SystemClock
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.parallel import ParallelConfig
from quire.config.resolve import resolve
from quire.engine.core import EngineCore
from quire.engine.messages import Abort, AddRequest, Call
from quire.errors import EngineDeadError, ModelLoadError, QuireError
from quire.executors import multiprocess
from quire.executors.interface import VitalSigns
from quire.executors.local import LocalExecutor
from quire.executors.multiprocess import RankProcesses
from quire.executors.ranked import RankedExecutor
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams, ThinkingBudget
from quire.step import NewSequence, SamplingInputs, SequenceSampling, StepPlan
from tests.fakes import rank_device, wrong_rank
from tests.fakes.masks import AllowedByPosition
from tests.long import all_but_long
from tests.models.families import FAMILIES, qwen3
from tests.models.harness import randomize, save
from tests.processes import has_ended

MAX_TOKENS = 24
NUM_BLOCKS = 22
"""So few that running requests are preempted."""
GREEDY = SequenceSampling(SamplingParams(temperature=0), 0, [], [])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(randomize(qwen3()), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(autouse=True)
def runtime_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("QUIRE_RUNTIME_DIR", str(directory))
    return directory


def configured(path: Path, **options: Any) -> EngineConfig:
    settings = {
        "attention_backend": "native",
        "num_threads": 1,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "num_blocks_override": NUM_BLOCKS,
    }
    return resolve(EngineOptions(model=str(path), **{**settings, **options}))


def requests(logprobs: int | None = None) -> list[EngineRequest]:
    """Twelve greedy requests, a third of which begin alike, and a fourth of which have a constraint, which forces some
    tokens of the last one. One has a limit on its thoughts."""
    rng = random.Random(0)
    made = []
    for number in range(12):
        prompt = [rng.randrange(97) for _ in range(rng.randrange(3, 50))]
        if number % 3 == 0:
            prompt = [7] * 20 + prompt
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, logprobs=logprobs)
        made.append(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                params=params,
                max_tokens=MAX_TOKENS,
                seed=number,
                constraint={1: "5", 5: "5", 9: "70"}.get(number, ""),
                thinking_budget=ThinkingBudget(3, [[90]], [[91, 92]], is_open=True) if number == 2 else None,
            )
        )
    return made


def run(core: EngineCore) -> dict[str, list[int]]:
    """The tokens of each request; number 5 is aborted after its fourth token."""
    for request in requests():
        core.handle(AddRequest(request))
    found: dict[str, list[int]] = {}
    while core.has_work:
        for update in core.step().updates:
            tokens = found.setdefault(update.request_id, [])
            tokens.extend(update.new_token_ids)
            if update.request_id == "5" and len(tokens) >= 4:
                core.handle(Abort("5"))
                del tokens[4:]
    core.scheduler.check()
    return found


def pool(core: EngineCore, prompt: list[int]) -> list[float]:
    """The vector of a pooled request that shares its steps with a generated one."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    for name, pooling in (("generated", False), ("pooled", True)):
        max_tokens = 1 if pooling else 4
        core.handle(
            AddRequest(
                EngineRequest(
                    request_id=name,
                    prompt_token_ids=prompt,
                    params=params,
                    max_tokens=max_tokens,
                    seed=0,
                    pooling=pooling,
                )
            )
        )
    found = []
    while core.has_work:
        found += [update.pooled for update in core.step().updates if update.pooled is not None]
    [vector] = found
    return vector


def two_ranks(config: EngineConfig) -> tuple[EngineCore, RankProcesses]:
    ranks = RankProcesses(config)
    return EngineCore(config, RankedExecutor(ranks), SystemClock(), masks=AllowedByPosition()), ranks


def sleep_and_wake(core: EngineCore) -> None:
    """At both levels."""
    for method, argument in (("sleep", "1"), ("wake_up", ""), ("sleep", "2"), ("wake_up", "")):
        answer = core.handle(Call(1, method, argument))
        assert answer is not None
        assert answer.error is None


@pytest.mark.parametrize("backend", all_but_long(["native", "torch"], ["native"]))
def test_the_tokens_of_one_rank(model_path: Path, runtime_directory: Path, backend: str) -> None:
    """With prefix hits, preemption and an abort in the batch; asleep and awake again; two steps in flight."""
    config = configured(model_path, attention_backend=backend)
    alone = EngineCore(config, LocalExecutor(config), SystemClock(), masks=AllowedByPosition())
    expected = run(alone)
    vector = pool(alone, [7] * 31)
    alone.shutdown()
    shared = configured(model_path, attention_backend=backend, tensor_parallel_size=2, queue_depth=2)
    core, ranks = two_ranks(shared)
    processes = [psutil.Process(pid) for pid in ranks.pids]
    try:
        assert run(core) == expected
        assert pool(core, [7] * 31) == pytest.approx(vector, abs=1e-5)
        stats = core.stats()
        assert stats.preemptions_total > 0
        assert stats.prefix_cache_hits_total > 0
        sleep_and_wake(core)
        assert run(core) == expected
        assert "2 ranks" in core.ready.backend
        assert ("native kernels" in core.ready.backend) == (backend == "native")
    finally:
        core.shutdown()
        core.shutdown()
    assert all(has_ended(process) for process in processes)
    assert [process.returncode for process in ranks._processes] == [0, 0]
    assert list(runtime_directory.iterdir()) == []


class Reused:
    """Ranks that outlive the engine cores over them."""

    def __init__(self, ranks: RankProcesses) -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def close(self) -> None:
        """The test closes them."""


def everything(core: EngineCore, count: int | None = None) -> dict[str, list[Any]]:
    """Tokens and log-probabilities of each request, or of the first ones."""
    for request in requests(logprobs=2)[:count]:
        core.handle(AddRequest(request))
    found: dict[str, list[Any]] = {}
    while core.has_work:
        for update in core.step().updates:
            found.setdefault(update.request_id, []).extend(
                zip(update.new_token_ids, update.logprobs or [], strict=True)
            )
    core.scheduler.check()
    return found


WAYS: dict[str, dict[str, Any]] = {
    "together": {"num_blocks_override": 300},
    "alone": {"max_num_seqs": 1, "num_blocks_override": 300, "enable_prefix_caching": False},
    "in chunks, preempted, two steps in flight": {"max_prefill_chunk": 7, "queue_depth": 2},
    "swapped": {"preemption_mode": "swap", "swap_space": "16MiB", "queue_depth": 2},
}


@pytest.mark.long
def test_the_same_bits_in_every_batch(model_path: Path) -> None:
    """Of one set of ranks: compositions, chunks, prefix hits, and preemption both ways."""
    ranks = RankProcesses(configured(model_path, tensor_parallel_size=2, queue_depth=2))
    found = {}
    try:
        for name, options in WAYS.items():
            config = configured(model_path, tensor_parallel_size=2, **options)
            core = EngineCore(config, RankedExecutor(Reused(ranks)), SystemClock(), masks=AllowedByPosition())
            found[name] = everything(core, 4 if name == "alone" else None)
            stats = core.stats()
            assert (stats.preemptions_total > 0) == ("num_blocks_override" not in options)
            assert (stats.swapped_in_blocks_total > 0) == (name == "swapped")
            assert stats.prefix_cache_hits_total > 0 or name != "together"
            core.shutdown()
    finally:
        ranks.close()
    for name, results in found.items():
        assert results == {number: found["together"][number] for number in results}, name


@pytest.mark.long
def test_blocks_that_come_back_from_disk(model_path: Path, tmp_path: Path) -> None:
    """Each rank keeps its own share of a block. The second engine finds what the first one has stored."""
    options = {"kv_offload_dir": str(tmp_path), "swap_space": "16MiB", "num_blocks_override": 300}
    config = configured(model_path, tensor_parallel_size=2, **options)
    ranks = RankProcesses(config)
    found, stats = [], []
    try:
        for _ in range(2):
            core = EngineCore(config, RankedExecutor(Reused(ranks)), SystemClock(), masks=AllowedByPosition())
            found.append(everything(core))
            core.shutdown()
            stats.append(core.stats())
            ranks.call("sleep", 1)
    finally:
        ranks.close()
    assert found[0] == found[1]
    assert [each.offload_loaded_blocks_total > 0 for each in stats] == [False, True]
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(folders) == 2
    assert all(any(folder.glob("*/*")) for folder in folders)


@pytest.mark.long  # quick: test_ranked.py, over results of a test
def test_a_rank_that_samples_other_tokens_fails_the_step(model_path: Path) -> None:
    config = configured(model_path, tensor_parallel_size=2)
    core, _ = two_ranks(replace(config, device=replace(config.device, platform=wrong_rank.PLATFORM)))
    try:
        core.handle(AddRequest(requests()[0]))
        core.step(), core.step()
        with pytest.raises(QuireError, match="ranks 0 and 1 disagree on the tokens of step 2"):
            core.step()
    finally:
        core.shutdown()


def on_devices(config: EngineConfig) -> EngineConfig:
    """The configuration of two ranks with a device each."""
    device = replace(config.device, platform=rank_device.PLATFORM, collectives=rank_device.COLLECTIVES)
    return replace(config, parallel=ParallelConfig(tp=2), device=device)


@pytest.mark.long
def test_a_rank_takes_a_plan_before_the_last_ones_result(model_path: Path) -> None:
    """With a platform and a group that the configuration names. The device has a result ready only when the next step
    was launched."""
    config = configured(model_path, device="cpu", attention_backend="triton", dtype="float32", queue_depth=2)
    ranks = RankProcesses(on_devices(config))
    executor = RankedExecutor(ranks)
    try:
        groups, layers_per_group = group_layers(executor.load_model(), 16)
        executor.allocate(KVCacheLayout(16, NUM_BLOCKS, groups, layers_per_group))
        for step in (1, 3):
            added = NewSequence(step, [1, 2, 3], 3, [[step]], GREEDY)
            first = executor.execute(StepPlan(step, [step], [0], [3], [step], [0], new_sequences=[added]))
            second = executor.execute(StepPlan(step + 1, [step], [3], [1], [step], [0]))
            assert [future.result(60).step_id for future in (first, second)] == [step, step + 1]
        num_sums = (2 * 3 + 1) * 4
        told = executor.describe_backend()
        assert told.startswith(f"steps in pairs over CountingGroup, which has made {num_sums} sums, ")
        assert told.endswith(", on each of 2 ranks")
    finally:
        executor.shutdown()


def wait_for(executor: RankedExecutor | RankProcesses, condition: Callable[[VitalSigns], bool]) -> None:
    """Until the ranks' signs of life are as they should be. A minute is a bound for failure, not a claim."""
    deadline = time.monotonic() + 60
    while not condition(executor.vital_signs()):
        assert time.monotonic() < deadline, executor.vital_signs()
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("kind", "num_tokens"),
    all_but_long([("tensor", 3), ("prefill_context", 64)], [("tensor", 3)]),
)
def test_a_rank_that_is_killed_ends_the_others(
    model_path: Path, fresh_interpreters: None, kind: str, num_tokens: int
) -> None:
    """In a step, which the other rank is in the middle of, with the next one in flight; then nothing more is done.
    Before that it is stopped, idle and in the step, which the executor says as well. The step of the second kind is a
    prompt of which each rank computes a part."""
    ranks = RankProcesses(configured(model_path, queue_depth=2, **{f"{kind}_parallel_size": 2}))
    executor = RankedExecutor(ranks)
    groups, layers_per_group = group_layers(executor.load_model(), 16)
    profile = executor.profile(128, 16)
    assert profile.available > 0
    assert profile.weights > 0
    executor.allocate(KVCacheLayout(16, NUM_BLOCKS, groups, layers_per_group))
    processes = [psutil.Process(pid) for pid in ranks.pids]
    wait_for(executor, lambda signs: math.isinf(signs.stalled) and signs.silence < 1.0)  # both are idle
    # The system says that a process is stopped once each of its threads is, a moment after the first.
    assert executor.vital_signs().stopped is None
    processes[1].suspend()
    wait_for(executor, lambda signs: signs.stopped == 1)
    processes[1].resume()
    wait_for(executor, lambda signs: signs.stopped is None and signs.silence < 1.0)
    processes[1].suspend()
    new = NewSequence(1, list(range(num_tokens)), num_tokens, [[*range(1, 2 + num_tokens // 16)]], GREEDY)
    plan = StepPlan(1, [1], [0], [num_tokens], [1], [0], new_sequences=[new])
    futures = [executor.execute(plan), executor.execute(StepPlan(2, [1], [num_tokens], [1], [1], [0]))]
    wait_for(executor, lambda signs: signs.silence > 1.0 and 0.5 < signs.stalled < math.inf)  # the other one waits
    assert not any(future.done() for future in futures)
    processes[1].kill()
    for future in futures:
        with pytest.raises(EngineDeadError, match=r"rank 1 of 2 \(process \d+\) was killed by signal 9 \(SIGKILL\)"):
            future.result(60)
    assert all(has_ended(process) for process in processes)
    with pytest.raises(EngineDeadError, match="rank 1 of 2"):
        executor.idle()
    with pytest.raises(EngineDeadError, match="rank 1 of 2"):
        executor.execute(plan)
    executor.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("expected_inputs", all_but_long([[], [0]], [[0]]))
def test_a_model_that_does_not_load_and_a_step_that_fails(tmp_path: Path, expected_inputs: list[int]) -> None:
    """The first is an answer like any other; after the second the ranks' states are undefined."""
    path = save(randomize(FAMILIES["llama"]()), tmp_path)
    (path / "model.safetensors").unlink()
    ranks = RankProcesses(configured(path, tensor_parallel_size=2))
    executor = RankedExecutor(ranks)
    processes = [psutil.Process(pid) for pid in ranks.pids]
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="holds no weights"):
            executor.load_model()
    assert not executor.idle()
    with pytest.raises(QuireError, match="rank 0 failed: AssertionError: allocate comes before"):
        executor.execute(StepPlan(1, [5], [0], [3], [5], [0], masked_samples=expected_inputs)).result(60)
    if expected_inputs:
        executor.send_sampling_inputs(SamplingInputs(1, {}))  # the future has said what is wrong
    assert all(has_ended(process) for process in processes)
    with pytest.raises(EngineDeadError, match="a rank failed in a step: rank 0 failed: AssertionError"):
        executor.idle()
    executor.shutdown()


@pytest.mark.long
def test_sampling_that_fails_on_every_rank(model_path: Path) -> None:
    """The masks are too short. Nothing waits, and no rank is left."""
    core, ranks = two_ranks(configured(model_path, tensor_parallel_size=2))
    processes = [psutil.Process(pid) for pid in ranks.pids]
    core._masks = AllowedByPosition(31)
    try:
        core.handle(AddRequest(requests()[1]))
        with pytest.raises(QuireError, match="a mask over 97 tokens has 16 bytes"):
            core.step()
        assert all(has_ended(process) for process in processes)
        with pytest.raises(EngineDeadError, match="a rank failed in a step"):
            ranks.check()
    finally:
        core.shutdown()


def ends_at_once(module: str, name: str, line: bytes, fds: list[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], stdin=subprocess.PIPE)


def test_a_process_that_does_not_start(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocess, "start_interpreter", ends_at_once)
    with pytest.raises(EngineDeadError, match=r"rank \d of 2 \(process \d+\) exited with status 3"):
        RankProcesses(configured(model_path, tensor_parallel_size=2))


PARENT = """
import sys
from quire.llm import LLM
from quire.sampling_params import SamplingParams
llm = LLM(
    sys.argv[1], tensor_parallel_size=2, num_threads=1, num_blocks_override=22, skip_tokenizer_init=True, queue_depth=2
)
assert "torch" not in sys.modules, "a core whose ranks are other processes needs no torch"
print(len(llm.generate([[1, 2, 3]], use_tqdm=False)[0].outputs[0].token_ids), flush=True)
while True:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
"""


@pytest.fixture
def adopts() -> Iterator[None]:
    """Processes whose parents have ended become children of this one, which is of their session, as the first process
    of a container is. A process group without such a parent gets SIGHUP where one of it is stopped."""
    set_subreaper = partial(ctypes.CDLL(None).prctl, 36)
    assert set_subreaper(1) == 0
    yield
    set_subreaper(0)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the end of the parent does not wake a stopped process")
def test_a_stopped_rank_ends_with_its_parent(model_path: Path, adopts: None) -> None:
    for rank in ended_with_their_parent(model_path, is_stopped=True):
        os.waitpid(rank.pid, 0)


@pytest.mark.long
def test_ranks_end_with_their_parent(model_path: Path) -> None:
    ended_with_their_parent(model_path, is_stopped=False, number=signal.SIGTERM)


def ended_with_their_parent(
    model_path: Path, *, is_stopped: bool, number: int = signal.SIGKILL
) -> list[psutil.Process]:
    """Ranks, of which one may be stopped, whose parent was killed by a signal of this number and can do nothing about
    them, with two plans in flight."""
    ranks: list[psutil.Process] = []
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) > 0
        ranks = psutil.Process(parent.pid).children()
        assert len(ranks) == 2
        if is_stopped:
            ranks[1].suspend()
        os.kill(parent.pid, number)
        assert all(has_ended(rank) for rank in ranks)
        return ranks
    finally:
        parent.kill()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        parent.communicate()
