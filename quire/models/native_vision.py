"""A vision tower whose stages are recorded once and then run as native programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from quire.attention.native_encoder import NativeEncoder, NativeEncoderStep
from quire.kernels.cpu import _native
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.recorder import Buffer, RecordedProgram, Recorder, Scratch, rounded_rows
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kernels.value import Value
from quire.models.vision import Merger, VisionTower, split_features
from quire.models.vision_grid import Grid

Record = Callable[..., Value]
"""Takes the placeholders of a program's inputs and gives its result's."""


class NativeVision:
    """VisionEncoder over native kernels. `tower` was built with native layers.

    Its programs share working memory, and pass hidden states on in memory of this object: one is as long as a run of
    layers, so that other work can run between two of them. Programs are made for powers of two of rows."""

    def __init__(self, tower: VisionTower, runtime: NativeRuntime) -> None:
        self._tower = tower
        self.config = tower.config
        self._runtime = runtime
        self._backend = NativeEncoder(tower.context.dtype == torch.bfloat16)
        self._arena, self._scratch = Scratch(), Scratch()
        self._programs: dict[object, RecordedProgram] = {}

    def encode(self, patches: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        with torch.inference_mode():
            return self._encode(patches, grids)

    def weight_bytes(self) -> int:
        return self._tower.weight_bytes()

    def release_workspaces(self) -> None:
        self._programs.clear()
        self._arena.release()
        self._scratch.release()

    def _encode(self, patches: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        tower, config = self._tower, self.config
        inputs, positions = tower.inputs(grids)
        size, num_patches = config.hidden_size, len(patches)
        rotation = torch.cat((inputs.angles.cos(), inputs.angles.sin()), dim=1)
        x, spare = (allocate(4 * num_patches * size).view(torch.float32).view(num_patches, size) for _ in range(2))
        self._run("embed", tower.embed, (patches, positions), x)
        deepstack = []
        step = self._backend.plan(inputs.attention_batch)
        for stage in range(len(tower.stages)):
            self._run_stage(stage, x, rotation, step, spare)
            x, spare = spare, x
            merger = tower.deepstack_merger(stage)
            if merger is not None:
                deepstack.append(self._merge(merger, x))
        self._run("norm", tower.merger.norm_patches, (x,), spare)
        return split_features([self._merge(tower.merger, spare), *deepstack], grids, config)

    def _merge(self, merger: Merger, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T / merge_size ** 2, output_size]."""
        merged = x.view(-1, self.config.merged_size)
        out = allocate(4 * len(merged) * self.config.output_size).view(torch.float32)
        return self._run(merger, merger, (merged,), out.view(len(merged), self.config.output_size))

    def _run_stage(
        self, stage: int, x: torch.Tensor, rotation: torch.Tensor, step: NativeEncoderStep, out: torch.Tensor
    ) -> None:
        def record(hidden: Buffer, turns: Buffer) -> Value:
            return self._tower.run_stage(stage, hidden, turns, step)

        self._run(("stage", stage), record, (x, rotation), out, step.encoder)

    def _run(
        self,
        key: object,
        record: Record,
        inputs: Sequence[torch.Tensor],
        out: torch.Tensor,
        plan: _native.EncoderPlan | None = None,
    ) -> torch.Tensor:
        """Run what `record` records over the inputs' rows, into `out`. key: of the program."""
        num_rows = len(out)
        program = self._programs.get(key)
        if program is None or program.max_rows < num_rows:
            self._programs.pop(key, None)
            widths = [rows.shape[1] for rows in (*inputs, out)]
            program = self._programs[key] = self._record(record, widths, num_rows)
        program.run(num_rows, (), () if plan is None else plan, [*inputs, out])
        return out

    def _record(self, record: Record, widths: Sequence[int], num_rows: int) -> RecordedProgram:
        """widths: of the inputs and the result, whose rows lie one behind the other."""
        recorder = Recorder()
        *inputs, out = (recorder.external(width, width) for width in widths)
        result = cast("Buffer", record(*inputs))
        recorder.redirect(result, out)
        return recorder.finish_program(result, self._runtime, rounded_rows(num_rows), self._scratch, arena=self._arena)
