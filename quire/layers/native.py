"""Operations recorded for native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from quire.attention.device_batch import StepStates
from quire.kernels.arguments import (
    NORM_EPSILON,
    ConvolutionWeights,
    DeltaRule,
    GatedNormWeights,
    HeadWeights,
    IndexShape,
    LatentShape,
    NormWeights,
    RotaryFrequencies,
    Routing,
)
from quire.kernels.cpu import _native
from quire.kernels.cpu.paged_attention import check_index, check_latent
from quire.kernels.cpu.recorder import TOKEN_IDS, Buffer, RecordedIndices, RecordedRows, address_of
from quire.layers.adapters import AdapterStack
from quire.layers.head_adapters import HeadAdapters
from quire.layers.native_adapters import record_adapted
from quire.layers.operations import gather_columns, norm_shares, require_equal_widths
from quire.layers.saved_matrices import SavedMatrices
from quire.layers.table_adapters import TableAdapters
from quire.parallel.interface import ProcessGroup

ACTIVATIONS = {None: _native.Activation.NONE, "silu": _native.Activation.SILU, "swish": _native.Activation.SILU}


class NativeOperations:
    """Operations over a recorder's placeholders; states come with each run."""

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

    def check_latent(self, shape: LatentShape) -> None:
        check_latent(shape.rank, shape.rope_dim)

    def check_index(self, shape: IndexShape) -> None:
        check_index(shape.num_heads, shape.dim, shape.top)

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

    def add_experts(self, parts: Buffer, routing: Buffer, residual: Buffer, *, weighs_input: bool) -> Buffer:
        return residual.recorder.call(
            "add_experts",
            residual.width,
            over=residual,
            buffers={"parts": parts, "routing": routing, "residual": residual},
            top_k=routing.width // 2,
            weighs_input=weighs_input,
            width=residual.width,
        )

    def gate_rows(self, x: Buffer, gate: Buffer) -> Buffer:
        return _elementwise(_native.Elementwise.GATE_ROWS, x, gate)

    def short_convolution(self, weights: ConvolutionWeights, x: Buffer, states: StepStates | None) -> Buffer:
        recorder, (width, channels) = x.recorder, weights.kernel.shape
        recorder.keep.append(weights)
        return recorder.call(
            "convolution",
            x.width,
            buffers={"x": x},
            layer=recorder.state_layer(weights.layer),
            offset=weights.offset,
            channels=channels,
            width=width,
            kept=weights.num_kept,
            kernel=address_of(weights.kernel),
            bias=address_of(weights.bias),
            activation=ACTIVATIONS[weights.activation],
        )

    def gated_delta_rule(self, rule: DeltaRule, qkv: Buffer, gates: Buffer, states: StepStates | None) -> Buffer:
        recorder = qkv.recorder
        recorder.keep.append(rule)
        return recorder.call(
            "delta_rule",
            rule.num_value_heads * rule.value_dim,
            buffers={"qkv": qkv, "gates": gates},
            layer=recorder.state_layer(rule.layer),
            offset=rule.offset,
            key_heads=rule.num_key_heads,
            value_heads=rule.num_value_heads,
            key_dim=rule.key_dim,
            value_dim=rule.value_dim,
            rate=address_of(rule.rate),
            time_bias=address_of(rule.time_bias),
            epsilon=NORM_EPSILON,
        )

    def gated_norm(self, weights: GatedNormWeights, x: Buffer, gate: Buffer) -> Buffer:
        x.recorder.keep.append(weights)
        return x.recorder.call(
            "gated_norm",
            x.width,
            over=x,
            buffers={"x": x, "gate": gate},
            weight=address_of(weights.weight),
            epsilon=weights.epsilon,
            heads=x.width // weights.size,
            width=weights.size,
        )

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

    def add_head_adapted(
        self, adapters: HeadAdapters | SavedMatrices, x: Buffer, y: Buffer, slots: RecordedIndices
    ) -> Buffer:
        return x.recorder.call_torch(adapters.add_recorded, y.width, [x, y])

    def add_looked_up(
        self, adapters: TableAdapters, indices: RecordedIndices, y: Buffer, slots: RecordedIndices
    ) -> Buffer:
        assert (indices.column, indices.shift) == (TOKEN_IDS, 0), "a run brings its tokens"
        return y.recorder.call_torch(adapters.add_recorded, y.width, [y])

    def norm_shares(self, group: ProcessGroup, norms: Sequence[NormWeights], x: Buffer) -> Buffer:
        return x.recorder.call_torch(partial(norm_shares, group, norms), x.width, [x])

    def upcast_logits(self, x: Buffer) -> Buffer:
        return x


def _elementwise(kind: _native.Elementwise, x: Buffer, y: Buffer | None, factor: float = 1.0) -> Buffer:
    return x.recorder.call(
        "elementwise", x.width, over=x, buffers={"x": x, "y": y}, kind=kind, factor=factor, width=x.width
    )
