"""cos and sin of a step's positions, computed once for all layers. Limit: the launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import launch

ROWS = 16


@triton.jit(do_not_specialize=["num_rows"])
def _angles_kernel(
    positions, heights, widths, axes, frequencies, cos, sin, num_rows, half, magnitude,
    HAS_GRID: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < half)[None, :]
    position = tl.load(positions + rows, mask=rows < num_rows, other=0).to(tl.float32)
    frequency = tl.load(frequencies + columns, mask=columns < half, other=0.0)
    if HAS_GRID:
        axis = tl.load(axes + columns, mask=columns < half, other=0)[None, :]
        height = tl.load(heights + rows, mask=rows < num_rows, other=0).to(tl.float32)
        width = tl.load(widths + rows, mask=rows < num_rows, other=0).to(tl.float32)
        of_grid = tl.where(axis == 1, height[:, None], width[:, None])
        angles = tl.where(axis == 0, position[:, None], of_grid) * frequency[None, :]
    else:
        angles = position[:, None] * frequency[None, :]
    at = rows[:, None] * half + columns[None, :]
    tl.store(cos + at, tl.cos(angles) * magnitude, mask=inside)
    tl.store(sin + at, tl.sin(angles) * magnitude, mask=inside)


def rotation_angles(
    positions: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    magnitude: float,
    grid: Sequence[torch.Tensor] = (),
    axes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin of rotary positions. positions: [T] int32 or int64. inverse_frequencies: [rotary_dim / 2] float32,
    same device. grid, axes: see `Operations.rotation` and RotaryFrequencies. Returns [T, rotary_dim / 2] float32 each,
    times the magnitude."""
    assert axes is not None or not grid, "a rotation by a grid says which elements turn by which of its axes"
    num_rows, half = len(positions), len(inverse_frequencies)
    heights, widths = grid or (positions, positions)
    cos, sin = torch.empty(2, num_rows, half, dtype=torch.float32, device=positions.device).unbind(0)
    if num_rows:
        launch(
            _angles_kernel,
            (triton.cdiv(num_rows, ROWS),),
            positions,
            heights,
            widths,
            axes if grid else positions,
            inverse_frequencies,
            cos,
            sin,
            num_rows,
            half,
            magnitude,
            HAS_GRID=bool(grid),
            ROWS=ROWS,
            BLOCK=triton.next_power_of_2(half),
            num_warps=4,
        )
    return cos, sin
