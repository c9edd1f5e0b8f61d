"""Launches without Triton's work: never another compiled kernel than Triton would take, never other arguments."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from quire.kernels.triton import bound_launch
from quire.kernels.triton.bound_launch import CompiledLaunches
from quire.kernels.triton.runtime import bind, launch, recorded_launches
from tests.kernels.triton.test_launch import Recorder


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["column"])
def _scale(out, column, bias, count, stride, factor, LITERAL: tl.constexpr, SIZE: tl.constexpr):
    where = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + where, tl.load(out + where) * factor + LITERAL)


def compiled_function() -> Any:
    """`_scale` as it is where Triton compiles; here it may be interpreted."""
    return JITFunction(_scale.fn, do_not_specialize=["count"], do_not_specialize_on_alignment=["column"])


class Enqueued:
    """Stands for a kernel that Triton has compiled."""

    def __init__(self, name: str = "kernel", scratch: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.name, self.function, self.packed_metadata = name, id(self), (4, 1, 0)
        self.run: Any = CudaLauncher.__new__(CudaLauncher)
        settings = {"launch_cooperative_grid": False, "launch_pdl": True, "profile_scratch_size": 0}
        alignments = {"global_scratch_align": 1, "profile_scratch_align": 1}
        vars(self.run).update(settings, **alignments, launch=self._note, global_scratch_size=scratch, num_ctas=1)

    def _note(self, *args: Any) -> None:
        self.calls.append(args)


class FakeDriver:
    device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 700 + device


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(bound_launch, "driver", SimpleNamespace(active=fake))
    return fake


def at(offset: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that begins `offset` bytes past a multiple of 16."""
    memory = torch.zeros(256, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + offset
    return memory[start : start + 64].view(dtype)


def test_a_known_launch_gets_what_triton_hands_over() -> None:
    weights, enqueued = at(0), Enqueued()
    launches = CompiledLaunches(compiled_function(), {"bias": weights, "factor": 0.5}, {"SIZE": 16})
    out, column = at(0), at(4)
    assert not launches.launch((3,), (out, column, 7, 16, 5)), "no kernel is known yet"
    launches.add_compiled((out, column, 7, 16, 5), enqueued)
    later, other = at(0), at(8)
    assert launches.launch((3, 2), (later, other, 9, 32, 5))
    (call,) = enqueued.calls
    assert call[:6] == (3, 2, 1, 700, enqueued.function, False)
    assert (call[6], call[9]) == (True, enqueued.packed_metadata)
    # Compile-time arguments have a place and are ignored.
    assert call[13:19] == (later.data_ptr(), other.data_ptr(), weights.data_ptr(), 9, 32, 0.5)
    assert len(call) == 21


ARGS = {"out": at(0), "column": at(0), "bias": at(0), "count": 7, "stride": 32, "factor": 0.5, "literal": 5}


@pytest.mark.parametrize(
    "changed",
    [
        {"out": at(4)},
        {"out": at(8)},
        {"out": at(0, torch.bfloat16)},
        {"column": at(4, torch.int32)},
        {"bias": None},
        {"stride": 1},
        {"stride": 33},
        {"stride": 2**31},
        {"stride": 2**63},
        {"stride": -(2**31) - 16},
        {"stride": 32.0},
        {"stride": True},
        {"factor": 1},
        {"literal": 6},
        {"literal": 5.0},
    ],
    ids=str,
)
def test_arguments_of_another_kind_never_get_the_kernel_at_hand(changed: dict[str, Any]) -> None:
    first, second = Enqueued(), Enqueued()
    launches = CompiledLaunches(compiled_function(), {}, {"SIZE": 16})
    usual, unusual = tuple(ARGS.values()), tuple((ARGS | changed).values())
    launches.add_compiled(usual, first)
    assert launches.launch((1,), usual)
    assert not launches.launch((1,), unusual)
    launches.add_compiled(unusual, second)
    for args in (usual, unusual, unusual, usual):
        assert launches.launch((1,), args)
    assert (len(first.calls), len(second.calls)) == (3, 2)


def test_what_triton_does_not_tell_apart_is_not_told_apart() -> None:
    """Batch columns lie at any multiple of four bytes, counts are anything: no launch of theirs goes Triton's way."""
    enqueued = Enqueued()
    launches = CompiledLaunches(compiled_function(), {}, {"SIZE": 16})
    launches.add_compiled(tuple(ARGS.values()), enqueued)
    assert launches.launch((1,), tuple((ARGS | {"column": at(4), "stride": 64, "factor": 3.5}).values()))


def random_args(choice: random.Random) -> tuple[Any, ...]:
    def tensor() -> torch.Tensor:
        return at(choice.choice([0, 0, 0, 4]), choice.choice([torch.float32, torch.bfloat16]))

    integers = [
        0,
        1,
        2,
        16,
        17,
        48,
        -1,
        -16,
        2**31 - 1,
        2**31,
        -(2**31),
        -(2**31) - 1,
        2**40,
        2**63 - 16,
        2**63,
        2**64 - 16,
    ]
    numbers = [*integers, 0.0, 1.0, 0.5, True, False, None]
    first = tensor(), tensor(), choice.choice([None, tensor()])
    return (
        *first,
        choice.choice(integers),
        choice.choice(numbers),
        choice.choice([0.0, 0.5]),
        choice.choice([0, 1, 1.0]),
    )


def test_equal_keys_mean_one_kernel_of_triton() -> None:
    """Over thousands of random pairs of calls, one kernel's arguments after another's."""
    function = compiled_function()
    binder = create_function_from_signature(
        function.signature, function.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    launches = CompiledLaunches(function, {}, {"SIZE": 16})
    kernels: dict[str, Enqueued] = {}
    choice, num_known = random.Random(1), 0
    for _ in range(15000):
        args = random_args(choice)
        _, specialization, _ = binder(*args, SIZE=16)
        wanted = kernels.setdefault(repr(specialization), Enqueued())
        before = len(wanted.calls)
        if launches.launch((1,), args):
            num_known += 1
            assert len(wanted.calls) == before + 1, f"another kernel than Triton's for {args}"
        else:
            launches.add_compiled(args, wanted)
    assert num_known > 1000, "the test has compared something"


def test_devices_have_kernels_of_their_own(driver: FakeDriver) -> None:
    launches = CompiledLaunches(compiled_function(), {}, {"SIZE": 16})
    args = tuple(ARGS.values())
    launches.add_compiled(args, Enqueued())
    driver.device = 1
    assert not launches.launch((1,), args)
    second = Enqueued()
    launches.add_compiled(args, second)
    assert launches.launch((1,), args)
    assert second.calls[0][3] == 701


@pytest.fixture
def hook() -> Iterator[None]:
    def note(metadata: Any) -> None:
        return

    knobs.runtime.launch_enter_hook.add(note)
    yield
    knobs.runtime.launch_enter_hook.remove(note)


def test_a_profilers_hook_is_tritons_to_call(hook: None) -> None:
    launches = CompiledLaunches(compiled_function(), {}, {"SIZE": 16})
    launches.add_compiled(tuple(ARGS.values()), Enqueued())
    assert not launches.launch((1,), tuple(ARGS.values()))


class OtherLauncher:
    """Of a version of Triton that hands other settings over, and the arguments in other ways."""

    def __init__(self, enqueued: Enqueued, layout: str) -> None:
        self.launch, self._layout = enqueued._note, layout

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, *rest: Any) -> None:
        _, enter, leave, *args = rest
        if self._layout == "more settings":
            self.launch(x, y, z, stream, function, metadata, "flag", enter, leave, *args)
        elif self._layout == "arguments in one tuple":
            self.launch(x, y, z, stream, function, metadata, (*args,))
        elif self._layout == "settings that hold arguments":
            self.launch(x, y, z, stream, function, [args[0]], *args)
        elif self._layout == "stream first":
            self.launch(stream, x, y, z, function, *args)
        else:
            raise TypeError("a number was expected")


def other(layout: str) -> Enqueued:
    enqueued = Enqueued()
    enqueued.run = OtherLauncher(enqueued, layout)
    return enqueued


def test_a_launcher_with_other_settings_gets_those() -> None:
    launches, enqueued = CompiledLaunches(compiled_function(), {}, {"SIZE": 16}), other("more settings")
    launches.add_compiled(tuple(ARGS.values()), enqueued)
    assert launches.launch((3, 2), tuple(ARGS.values()))
    (call,) = enqueued.calls
    assert call[:9] == (3, 2, 1, 700, enqueued.function, enqueued.packed_metadata, "flag", None, None)
    assert call[9:12] == tuple(ARGS[name].data_ptr() for name in ("out", "column", "bias"))


UNKNOWN = ["arguments in one tuple", "settings that hold arguments", "stream first", "refuses marks"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        *((lambda name=name: other(name), "other arguments") for name in UNKNOWN),
        (lambda: Enqueued(scratch=64), "scratch memory"),
    ],
    ids=[*UNKNOWN, "scratch"],
)
def test_what_cannot_be_launched_directly_is_tritons_and_said_once(
    make: Callable[[], Enqueued], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By two call sites, over many launches."""
    bound_launch._report_launches_by_triton.cache_clear()
    args = tuple(ARGS.values())
    with caplog.at_level(logging.WARNING, "quire"):
        for _ in range(2):
            enqueued, launches = make(), CompiledLaunches(compiled_function(), {}, {"SIZE": 16})
            for _ in range(3):
                assert not launches.launch((1,), args)
                launches.add_compiled(args, enqueued)
            assert launches.is_tritons
            assert enqueued.calls == []
    (record,) = caplog.records
    assert record.getMessage().startswith(f"Triton {triton.__version__} launches kernels itself")
    assert reason in record.getMessage()


def test_threads_do_not_mix_up_numbers() -> None:
    """Two threads whose numbers mean different kernels, at one call site."""
    launches = CompiledLaunches(compiled_function(), {}, {"SIZE": 16})
    kernels = {stride: Enqueued() for stride in (1, 32)}
    calls = {stride: tuple((ARGS | {"stride": stride}).values()) for stride in kernels}
    for stride, kernel in kernels.items():
        launches.add_compiled(calls[stride], kernel)
    threads = [
        threading.Thread(target=lambda args=args: [launches.launch((1,), args) for _ in range(2000)])
        for args in calls.values()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for stride, kernel in kernels.items():
        assert {call[17] for call in kernel.calls} == {stride}
        assert len(kernel.calls) == 2000


@triton.jit
def _add(out, step, other, SIZE: tl.constexpr):
    where = tl.arange(0, SIZE)
    tl.store(out + where, tl.load(out + where) + step * tl.load(other + where))


def test_a_bound_kernel_is_the_kernel(device: torch.device) -> None:
    out, other = torch.zeros(16, device=device), torch.ones(16, device=device)
    bound = bind(_add, {"step": 3}, SIZE=16)
    bound((1,), out, other)
    launch(_add, (1,), out, 4, other, SIZE=16)
    assert out.tolist() == [7.0] * 16


def test_a_recorder_sees_all_arguments_of_a_bound_kernel(device: torch.device) -> None:
    out, other, recorder = torch.zeros(16, device=device), torch.ones(16, device=device), Recorder()
    with recorded_launches(recorder):
        bind(_add, {"step": 3}, SIZE=16)((1,), out, other)
    ((kernel, _, args, constants),) = recorder.launches
    assert (kernel, constants) == (_add, {"SIZE": 16})
    assert [args[0] is out, args[1], args[2] is other] == [True, 3, True]
    with pytest.raises(ValueError, match="shorter"):
        bind(_add, {"step": 3}, SIZE=16)((1,), out)
