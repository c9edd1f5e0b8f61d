"""Passes with adapters and without: graphs of their own, and no kernel of adapters where no row has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.model import ModelConfig
from quire.kernels.triton.runtime import recorded_launches
from quire.layers.adapters import Adapters, LowRank
from quire.layers.device_adapters import DeviceAdapterStorage
from quire.worker.platform.streams import HostStreams
from tests.long import all_but_long
from tests.worker.platform.passes import SETTINGS, Passes, tiny_config
from tests.worker.platform.test_graphs import random_steps

pytestmark = pytest.mark.usefixtures("no_overflow_checks")

KERNELS = {"_shrink_kernel", "_look_up_kernel", "_expand_kernel"}
SLOTS = {1: 1, 2: 2, 5: 1}
"""Of rows; the others have no adapter."""


@pytest.fixture
def config(bundled_model_path: Path) -> ModelConfig:
    return tiny_config(bundled_model_path)


def adapted(config: ModelConfig, kind: str, seed: int = 1) -> tuple[Passes, Adapters]:
    """Passes whose rows have adapters by SLOTS: of rank 3 in slot 1, and 2 in slot 2."""
    adapters = Adapters(DeviceAdapterStorage(2, 8, torch.float32, HostStreams()))
    passes = Passes(config, replace(SETTINGS[kind], adapts=True), adapters=adapters)
    passes.slots = dict(SLOTS)
    fill(adapters, seed)
    return passes, adapters


def fill(adapters: Adapters, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for stack, _ in adapters.stacks:
        for slot, rank in ((1, 3), (2, 2)):
            for piece, parts in enumerate(stack.pieces):
                a = torch.randn(rank, stack.in_features, generator=generator)
                b = [torch.randn(stack.parts[part].local, rank, generator=generator) for part in parts]
                adapters.storage.load(stack, slot, piece, LowRank(a, b, 0.1))


def num_kernels(adapters: Adapters) -> int:
    """Of a pass, which has all layers but the head."""
    return 2 * (len(adapters.stacks) - 1)


class Counting:
    """Runs kernels, and counts them by name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def launch(self, kernel: Any, grid: Any, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        self.names.append(kernel.__name__)
        kernel[grid](*args, **constants)


@pytest.mark.parametrize("kind", all_but_long(["both", "full", "piecewise"], ["both"]))
def test_graphs_compute_what_the_eager_pass_computes(config: ModelConfig, kind: str) -> None:
    (graphs, of_graphs), (eager, of_eager), plain = (
        adapted(config, kind),
        adapted(config, "eager"),
        Passes(config, SETTINGS["eager"]),
    )
    differ = 0
    for number, step in enumerate(random_steps(11, 9)):
        if number == 6:  # graphs read what is in the slots now
            fill(of_graphs, 2)
            fill(of_eager, 2)
        found, expected, base = graphs.run(*step), eager.run(*step), plain.run(*step)
        assert torch.equal(found, expected)
        differ += not torch.equal(found, base)
    assert differ
    assert {key.adapts for key in graphs.passes._captured} == {False, True}


def test_steps_without_adapters_launch_no_kernel_of_them(config: ModelConfig) -> None:
    passes, adapters = adapted(config, "eager")
    for row, expected in ((0, 0), (1, num_kernels(adapters))):
        counting = Counting()
        with recorded_launches(counting):
            passes.run([row, 3], [0, 0], [[1, 2], [3]])
        assert sum(name in KERNELS for name in counting.names) == expected


def test_graphs_without_adapters_hold_no_kernel_of_them(config: ModelConfig) -> None:
    passes, adapters = adapted(config, "full")
    for execution in passes.settings.executions():
        before = len(passes.capture.graphs)
        with torch.inference_mode():
            passes.passes.run(execution, *passes.buffers.padded(execution))
        (graph,) = passes.capture.graphs[before:]
        names = [launch.kernel.__name__ for launch in graph.launches]
        expected = num_kernels(adapters) if execution.adapts else 0
        assert sum(name in KERNELS for name in names) == expected
