"""A step is enqueued without asking the device for anything, and its result is taken later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import QuireError
from quire.executors.local import LocalExecutor
from quire.kernels.triton.runtime import recorded_launches
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.sampling_params import SamplingParams
from quire.step import SequenceFork, StepPlan, StepResult
from quire.worker.model_runner import Launched
from quire.worker.pending_step import PendingStep
from quire.worker.platform.device_step import copy_rounds
from quire.worker.platform.streams import HostStreams
from tests.worker.driver import Driver, sampling_of
from tests.worker.platform.conftest import DEVICE, MakeDriver

WAITING_OPERATORS = {
    "aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero", "aten.equal", "aten.unique2",
    "aten._unique2", "aten.unique_consecutive", "aten.bincount", "aten.item", "aten.repeat_interleave",
}  # fmt: skip
"""What makes a value or a size known to the host, or needs one from the device to go on."""
WAITING_METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")


@pytest.fixture(scope="module", autouse=True)
def plain_torch() -> None:
    """torch's own products: those of a fixed order read tensors, and no bits are compared here."""


class AskedError(Exception):
    """The host asked the device for a value."""


class NoQuestions(TorchDispatchMode):
    """Refuses operators that wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func).rsplit(".", 1)[0]
        by_mask = name in ("aten.index", "aten.index_put", "aten.index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITING_OPERATORS or by_mask:
            raise AskedError(name)
        return func(*args, **(kwargs or {}))


class Guard:
    """Refuses to let the host read tensors whose memory is not in `pinned`, while it is active; stands aside while a
    kernel runs, for the interpreter itself reads memory."""

    def __init__(self) -> None:
        self.pinned: set[int] = set()
        self.is_active = False
        self.num_launches = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in WAITING_METHODS:
            patch.setattr(torch.Tensor, name, self._refusing(name, getattr(torch.Tensor, name)))

    def _refusing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.is_active and tensor.untyped_storage().data_ptr() not in self.pinned:
                raise AskedError(f"Tensor.{name}")
            return method(tensor, *args, **kwargs)

        return read

    def launch(self, kernel: Any, grid: Any, args: Any, constants: Any) -> None:
        self.num_launches += 1
        was_active, self.is_active = self.is_active, False
        try:
            kernel[grid](*args, **constants)
        finally:
            self.is_active = was_active

    @contextmanager
    def nothing_is_asked(self) -> Iterator[None]:
        self.is_active = True
        try:
            with NoQuestions(), recorded_launches(self):
                yield
        finally:
            self.is_active = False


class PinnedStreams(HostStreams):
    """Tells the guard which memory is the host's."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = super().pinned(shape, dtype)
        self._guard.pinned.add(tensor.untyped_storage().data_ptr())
        return tensor


@pytest.fixture
def guard() -> Iterator[Guard]:
    with pytest.MonkeyPatch.context() as patch:
        guard = Guard()
        guard.install(patch)
        patch.setattr("quire.worker.platform.cuda.make_streams", lambda device: PinnedStreams(guard))
        yield guard


EVERYTHING = [
    sampling_of(SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1)),
    sampling_of(SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01), seed=3),
    sampling_of(
        SamplingParams(
            temperature=0,
            repetition_penalty=1.2,
            frequency_penalty=0.5,
            logit_bias={4: 1.0},
            allowed_token_ids=[3, 4, 5, 6],
            min_tokens=2,
        )
    ),
]


def test_the_device_is_asked_for_nothing(model_path: Path, guard: Guard, executors: list[LocalExecutor]) -> None:
    """Every kind of plan and of sampling, with Triton's kernels throughout."""
    options = {"model": str(model_path), "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 4, **DEVICE}
    executor = LocalExecutor(resolve(EngineOptions.from_keywords(options)))
    executors.append(executor)
    groups, layers_per_group = group_layers(executor.load_model(), 4)
    executor.allocate(KVCacheLayout(4, 40, groups, layers_per_group))

    def execute(plan: StepPlan) -> Any:
        with guard.nothing_is_asked():
            return executor.execute(plan)

    driver = Driver(execute, block_size=4, num_blocks=40)
    driver.add(0, [5, 9, 2, 8, 1], EVERYTHING[0])
    driver.add(1, [7, 7], EVERYTHING[2])
    driver.submit({0: 5, 1: 2}, [SequenceFork(0, 2, EVERYTHING[1])])
    driver.submit({0: 1, 1: 1, 2: 1})
    for _ in range(2):
        driver.apply()
    driver.release(1)
    driver.step({0: 1, 2: 1})
    assert guard.num_launches > 3 * 10
    assert len(driver.sequences[0].logprobs) == 3
    assert len(driver.sequences[0].prompt_logprobs) == 4
    assert len(driver.sequences[2].output) == 3


@pytest.mark.parametrize(
    "question",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.numpy(),
        lambda x: range(x[0]),
    ],
)
def test_the_guard_sees_questions(guard: Guard, question: Callable[[torch.Tensor], object]) -> None:
    tensor = torch.arange(4)
    with pytest.raises(AskedError), guard.nothing_is_asked():
        question(tensor)


def step_result(step_id: int) -> StepResult:
    return StepResult(step_id, [])


def test_a_result_is_collected_once_when_it_is_asked_for() -> None:
    calls: list[int] = []

    def collect() -> StepResult:
        calls.append(0)
        return step_result(7)

    pending = PendingStep(7, collect, None)
    assert not pending.done()
    assert pending.result() is pending.result()
    assert pending.done()
    assert len(calls) == 1


def test_a_later_result_settles_the_earlier_ones_first() -> None:
    order: list[int] = []

    def collecting(step_id: int) -> Callable[[], StepResult]:
        return lambda: (order.append(step_id), step_result(step_id))[1]

    previous = None
    steps = []
    for step_id in range(3):
        previous = PendingStep(step_id, collecting(step_id), previous)
        steps.append(previous)
    assert steps[2].result().step_id == 2
    assert order == [0, 1, 2]
    assert steps[0].done()


def test_steps_behind_a_failed_one_have_no_result() -> None:
    def fail() -> StepResult:
        raise QuireError("broken")

    first = PendingStep(0, fail, None)
    second = PendingStep(1, lambda: step_result(1), first)
    third = PendingStep(2, lambda: step_result(2), second)
    assert isinstance(third.exception(), QuireError)
    for _ in range(2):
        with pytest.raises(QuireError, match="broken"):
            first.result()
        with pytest.raises(QuireError, match="step 1 has no result, because an earlier step failed"):
            second.result()


def test_a_failure_is_known_however_many_steps_follow() -> None:
    def fail() -> StepResult:
        raise QuireError("broken")

    steps = [PendingStep(0, fail, None)]
    for step_id in range(1, 5000):
        steps.append(PendingStep(step_id, lambda: step_result(0), steps[-1]))
    assert not steps[-1].has_failed
    steps[0].settle()
    assert steps[-1].has_failed


def test_callbacks_hear_of_the_end_once() -> None:
    heard: list[str] = []
    pending = PendingStep(0, lambda: step_result(0), None)
    pending.add_done_callback(lambda step: heard.append(f"early: {step.result().step_id}"))
    assert heard == []
    pending.settle()
    pending.add_done_callback(lambda step: heard.append("late"))
    pending.settle()
    failed = PendingStep(1, None, None, QuireError("broken"))
    failed.add_done_callback(lambda step: heard.append(str(step.exception())))
    assert heard == ["early: 0", "late", "broken"]


def test_an_interrupt_while_waiting_is_the_callers() -> None:
    def interrupt() -> StepResult:
        raise KeyboardInterrupt

    first = PendingStep(0, interrupt, None)
    second = PendingStep(1, lambda: step_result(1), first)
    with pytest.raises(KeyboardInterrupt):
        second.result()
    assert first.has_failed


def test_nothing_runs_after_a_failure(
    make_driver: MakeDriver, executors: list[LocalExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind the failed one is under way already; the one behind that is not even enqueued."""
    driver = make_driver()

    def broken(*_args: object) -> StepResult:
        raise QuireError("the device is gone")

    driver.add(1, [50])
    with monkeypatch.context() as patch:
        patch.setattr(Launched, "collect", broken)
        driver.submit({1: 1})
        driver.submit({1: 1})
        with pytest.raises(QuireError, match="the device is gone"):
            driver.apply()
    driver.submit({1: 1})
    with pytest.raises(QuireError, match="step 1 has no result, because an earlier step failed"):
        driver.apply()
    with pytest.raises(QuireError, match="step 2 was not run, because an earlier step failed"):
        driver.apply()


def test_an_error_while_enqueuing_is_carried_by_the_result(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(0, [1, 2])
    driver.submit({0: 2})
    driver.sequences[0].computed += 1
    driver.submit({0: 1})
    assert driver.apply().token_ids
    with pytest.raises(AssertionError, match="no step has sampled"):
        driver.apply()


def test_shutdown_with_steps_under_way(make_driver: MakeDriver, executors: list[LocalExecutor]) -> None:
    driver = make_driver()
    driver.add(0, [1, 2])
    driver.submit({0: 2})
    driver.submit({0: 1})
    executors[-1].shutdown()
    executors[-1].shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        driver.submit({0: 1})


def test_chains_of_block_copies_are_cut_into_rounds() -> None:
    assert list(copy_rounds([])) == []
    assert list(copy_rounds([(1, 2), (3, 4), (1, 5)])) == [[(1, 2), (3, 4), (1, 5)]]
    assert list(copy_rounds([(6, 7), (1, 2), (2, 3), (3, 4)])) == [[(6, 7), (3, 4)], [(2, 3)], [(1, 2)]]
    with pytest.raises(AssertionError, match="cycle"):
        list(copy_rounds([(1, 2), (2, 1)]))
