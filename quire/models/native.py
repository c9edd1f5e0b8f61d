"""A model whose layers are recorded once and then run as native programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch

from quire.attention.interface import PlannedStep, StateStep
from quire.attention.latent import ExpansionRule
from quire.attention.native_backend import NativeAttention, NativeAttentionStep
from quire.attention.native_encoder import NativeEncoder, NativeEncoderStep
from quire.attention.native_expanded import ExpandingAttention
from quire.kernels.cpu.linear_state import StatePlans
from quire.kernels.cpu.memory import allocate
from quire.kernels.cpu.recorder import (
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
from quire.layers.batch import ForwardBatch
from quire.models.decoder import Decoder
from quire.models.draft_head import DraftHead
from quire.quantization.integer_weight import WeightSource

LINE_ELEMENTS = 16
"""float32 of a cache line."""


class BoundRun(NamedTuple):
    """What runs a program over the memory of a ForwardBatch's version, and its result. Decodes of one size follow one
    another in the same memory: each but the first asks torch nothing, of which nothing is in the caches then."""

    version: int
    run: Callable[[], None]
    result: torch.Tensor


class BoundHead(NamedTuple):
    """As BoundRun, of one tensor of hidden states, whose memory is its own."""

    hidden: torch.Tensor
    run: Callable[[], None]
    result: torch.Tensor


class NativeModel:
    """CausalLM over native kernels. `model` was built with native layers (`models/loader.py`)."""

    def __init__(
        self,
        model: Decoder,
        runtime: NativeRuntime,
        expansion_rule: ExpansionRule | None = None,
        weight_bytes: int | None = None,
    ) -> None:
        """expansion_rule: of a model that expands prompts; None for others. weight_bytes: of a file that says of each
        matrix how it is stored; None: what the model's own formats take."""
        self._model = model
        self._weight_bytes = weight_bytes
        self._rule = expansion_rule
        self._expanding: ExpandingAttention | None = None
        self._expanded_body: RecordedProgram | None = None
        """For steps with prompts that are expanded."""
        self._runtime = runtime
        self._backend: NativeAttention | NativeEncoder | None = None
        self._body: RecordedProgram | None = None
        self._states: StatePlans | None = None
        """Of a body with layers that keep states."""
        self._head: RecordedProgram | None = None
        self._logits = FirstRows(torch.empty(0, 0))
        """Of the last call, kept: memory that is new in every step costs as much as reading the vocabulary's matrix."""
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
        self._backend = self._body = self._states = self._head = self._expanding = self._expanded_body = None
        self._body_run = self._head_run = None
        self._logits = FirstRows(torch.empty(0, 0))

    def weight_bytes(self) -> int:
        return self._model.weight_bytes() if self._weight_bytes is None else self._weight_bytes

    @property
    def output_size(self) -> int:
        return self._model.output_size

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """As CausalLM.forward. The result lies in the program's own memory: the next call overwrites it."""
        bound = self._body_run
        if bound is None or bound.version != batch.version:
            del bound  # it keeps an arena, of which there are never two
            bound = self._bind_body(batch)
        bound.run()
        return bound.result

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        bound = self._head_run
        if bound is None or bound.hidden is not hidden:
            bound = self._bind_head(hidden)
        bound.run()
        return bound.result

    def _bind_body(self, batch: ForwardBatch) -> BoundRun:
        self._body_run = None
        # A step brings tensors. (Asking torch's metaclass for each would take as long as the call of a kernel.)
        columns = batch.token_ids, batch.slot_positions, *(batch.columns[name] for name in self._model.columns)
        tensors, rows = cast("tuple[torch.Tensor, ...]", columns), cast("torch.Tensor | None", batch.logits_rows)
        step = batch.attention
        assert isinstance(step, NativeAttentionStep | NativeEncoderStep), "a native model attends natively"
        num_rows = len(tensors[0])
        body = self._body_for(step, num_rows)
        result = body.result(num_rows if rows is None else len(rows))
        if isinstance(step, NativeEncoderStep):
            return BoundRun(0, body.bind(num_rows, tensors, step.encoder, read_rows=rows), result)
        states = None
        if self._states is not None:
            assert isinstance(batch.states, StateStep), "a step of a model with states brings them"
            states = self._states.set(batch.states)
        bound = BoundRun(batch.version, body.bind(num_rows, tensors, step.plans, read_rows=rows, states=states), result)
        if (
            batch.version and self._states is None and self._rule is None
        ):  # else the next step's states, or its program, are others
            self._body_run = bound
        return bound

    def _bind_head(self, hidden: torch.Tensor) -> BoundHead:
        self._head_run = None
        num_rows = len(hidden)
        head = self._head
        if head is None or head.max_rows < num_rows:
            head = self._record_head(hidden.shape[1], num_rows)
        rows = hidden.contiguous()
        run = head.bind(num_rows, externals=(rows, self._logits.rows))
        bound = BoundHead(rows, run, self._logits.get(num_rows))
        if rows is hidden:  # no copy, which would be of this step
            self._head_run = bound
        return bound

    def _body_for(self, step: NativeAttentionStep | NativeEncoderStep, num_rows: int) -> RecordedProgram:
        if self._backend is not step.backend:
            self._body = self._expanded_body = self._expanding = None
            self._backend = step.backend
        if self._rule is not None and isinstance(step, NativeAttentionStep):
            if self._expanding is None:
                self._expanding = ExpandingAttention(step.backend, self._runtime, self._rule)
            if self._expanding.plan(step.batch):
                body = self._expanded_body
                if body is None or body.max_rows < num_rows:
                    self._expanded_body = None
                    body = self._expanded_body = self._record_body(self._expanding, num_rows)
                return body
        if self._body is None or self._body.max_rows < num_rows:
            self._body = None  # freed first, so that two arenas never exist at the same time
            self._body = self._record_body(step.backend, num_rows)
        return self._body

    def _record_body(
        self, backend: NativeAttention | NativeEncoder | ExpandingAttention, num_rows: int
    ) -> RecordedProgram:
        self._body_run = self._head_run = None  # they keep the arena of the body that this one replaces
        recorder = Recorder()
        batch = _recorded_batch(recorder, backend, self._model.columns)
        result = _recorded(self._model.forward(batch))
        self._states = StatePlans(recorder.state_layers) if recorder.state_layers else None
        return recorder.finish_program(result, self._runtime, rounded_rows(num_rows))

    @property
    def draft_head(self) -> NativeDraftHead | None:
        """The model's head for drafts, which computes natively; None for a model without."""
        head = getattr(self._model, "draft_head", None)
        return None if head is None else NativeDraftHead(head, self._runtime)

    def _record_head(self, hidden_size: int, num_rows: int) -> RecordedProgram:
        self._head = None
        recorder = Recorder()
        hidden = recorder.external(hidden_size, hidden_size)
        logits = _recorded(self._model.compute_logits(hidden))
        max_rows = rounded_rows(num_rows)
        self._logits = FirstRows(_separate_rows(max_rows, logits.width))
        recorder.redirect(logits, recorder.external(logits.width, self._logits.rows.stride(0)))
        self._head = recorder.finish_program(logits, self._runtime, max_rows)
        return self._head


class NativeDraftHead:
    """A DraftHead over native kernels."""

    def __init__(self, head: DraftHead, runtime: NativeRuntime) -> None:
        self._head = head
        self._runtime = runtime
        self._backend: NativeAttention | None = None
        self._bodies: dict[int, RecordedProgram] = {}

    def cache_specs(self) -> list[LayerSpec]:
        return self._head.cache_specs()

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch, index: int = 0) -> torch.Tensor:
        """As DraftHead.forward. The result lies in the program's own memory: the next call overwrites it."""
        columns = cast("tuple[torch.Tensor, ...]", (batch.token_ids, batch.slot_positions))
        rows, step = cast("torch.Tensor | None", batch.logits_rows), batch.attention
        assert isinstance(step, NativeAttentionStep), "a native head attends natively"
        if self._backend is not step.backend:
            self._backend, self._bodies = step.backend, {}
        body = self._bodies.get(index)
        if body is None or body.max_rows < len(hidden):
            body = self._record(step.backend, hidden.shape[1], len(hidden), index)
        body.run(len(hidden), columns, step.plans, externals=(hidden.contiguous(),), read_rows=rows)
        return body.result(len(hidden) if rows is None else len(rows))

    def _record(self, backend: NativeAttention, size: int, num_rows: int, index: int) -> RecordedProgram:
        self._bodies.pop(index, None)  # freed first, so that two arenas never exist at the same time
        recorder = Recorder()
        hidden = recorder.external(size, size)
        result = _recorded(self._head.forward(hidden, _recorded_batch(recorder, backend), index))
        self._bodies[index] = recorder.finish_program(result, self._runtime, rounded_rows(num_rows))
        return self._bodies[index]


def _recorded_batch(recorder: Recorder, backend: PlannedStep, names: Sequence[str] = ()) -> ForwardBatch:
    """The placeholders of a step. names: columns that the model reads, numbered behind those of every step."""
    token_ids, slot_positions, *others = (RecordedIndices(recorder, number) for number in range(2 + len(names)))
    columns = dict(zip(names, others, strict=True))
    return ForwardBatch(token_ids, slot_positions, backend, RecordedRows(recorder), columns=columns)


def _recorded(value: Value) -> Buffer:
    assert isinstance(value, Buffer), "layers pass on the kind of values that they are given"
    return value


def _separate_rows(num_rows: int, width: int) -> torch.Tensor:
    """[num_rows, width] float32. A power of two of bytes between rows would put a column of them on one cache set."""
    stride = -(-width // LINE_ELEMENTS) * LINE_ELEMENTS + LINE_ELEMENTS
    return allocate(4 * num_rows * stride).view(torch.float32).view(num_rows, stride)[:, :width]
