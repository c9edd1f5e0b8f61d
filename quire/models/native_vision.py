"""Vision tower whose layers are recorded once and then run as native programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from quire.attention.native_encoder import NativeEncoder
from quire.kernels.cpu import _native
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.recorder import Buffer, RecordedProgram, Recorder, Scratch, rounded_rows
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kernels.value import Value
from quire.models.vision import EncoderRun, Merger, VisionEncoder, VisionTower
from quire.models.vision_grid import Grid, GridInputs

Record = Callable[..., Value]
"""Function from placeholders of a program's inputs to its result's."""


class NativeVision(VisionEncoder):
    """Vision encoder over native kernels; `tower` must have native layers. One program per layer; they share working
    memory."""

    def __init__(self, tower: VisionTower, runtime: NativeRuntime) -> None:
        super().__init__(tower)
        self._runtime = runtime
        self._arena, self._scratch = Scratch(), Scratch()
        self._programs: dict[object, RecordedProgram] = {}

    def begin_run(self, patches: torch.Tensor, grids: Sequence[Grid]) -> EncoderRun:
        return NativeRun(self._tower, self.run, patches, grids)

    def release_workspaces(self) -> None:
        self._programs.clear()
        self._arena.release()
        self._scratch.release()

    def run(
        self,
        key: object,
        record: Record,
        inputs: Sequence[torch.Tensor],
        out: torch.Tensor,
        plan: _native.EncoderPlan | None = None,
    ) -> torch.Tensor:
        """Run the program `key` over the inputs' rows into `out`, recording it with `record` if needed."""
        num_rows = len(out)
        program = self._programs.get(key)
        if program is None or program.max_rows < num_rows:
            self._programs.pop(key, None)
            widths = [rows.shape[1] for rows in (*inputs, out)]
            program = self._programs[key] = self._record(record, widths, num_rows)
        program.run(num_rows, (), () if plan is None else plan, [*inputs, out])
        return out

    def _record(self, record: Record, widths: Sequence[int], num_rows: int) -> RecordedProgram:
        recorder = Recorder()
        *inputs, out = (recorder.external(width, width) for width in widths)
        result = cast("Buffer", record(*inputs))
        recorder.redirect(result, out)
        return recorder.finish_program(result, self._runtime, rounded_rows(num_rows), self._scratch, arena=self._arena)


class NativeRun(EncoderRun):
    def __init__(
        self, tower: VisionTower, run: Callable[..., torch.Tensor], patches: torch.Tensor, grids: Sequence[Grid]
    ) -> None:
        self._run = run
        super().__init__(tower, patches, grids)

    def _begin(self, inputs: GridInputs, patches: torch.Tensor, positions: list[torch.Tensor]) -> None:
        tower, size = self._tower, self._tower.config.hidden_size
        is_narrow = tower.context.dtype == torch.bfloat16
        self._steps = [NativeEncoder(is_narrow).plan(batch) for batch in inputs.attention_batches]
        self._rotation: list[torch.Tensor] = []
        """Rotation, if any."""
        if not tower.config.is_pooled:
            self._rotation.append(torch.cat((inputs.angles.cos(), inputs.angles.sin()), dim=1))
        self._x, self._spare = _rows(len(patches), size), _rows(len(patches), size)
        self._run("embed", tower.embed, (patches, *positions), self._x)

    def _compute(self, layer: int, *, in_windows: bool) -> None:
        step = self._steps[in_windows]

        def record(hidden: Buffer, turns: Buffer | None = None) -> Value:
            return self._tower.run_layer(layer, hidden, turns, step)

        self._run(layer, record, (self._x, *self._rotation), self._spare, step.encoder)
        self._x, self._spare = self._spare, self._x

    def _merge(self, merger: Merger) -> torch.Tensor:
        config, x = self._tower.config, self._x
        if not merger.norms_merged:
            x = self._run("norm", merger.norm_patches, (x,), self._spare)
        merged = merger.gather(x)
        return self._run(merger, merger, (merged,), _rows(len(merged), config.output_size))


def _rows(count: int, width: int) -> torch.Tensor:
    return allocate(4 * count * width).view(torch.float32).view(count, width)
