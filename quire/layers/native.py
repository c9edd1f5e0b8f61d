"""Operations whose kernels are recorded for native execution."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from quire.attention.native_encoder import NativeEncoder
from quire.kernels.arguments import HeadWeights, NormWeights, RotaryFrequencies, Routing
from quire.kernels.cpu import _native
from quire.kernels.cpu.recorder import TOKEN_IDS, Buffer, RecordedIndices, RecordedRows
from quire.layers.adapters import AdapterStack
from quire.layers.encoder_operations import EncoderHeads
from quire.layers.native_adapters import record_adapted
from quire.layers.native_cache import NativeCacheOperations, address_of
from quire.layers.native_states import NativeStates
from quire.layers.operations import gather_columns, norm_shares, require_equal_widths
from quire.parallel.interface import ProcessGroup


class NativeEncoderOperations:
    """EncoderOperations over a recorder's placeholders. A run brings the plan of its step."""

    def attend_encoder(self, heads: EncoderHeads, qkv: Buffer, rotation: Buffer | None, step: NativeEncoder) -> Buffer:
        return qkv.recorder.call(
            "attend_encoder",
            heads.num_heads * heads.head_dim,
            buffers={"qkv": qkv, "rotation": rotation},
            num_heads=heads.num_heads,
            head_dim=heads.head_dim,
            scale=heads.scale,
            window=heads.window or 0,
            rotary_dim=0 if rotation is None else rotation.width,
        )


class NativeOperations(NativeCacheOperations, NativeEncoderOperations, NativeStates):
    """Instance of Operations over a recorder's placeholders. The step that `attend` takes is the back end itself:
    a program is recorded for the memory of one pool."""

    def norm(self, weights: NormWeights, x: Buffer) -> Buffer:
        x.recorder.keep.append(weights)
        return x.recorder.call(
            "norm",
            x.width,
            buffers={"x": x},
            weight=address_of(weights.weight),
            bias=address_of(weights.bias),
            epsilon=weights.epsilon,
            subtract_mean=weights.centred,
            width=x.width,
        )

    def norm_columns(self, weights: NormWeights, x: Buffer, start: int) -> Buffer:
        x.recorder.keep.append(weights)
        return x.recorder.call(
            "norm",
            x.width,
            over=x,
            in_place=True,
            first_column=start,
            buffers={"x": x},
            weight=address_of(weights.weight),
            bias=address_of(weights.bias),
            epsilon=weights.epsilon,
            subtract_mean=weights.centred,
            width=weights.size,
        )

    def rotation(
        self, frequencies: RotaryFrequencies, positions: RecordedIndices, grid: Sequence[RecordedIndices] = ()
    ) -> Buffer:
        for each in (positions, *grid):
            assert each.column != TOKEN_IDS, "rotations are of positions"
            assert each.shift == 0, "of the positions themselves"
        by_grid: dict[str, Any] = {}
        if grid:
            assert frequencies.axes is not None, "a rotation by a grid says which elements turn by which of its axes"
            by_grid = {"axes": frequencies.axes.data_ptr(), "grid": [each.column for each in grid]}
        positions.recorder.keep.append(frequencies)
        rotary_dim = 2 * len(frequencies.inverse_frequencies)
        return positions.recorder.call(
            "rotation",
            rotary_dim,
            inverse_frequencies=address_of(frequencies.inverse_frequencies),
            rotary_dim=rotary_dim,
            magnitude=frequencies.magnitude,
            column=positions.column,
            **by_grid,
        )

    def check_heads(self, heads: HeadWeights) -> None:
        require_equal_widths(heads, "native")

    def gather_rows(self, x: Buffer, rows: RecordedRows) -> Buffer:
        return rows.recorder.gather(x)

    def add(self, x: Buffer, y: Buffer) -> Buffer:
        return _elementwise(_native.Elementwise.ADD, x, y)

    def multiply(self, x: Buffer, y: Buffer) -> Buffer:
        return _elementwise(_native.Elementwise.MULTIPLY, x, y)

    def gate(self, x: Buffer, y: Buffer) -> Buffer:
        return _elementwise(_native.Elementwise.GATE, x, y)

    def scale(self, x: Buffer, factor: float) -> Buffer:
        return _elementwise(_native.Elementwise.SCALE, x, None, factor)

    def soft_cap(self, x: Buffer, cap: float) -> Buffer:
        return _elementwise(_native.Elementwise.SOFT_CAP, x, None, cap)

    def route(self, routing: Routing, logits: Buffer) -> Buffer:
        assert routing.group_best <= 2, "a group is as good as its best expert, or its two best"
        logits.recorder.keep.append(routing)
        return logits.recorder.call(
            "route",
            2 * routing.top_k,
            buffers={"logits": logits},
            num_experts=routing.num_experts,
            top_k=routing.top_k,
            sigmoid=routing.scoring == "sigmoid",
            renormalise=routing.renormalise,
            factor=routing.factor,
            bias=address_of(routing.bias),
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            group_best=routing.group_best,
        )

    def gate_rows(self, x: Buffer, gate: Buffer) -> Buffer:
        return _elementwise(_native.Elementwise.GATE_ROWS, x, gate)

    def all_reduce(self, group: ProcessGroup, x: Buffer) -> Buffer:
        if group.native is None:
            return x.recorder.call_torch(group.all_reduce, x.width, [x])
        return x.recorder.call("all_reduce", x.width, over=x, buffers={"x": x}, ranks=group.native, width=x.width)

    def all_gather(self, group: ProcessGroup, x: Buffer, width: int) -> Buffer:
        if group.native is None:
            return x.recorder.call_torch(partial(gather_columns, group, width), width, [x])
        return x.recorder.call("all_gather", width, buffers={"x": x}, ranks=group.native, width=width)

    def add_adapted(self, stack: AdapterStack, x: Buffer, y: Buffer, slots: RecordedIndices) -> Buffer:
        return record_adapted(stack, x, y, slots)

    def norm_shares(self, group: ProcessGroup, norms: Sequence[NormWeights], x: Buffer) -> Buffer:
        return x.recorder.call_torch(partial(norm_shares, group, norms), x.width, [x])

    def upcast_logits(self, x: Buffer) -> Buffer:
        return x


def _elementwise(kind: _native.Elementwise, x: Buffer, y: Buffer | None, factor: float = 1.0) -> Buffer:
    return x.recorder.call(
        "elementwise", x.width, over=x, buffers={"x": x, "y": y}, kind=kind, factor=factor, width=x.width
    )
