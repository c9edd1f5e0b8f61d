"""The one call that starts kernels, and what tests may put in its place."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import Grid, launch, recorded_launches


@triton.jit
def _add_index(out, step, SIZE: tl.constexpr):
    where = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + where, tl.load(out + where) + where * step)


class Recorder:
    def __init__(self) -> None:
        self.launches: list[tuple[Any, Grid, Sequence[Any], Mapping[str, Any]]] = []

    def launch(self, kernel: Any, grid: Grid, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        self.launches.append((kernel, grid, args, constants))


def test_a_launch_runs_the_kernel(device: torch.device) -> None:
    out = torch.zeros(32, device=device)
    launch(_add_index, (2,), out, 3, SIZE=16)
    assert out.tolist() == [3.0 * index for index in range(32)]


def test_a_recorder_gets_the_very_arguments_instead(device: torch.device) -> None:
    out, recorder = torch.zeros(32, device=device), Recorder()
    with recorded_launches(recorder):
        launch(_add_index, (2,), out, 3, SIZE=16)
    assert not out.any()
    ((kernel, grid, args, constants),) = recorder.launches
    assert (kernel, grid, args[0] is out, args[1], constants) == (_add_index, (2,), True, 3, {"SIZE": 16})
    launch(_add_index, (1,), out, 1, SIZE=16)
    assert out[15] == 15


def test_a_recorder_ends_with_an_error_and_hears_its_own_thread_only(device: torch.device) -> None:
    out, recorder = torch.zeros(16, device=device), Recorder()
    other = threading.Thread(target=launch, args=(_add_index, (1,), out, 1), kwargs={"SIZE": 16})

    def fail() -> None:
        with recorded_launches(recorder):
            other.start()
            other.join()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert out[1] == 1
    launch(_add_index, (1,), out, 1, SIZE=16)
    assert out[1] == 2
    assert recorder.launches == []
