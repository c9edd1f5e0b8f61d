"""Model whose layers are recorded once and then run as native programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch

from quire.attention.interface import AttentionStep, StateStep
from quire.attention.native_backend import NativeAttention, NativeAttentionStep
from quire.attention.native_encoder import NativeEncoder, NativeEncoderStep
from quire.attention.native_expanded import ExpandingAttention
from quire.attention.shared_prompts import SharedPromptsStep
from quire.config.adapters import ADAPTER_SLOTS
from quire.kernels.arguments import ExpansionRule
from quire.kernels.cpu.linear_state import StatePlans
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.recorder import (
    SLOT_POSITIONS,
    TOKEN_IDS,
    Buffer,
    FirstRows,
    RecordedIndices,
    RecordedProgram,
    RecordedRows,
    Recorder,
    rounded_rows,
)
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kernels.value import Value
from quire.kv_cache.spec import LayerSpec
from quire.layers.adapters import StepSlots
from quire.layers.batch import ForwardBatch, ForwardResult
from quire.layers.overlay import Overlay
from quire.models.decoder import Decoder
from quire.models.draft_head import DraftHead
from quire.quantization.integer_weight import WeightSource

HEAD_SLOTS = SLOT_POSITIONS + 1
"""Column of a head's program for the rows' adapters."""
LINE_ELEMENTS = 16
"""float32 numbers per cache line."""


class BoundRun(NamedTuple):
    """Program bound to one ForwardBatch version's memory, and its result; later decodes there reuse it without
    torch. adapts: see Variant."""

    version: int
    adapts: bool
    run: Callable[[], None]
    result: ForwardResult[torch.Tensor]
    kept: object = None
    """Memory that only this run keeps alive."""


class BoundHead(NamedTuple):
    """Head's program bound to one tensor of hidden states, and its logits."""

    hidden: torch.Tensor
    run: Callable[[], None]
    result: torch.Tensor


class Variant(NamedTuple):
    """Properties that distinguish a model's recorded bodies. expands: prompts are expanded. adapts: some tokens have
    adapters. width: size of incoming hidden states (0: tokens come in). overlaid: layers after which an overlay adds
    rows (None: no overlay). taps: see ForwardBatch. shares: other ranks have the other rows."""

    expands: bool = False
    adapts: bool = False
    width: int = 0
    overlaid: tuple[int, ...] | None = None
    taps: tuple[int, ...] = ()
    shares: bool = False


PLAIN, EXPANDED = Variant(), Variant(expands=True)


class Body(NamedTuple):
    """Recorded variant. states: plans of the layers with recurrent states (None: no such layers). overlay: forwards
    to a run's overlay."""

    program: RecordedProgram
    states: StatePlans | None
    overlay: RecordedOverlay | None


class RecordedOverlay:
    """Recorded overlay; it calls the overlay of the current run."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.current: Overlay[torch.Tensor] | None = None

    def put(self, x: Buffer) -> Buffer:
        return x.recorder.call_torch(lambda rows: self._overlay.put(rows), x.width, [x])

    def add_behind(self, layer: int, x: Buffer) -> Buffer:
        return x.recorder.call_torch(lambda rows: self._overlay.add_behind(layer, rows), x.width, [x])

    @property
    def _overlay(self) -> Overlay[torch.Tensor]:
        assert self.current is not None, "a run brings its overlay"
        return self.current


class NativeModel:
    """CausalLM over native kernels. `model` must have native layers (`models/loader.py`)."""

    def __init__(
        self,
        model: Decoder,
        runtime: NativeRuntime,
        expansion_rule: ExpansionRule | None = None,
        weight_bytes: int | None = None,
    ) -> None:
        """expansion_rule: rule if the model expands prompts. weight_bytes: size of a file with mixed formats; None:
        from the model's formats."""
        self._model = model
        self._weight_bytes = weight_bytes
        self._rule = expansion_rule
        self._expanding: ExpandingAttention | None = None
        self._runtime = runtime
        self._backend: NativeAttention | NativeEncoder | None = None
        self._bodies: dict[Variant, Body] = {}
        self._heads: dict[bool, RecordedProgram] = {}
        """Without and with adapters."""
        self._logits = FirstRows(torch.empty(0, 0))
        """Logits of the last call, in memory that each call reuses."""
        self._body_run: BoundRun | None = None
        self._head_run: BoundHead | None = None

    @property
    def columns(self) -> Sequence[str]:
        return self._model.columns

    def cache_specs(self) -> list[LayerSpec]:
        return self._model.cache_specs()

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]]) -> None:
        self._model.load_weights(weights)

    def release_workspaces(self) -> None:
        self._backend = self._expanding = self._body_run = self._head_run = None
        self._bodies.clear()
        self._heads.clear()
        self._logits = FirstRows(torch.empty(0, 0))

    def weight_bytes(self) -> int:
        return self._model.weight_bytes() if self._weight_bytes is None else self._weight_bytes

    @property
    def output_size(self) -> int:
        return self._model.output_size

    @property
    def decoder(self) -> Decoder:
        """Model whose layers are recorded, for a draft head that shares its tables."""
        return self._model

    @property
    def draft_head(self) -> NativeModel | None:
        head = getattr(self._model, "draft_head", None)
        return None if head is None else NativeModel(head, self._runtime)

    def guess(self, index: int) -> NativeModel:
        return NativeModel(cast("DraftHead", self._model).guess(index), self._runtime)

    def stage(self, numbers: range) -> NativeModel:
        """Model of these layers alone (Decoder.stage); it records its own programs."""
        return NativeModel(self._model.stage(numbers), self._runtime, self._rule, self._weight_bytes)

    def forward(self, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
        """Run the recorded layers (CausalLM.forward). The next call overwrites the result."""
        bound = self._body_run
        if bound is None or bound.version != batch.version or bound.adapts != _adapts(batch):
            del bound  # release its arena first: two must never exist
            bound = self._bind_body(batch)
        bound.run()
        return bound.result

    def compute_logits(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        bound = self._head_run
        if bound is None or bound.hidden is not hidden or slots is not None:
            bound = self._bind_head(hidden, slots)
        bound.run()
        return bound.result

    def _bind_body(self, batch: ForwardBatch) -> BoundRun:
        self._body_run = None
        # Columns of a step are tensors; an isinstance check of each would cost as much as a kernel call.
        columns = batch.token_ids, batch.slot_positions, *(batch.columns[name] for name in self._model.columns)
        tensors, rows = cast("tuple[torch.Tensor, ...]", columns), cast("torch.Tensor | None", batch.logits_rows)
        step = batch.attention
        assert isinstance(step, NativeAttentionStep | NativeEncoderStep), "a native model attends natively"
        num_rows = len(tensors[0])
        variant = self._variant(batch, step)
        program, states, overlay = self._body_for(variant, step, num_rows)
        if variant.adapts and self._model.adapters is not None:
            slots = cast("torch.Tensor", batch.columns[ADAPTER_SLOTS])
            self._model.adapters.running = StepSlots(slots, rows, tensors[TOKEN_IDS])
        if overlay is not None:
            overlay.current = batch.overlay
        last, *tapped = program.results(num_rows, num_rows if rows is None else len(rows))
        result = ForwardResult(last, dict(zip(variant.taps, tapped, strict=True)))
        hidden = () if batch.hidden is None else (cast("torch.Tensor", batch.hidden).contiguous(),)
        if isinstance(step, NativeEncoderStep):
            return BoundRun(
                0, variant.adapts, program.bind(num_rows, tensors, step.encoder, hidden, rows), result, hidden
            )
        planned = None
        if states is not None:
            assert isinstance(batch.states, StateStep), "a step of a model with states brings them"
            planned = states.set(batch.states)
        run = program.bind(num_rows, tensors, step.plans, hidden, rows, planned)
        bound = BoundRun(batch.version, variant.adapts, run, result, hidden)
        if batch.version and states is None and self._rule is None:  # else states or variant may change every step
            self._body_run = bound
        return bound

    def _bind_head(self, hidden: torch.Tensor, slots: torch.Tensor | None) -> BoundHead:
        self._head_run = None
        num_rows, adapts = len(hidden), slots is not None
        head = self._heads.get(adapts)
        if head is None or head.max_rows < num_rows:
            head = self._record_head(hidden.shape[1], num_rows, adapts=adapts)
        if slots is not None and self._model.adapters is not None:
            self._model.adapters.running_head = StepSlots(slots, None)
        rows = hidden.contiguous()
        columns = [slots if number == HEAD_SLOTS else None for number in range(HEAD_SLOTS + 1)] if adapts else ()
        run = head.bind(num_rows, columns, externals=(rows, self._logits.rows))
        bound = BoundHead(rows, run, self._logits.get(num_rows))
        if rows is hidden and not adapts:  # a copy would belong to this step only
            self._head_run = bound
        return bound

    def _variant(self, batch: ForwardBatch, step: NativeAttentionStep | NativeEncoderStep) -> Variant:
        if self._backend is not step.backend:
            self._bodies, self._backend, self._expanding = {}, step.backend, None
        expands = False
        if self._rule is not None and isinstance(step, NativeAttentionStep):
            if self._expanding is None:
                self._expanding = ExpandingAttention(step.backend, self._runtime, self._rule)
            expands = self._expanding.plan(step.batch)
        adapts = _adapts(batch)
        shares = isinstance(step, SharedPromptsStep)
        if batch.hidden is None and batch.overlay is None and not batch.taps and not adapts and not shares:
            return EXPANDED if expands else PLAIN
        width = 0 if batch.hidden is None else cast("torch.Tensor", batch.hidden).shape[1]
        overlaid = None if batch.overlay is None else tuple(batch.overlay.layers)
        return Variant(expands, adapts, width, overlaid, batch.taps, shares)

    def _body_for(self, variant: Variant, step: NativeAttentionStep | NativeEncoderStep, num_rows: int) -> Body:
        body = self._bodies.get(variant)
        if body is None or body.program.max_rows < num_rows:
            body = None
            self._bodies.pop(variant, None)  # free the old arena first: two of one variant must never exist
            attention = self._expanding if variant.expands else step
            assert attention is not None, "a model that expands prompts has what does it"
            body = self._bodies[variant] = self._record_body(variant, attention, num_rows)
        return body

    def _record_body(self, variant: Variant, attention: AttentionStep, num_rows: int) -> Body:
        self._body_run = self._head_run = None  # these hold the arena of the replaced body
        recorder = Recorder()
        overlay = None if variant.overlaid is None else RecordedOverlay(variant.overlaid)
        token_ids, slot_positions, *others = (
            RecordedIndices(recorder, number) for number in range(2 + len(self._model.columns))
        )
        columns = dict(zip(self._model.columns, others, strict=True))
        if not variant.adapts:
            columns.pop(ADAPTER_SLOTS, None)
        batch = ForwardBatch(
            token_ids,
            slot_positions,
            attention,
            RecordedRows(recorder),
            columns=columns,
            hidden=recorder.external(variant.width, variant.width) if variant.width else None,
            overlay=overlay,
            taps=variant.taps,
        )
        hidden, tapped = self._model.forward(batch)
        kept = [_recorded(tapped[layer]) for layer in variant.taps]
        program = recorder.finish_program(_recorded(hidden), self._runtime, rounded_rows(num_rows), others=kept)
        return Body(program, StatePlans(recorder.state_layers) if recorder.state_layers else None, overlay)

    def _record_head(self, hidden_size: int, num_rows: int, *, adapts: bool) -> RecordedProgram:
        self._heads.pop(adapts, None)
        recorder = Recorder()
        hidden = recorder.external(hidden_size, hidden_size)
        slots = RecordedIndices(recorder, HEAD_SLOTS) if adapts else None
        logits = _recorded(self._model.compute_logits(hidden, slots))
        max_rows = rounded_rows(num_rows)
        if len(self._logits.rows) < max_rows:
            self._logits = FirstRows(_separate_rows(max_rows, logits.width))
        recorder.redirect(logits, recorder.external(logits.width, self._logits.rows.stride(0)))
        self._heads[adapts] = head = recorder.finish_program(logits, self._runtime, max_rows)
        return head


def _adapts(batch: ForwardBatch) -> bool:
    slots = batch.columns.get(ADAPTER_SLOTS)
    return slots is not None and bool(cast("torch.Tensor", slots).any())


def _recorded(value: Value) -> Buffer:
    assert isinstance(value, Buffer), "layers pass on the kind of values that they are given"
    return value


def _separate_rows(num_rows: int, width: int) -> torch.Tensor:
    """[num_rows, width] float32 for logits, in rows of a stride that is no power of two."""
    stride = -(-width // LINE_ELEMENTS) * LINE_ELEMENTS + LINE_ELEMENTS
    return allocate(4 * num_rows * stride).view(torch.float32).view(num_rows, stride)[:, :width]
