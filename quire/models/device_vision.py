"""Vision tower on a device, by Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.attention.triton_backend import TritonEncoderStep
from quire.kernels.rotation import DeviceRotation
from quire.models.vision import EncoderRun, TorchRun, TorchVision
from quire.models.vision_grid import Grid, GridInputs, copied_to


class DeviceVision(TorchVision):
    """Encoder over a device's kernels; `tower` must have a device's layers. The host waits for no kernel."""

    def begin_run(self, patches: torch.Tensor, grids: Sequence[Grid]) -> EncoderRun:
        return DeviceRun(self._tower, patches, grids)


class DeviceRun(TorchRun):
    def _begin(self, inputs: GridInputs, patches: torch.Tensor, positions: list[torch.Tensor]) -> None:
        context = self._tower.context
        starts = [each for each in (inputs.query_start, inputs.window_start) if each is not None]
        self._steps = [TritonEncoderStep(copied_to(each.int(), context.device)) for each in starts]
        self._rotation = None
        if not self._tower.config.is_pooled:
            angles = copied_to(inputs.angles, context.device)
            self._rotation = DeviceRotation(angles.cos(), angles.sin())
        self._x = self._tower.embed(copied_to(patches, context.device).to(context.dtype), *positions)
