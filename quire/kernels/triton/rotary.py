"""cos and sin of one step's positions, computed once and read by every layer.

Limit: the launch. 8 bytes an element are written, a few hundred kilobytes for the largest step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import launch

ROWS = 16


@triton.jit(do_not_specialize=["num_rows"])
def _angles_kernel(
    positions, frequencies, cos, sin, num_rows, half, magnitude, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < half)[None, :]
    position = tl.load(positions + rows, mask=rows < num_rows, other=0).to(tl.float32)
    frequency = tl.load(frequencies + columns, mask=columns < half, other=0.0)
    angles = position[:, None] * frequency[None, :]
    at = rows[:, None] * half + columns[None, :]
    tl.store(cos + at, tl.cos(angles) * magnitude, mask=inside)
    tl.store(sin + at, tl.sin(angles) * magnitude, mask=inside)


def rotation_angles(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, magnitude: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions: [T] int32 or int64. inverse_frequencies: [rotary_dim / 2] float32, on the same device. Returns cos and
    sin of position * frequency, times the magnitude: [T, rotary_dim / 2] float32 each."""
    num_rows, half = len(positions), len(inverse_frequencies)
    cos, sin = torch.empty(2, num_rows, half, dtype=torch.float32, device=positions.device).unbind(0)
    if num_rows:
        launch(
            _angles_kernel,
            (triton.cdiv(num_rows, ROWS),),
            positions,
            inverse_frequencies,
            cos,
            sin,
            num_rows,
            half,
            magnitude,
            ROWS=ROWS,
            BLOCK=triton.next_power_of_2(half),
            num_warps=4,
        )
    return cos, sin
