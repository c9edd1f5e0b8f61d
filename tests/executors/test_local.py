"""The local executor: order, threads, exceptions, shutdown. The worker itself is tested in tests/worker."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import ModelLoadError, QuireError
from quire.executors.local import LocalExecutor, WorkerThread
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams
from quire.step import NewSequence, SequenceSampling, StepPlan
from quire.worker.platform.choice import make_platform
from quire.worker.platform.cpu import CpuPlatform
from quire.worker.platform.cuda import CudaPlatform
from tests.architecture.source import ROOT
from tests.fakes.panic import Panic
from tests.models.families import FAMILIES
from tests.models.harness import randomize, save

GREEDY = SequenceSampling(SamplingParams(temperature=0), 0, [], [])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = save(randomize(FAMILIES["llama"]()), tmp_path_factory.mktemp("llama"))
    return resolve(EngineOptions(model=str(path), num_threads=1, max_num_seqs=4, attention_backend="torch"))


def with_depth(config: EngineConfig, queue_depth: int, num_threads: int = 1) -> EngineConfig:
    return replace(
        config,
        scheduler=replace(config.scheduler, queue_depth=queue_depth),
        device=replace(config.device, num_threads=num_threads),
    )


def ready(config: EngineConfig) -> LocalExecutor:
    executor = LocalExecutor(config)
    groups, layers_per_group = group_layers(executor.load_model(), 16)
    executor.allocate(KVCacheLayout(16, 20, groups, layers_per_group))
    return executor


def prefill(step_id: int, seq_id: int) -> StepPlan:
    new = NewSequence(seq_id, [1, 2, 3], 3, [[1 + seq_id]], GREEDY)
    return StepPlan(step_id, [seq_id], [0], [3], [seq_id], [0], new_sequences=[new])


Threads = Callable[[], list[threading.Thread]]


@pytest.fixture(autouse=True)
def worker_threads() -> Iterator[Threads]:
    """The threads of executors that the test has started: none of them stays."""
    before = set(threading.enumerate())

    def started() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "quire-worker" and each not in before]

    yield started
    assert started() == []


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_life(config: EngineConfig, queue_depth: int, worker_threads: Threads) -> None:
    executor = LocalExecutor(with_depth(config, queue_depth))
    specs = executor.load_model()
    assert len(specs) == 3
    assert executor.profile(64, 4).available > 0
    groups, layers_per_group = group_layers(specs, 16)
    executor.allocate(KVCacheLayout(16, 20, groups, layers_per_group))
    futures = [executor.execute(prefill(step, step)) for step in range(4)]
    assert futures[0].done() or queue_depth == 2
    results = [future.result(timeout=60) for future in futures]
    assert [result.step_id for result in results] == [0, 1, 2, 3]
    assert len({result.token_ids[0][0] for result in results}) == 1
    assert len(worker_threads()) == queue_depth - 1
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.execute(prefill(9, 9))


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_an_error_while_loading_is_raised_as_it_is(config: EngineConfig, queue_depth: int, tmp_path: Path) -> None:
    broken = with_depth(replace(config, model=replace(config.model, path=tmp_path)), queue_depth)
    executor = LocalExecutor(broken)
    with pytest.raises(ModelLoadError):
        executor.load_model()
    executor.shutdown()


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_an_error_in_a_step_is_carried_by_its_future(config: EngineConfig, queue_depth: int) -> None:
    executor = ready(with_depth(config, queue_depth))
    future = executor.execute(StepPlan(0, [5], [0], [1], [5], [0]))
    with pytest.raises(KeyError, match="5"):
        future.result(timeout=60)
    executor.shutdown()


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_the_number_of_threads_holds_where_the_model_runs(
    config: EngineConfig, queue_depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines with different numbers take turns; torch keeps the number per thread."""
    seen: list[tuple[int, bool]] = []
    compute_logits = Decoder.compute_logits

    def spy(self: Decoder, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        seen.append((torch.get_num_threads(), torch.is_inference_mode_enabled()))
        return compute_logits(self, hidden, slots)

    monkeypatch.setattr(Decoder, "compute_logits", spy)
    before = torch.get_num_threads()
    one, two = (ready(with_depth(config, queue_depth, num_threads)) for num_threads in (1, 2))
    try:
        for step in range(2):
            one.execute(prefill(step, step)).result(timeout=60)
            two.execute(prefill(step, step)).result(timeout=60)
    finally:
        torch.set_num_threads(before)
        one.shutdown()
        two.shutdown()
    assert seen == [(1, True), (2, True)] * 2


def test_shutdown_waits_for_what_was_started(config: EngineConfig) -> None:
    executor = ready(with_depth(config, 2))
    futures = [executor.execute(prefill(step, step)) for step in range(3)]
    executor.shutdown()
    assert all(future.done() for future in futures)
    assert [future.result().step_id for future in futures] == [0, 1, 2]


def test_a_dropped_executor_takes_its_thread_along(config: EngineConfig, worker_threads: Threads) -> None:
    executor = ready(with_depth(config, 2))
    executor.execute(prefill(0, 0)).result(timeout=60)
    (thread,) = worker_threads()
    assert thread.daemon
    del executor
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_driver_of_many_steps_enters_the_context_once(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ready(config)
    alone = executor.execute(prefill(0, 0)).result().token_ids
    entered: list[bool] = []
    enter = torch.inference_mode

    def counted() -> torch.inference_mode:
        entered.append(torch.is_inference_mode_enabled())
        return enter()

    monkeypatch.setattr(torch, "inference_mode", counted)
    with executor.computing():
        together = [executor.execute(prefill(number, number)).result().token_ids for number in (1, 2)]
    assert entered == [False]
    assert not torch.is_inference_mode_enabled()
    assert together == [alone, alone]
    executor.shutdown()


def test_plans_cannot_be_cancelled() -> None:
    lane = WorkerThread("quire-worker")
    gate = threading.Event()
    lane.submit(gate.wait)
    waiting = lane.submit(lambda: 5)
    assert not waiting.cancel()
    gate.set()
    assert waiting.result(timeout=60) == 5
    lane.close()


def test_calls_run_one_after_the_other_while_the_caller_goes_on() -> None:
    lane = WorkerThread("quire-worker")
    order: list[int] = []

    def call(number: int) -> int:
        time.sleep(0.005 if number == 0 else 0)
        order.append(number)
        return threading.get_ident()

    futures = [lane.submit(call, number) for number in range(20)]
    threads = {future.result(timeout=60) for future in futures}
    assert order == list(range(20))
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    lane.close()


def test_an_interrupt_reaches_the_caller_and_stops_the_worker(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a step leaves the rows half done: no later plan runs over them."""
    executor = ready(config)

    def interrupt(*args: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "compute_logits", interrupt)
        with pytest.raises(KeyboardInterrupt):
            executor.execute(prefill(0, 0))
    with pytest.raises(QuireError, match="an earlier step failed"):
        executor.execute(prefill(1, 1)).result(timeout=60)
    executor.shutdown()


def test_a_panic_of_a_native_extension_is_the_future_s_and_the_thread_goes_on() -> None:
    thread = WorkerThread("test")
    failed, good = thread.submit(panic), thread.submit(lambda: 7)
    assert isinstance(failed.exception(60), Panic)
    assert good.result(60) == 7
    thread.close()


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_panic_in_a_step_is_carried_by_its_future(
    config: EngineConfig, queue_depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = ready(with_depth(config, queue_depth))
    monkeypatch.setattr(Decoder, "compute_logits", panic)
    failed, later = executor.execute(prefill(0, 0)), executor.execute(prefill(1, 1))
    with pytest.raises(Panic):
        failed.result()
    with pytest.raises(QuireError, match="an earlier step failed"):
        later.result()
    executor.shutdown()


def panic(*_: object) -> None:
    raise Panic("out of bounds")


def test_the_back_end_decides(bundled_model_path: Path) -> None:
    kinds = {"torch": CpuPlatform, "triton": CudaPlatform}
    for backend, kind in kinds.items():
        options = EngineOptions(model=str(bundled_model_path), device="cpu", attention_backend=backend)
        assert type(make_platform(resolve(options))) is kind


@pytest.mark.long
def test_a_cpu_needs_no_triton() -> None:
    """The Triton packages are blocked; the executor of the CPU is there all the same."""
    script = "import sys; sys.modules['triton'] = None; import quire.executors.local as local; local.LocalExecutor"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=200)
