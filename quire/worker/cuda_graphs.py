"""The model's forward pass on a device: eager, as one CUDA graph, or as graphs between the layers' attention.

All three run the same function of the model. Full graphs and the largest piecewise ones are captured at the start: a
capture would delay a decode by tens of milliseconds, and the smaller ones fit into the memory of the largest. Other
piecewise sizes follow in idle time, or when a size is first used, behind the pass that runs eagerly then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from quire.attention.device_batch import DeviceBatch, StateKernels
from quire.attention.interface import PlannedStep
from quire.attention.latent import IndexShape, LatentExpansion, LatentShape
from quire.attention.states import StateBackend
from quire.kernels.arguments import HeadWeights
from quire.layers.batch import ForwardBatch, TokenColumns
from quire.logging import get_logger
from quire.models.interface import CausalLM
from quire.worker.graph_dispatch import Execution, ExecutionSettings, Kind
from quire.worker.platform.graph_capture import Graph, GraphCapture, capturing

logger = get_logger(__name__)


class DeviceBackend(Protocol):
    """The part of the attention back end that a forward pass uses."""

    def plan(self, batch: DeviceBatch) -> PlannedStep: ...

    def lengths_to_compile(self, longest: int) -> tuple[tuple[int, int], ...]:
        """As that of TritonAttention."""
        ...


class DeviceBackends(NamedTuple):
    """What knows where layers find what they keep: tokens, and states."""

    attention: DeviceBackend
    states: StateBackend

    def forward_batch(
        self,
        columns: TokenColumns,
        batch: DeviceBatch,
        logits_rows: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """The input of a forward pass. logits_rows: as those of ForwardBatch."""
        attention, states = self.attention.plan(batch), self.states.plan_on_device(batch)
        token_ids, others = columns
        return ForwardBatch(token_ids, batch.slot_positions, attention, logits_rows, states, others)


PaddedInputs = Callable[[Execution], tuple[DeviceBatch, TokenColumns]]
"""Inputs of an execution's size in which everything is padding: the very tensors that steps of that size bring."""


@dataclass(frozen=True)
class PassShape:
    """attention_size: elements of a token's attention over all heads. longest: tokens of the longest sequence there can
    be. num_rows: [1] int32, gets how many tokens of a pass are no padding (None: nothing asks)."""

    attention_size: int
    longest: int
    dtype: torch.dtype
    device: torch.device
    num_rows: torch.Tensor | None = None


class CudaGraphRunner:
    """Runs forward passes. Inputs of captured sizes must come in the same tensors every time."""

    def __init__(
        self,
        model: CausalLM,
        backends: DeviceBackends,
        shape: PassShape,
        settings: ExecutionSettings,
        capture: GraphCapture | None,
    ) -> None:
        """capture: None where there are no graphs; then `settings` must allow none."""
        self.settings = settings
        largest_piecewise = max(settings.piecewise_sizes, default=0)
        largest = max(largest_piecewise, *settings.full_sizes, 0)
        assert capture is not None or not largest, "CUDA graph sizes are configured, but no GraphCapture was given"
        self.model = model
        self._backends = backends
        self._longest = shape.longest
        self._num_rows = shape.num_rows
        self._capture_of = capture
        self._hidden = torch.zeros(largest, model.output_size, dtype=shape.dtype, device=shape.device)
        self._attended = torch.zeros(largest_piecewise, shape.attention_size, dtype=shape.dtype, device=shape.device)
        self._captured: dict[tuple[Kind, int], _CapturedPass] = {}
        piecewise = [Execution("piecewise", size, 1) for size in reversed(settings.piecewise_sizes)]
        full = [Execution("full", size, size) for size in reversed(settings.full_sizes)]
        # Largest first: the others then fit into its memory.
        self._at_start = (*piecewise[:1], *full)
        self._all = (*self._at_start, *piecewise[1:])
        self._wanted = list(self._all)

    @property
    def num_captured(self) -> int:
        """Number of captured sizes."""
        return len(self._captured)

    @property
    def has_uncaptured(self) -> bool:
        """Whether `capture_next` has anything to do."""
        return bool(self._wanted)

    def run(
        self,
        execution: Execution,
        batch: DeviceBatch,
        columns: TokenColumns,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One forward pass over `batch` and its columns, prepared at the execution's sizes. rows: [R], those that are
        read (None: all). Captured passes compute all rows, since R differs from step to step.

        Returns the hidden states [R, hidden]; the next call may overwrite them. Padded rows are undefined.
        """
        if self._num_rows is not None:
            self._num_rows.copy_(batch.query_start[-1:])
        if execution.kind == "eager":
            return self._forward(batch, columns, rows)
        hidden = self._run_captured(execution, batch, columns)
        return hidden if rows is None else hidden.index_select(0, rows)

    def _run_captured(self, execution: Execution, batch: DeviceBatch, columns: TokenColumns) -> torch.Tensor:
        if execution.kind == "full":
            # A graph contains its grids, which must cover every step that uses it; each of them is a decode.
            batch = replace(batch, max_query_len=1, max_seq_len=self._longest)
        captured = self._captured.get((execution.kind, execution.num_tokens))
        if captured is None:
            hidden = self._forward(batch, columns)
            self._capture(execution, batch, columns)
            return hidden
        captured.replay(batch, columns)
        return self._hidden[: execution.num_tokens]

    def capture_at_start(self, padded_inputs: PaddedInputs) -> None:
        """Capture all full graphs and the largest piecewise ones, as far as memory allows. As `capture_next`."""
        while self._wanted and self._wanted[0] in self._at_start:
            self.capture_next(padded_inputs)

    def capture_next(self, padded_inputs: PaddedInputs) -> bool:
        """Capture one more size, if any is left; returns whether there was one. For idle time: nothing of a step may be
        under way whose inputs `padded_inputs` overwrites."""
        if not self._wanted:
            return False
        execution = self._wanted[0]
        self.run(execution, *padded_inputs(execution))
        return True

    def _forward(
        self,
        batch: DeviceBatch,
        columns: TokenColumns,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.model.forward(self._backends.forward_batch(columns, batch, rows))

    def _capture(self, execution: Execution, batch: DeviceBatch, columns: TokenColumns) -> None:
        self._wanted = [
            each for each in self._wanted if (each.kind, each.num_tokens) != (execution.kind, execution.num_tokens)
        ]
        if self._capture_of is None:
            return
        captured = self._try_capture(self._capture_of, execution.kind, batch, columns)
        if captured is None:
            self._capture_of.make_room()
            captured = self._try_capture(self._capture_of, execution.kind, batch, columns)
        if captured is None:
            # Graphs only save time: the captured ones stay, other sizes run eagerly.
            self._wanted.clear()
            self._capture_of = None
            logger.warning(
                "no memory for more CUDA graphs: %d of %d sizes are captured, the others run eagerly; a smaller "
                "gpu_memory_utilization or fewer cuda_graph_sizes leave room",
                len(self._captured),
                len(self._all),
            )
            return
        self._captured[execution.kind, execution.num_tokens] = captured

    def _try_capture(
        self, capture: GraphCapture, kind: Kind, batch: DeviceBatch, columns: TokenColumns
    ) -> _CapturedPass | None:
        """None when memory has run out."""
        make = self._capture_full if kind == "full" else self._capture_pieces
        try:
            with capturing(capture):
                return make(capture, batch, columns)
        except torch.OutOfMemoryError:
            return None

    def _capture_full(self, capture: GraphCapture, batch: DeviceBatch, columns: TokenColumns) -> _CapturedPass:
        capture.begin_capture()
        self._hidden[: batch.num_tokens].copy_(self._forward(batch, columns))
        return _FullPass(capture.end_capture(), _addresses(batch, columns))

    def _capture_pieces(self, capture: GraphCapture, batch: DeviceBatch, columns: TokenColumns) -> _CapturedPass:
        pieces = _Pieces(capture, self._attended)
        capture.begin_capture()
        token_ids, others = columns
        hidden = self.model.forward(
            ForwardBatch(token_ids, batch.slot_positions, pieces, states=pieces, columns=others)
        )
        self._hidden[: batch.num_tokens].copy_(hidden)
        last = capture.end_capture()
        return _PiecewisePass(self._backends, pieces.graphs, pieces.calls, last, _token_addresses(batch, columns))


class _CapturedPass(Protocol):
    def replay(self, batch: DeviceBatch, columns: TokenColumns) -> None: ...


@dataclass(frozen=True)
class _FullPass:
    """inputs: addresses of what it was captured with."""

    graph: Graph
    inputs: tuple[int, ...]

    def replay(self, batch: DeviceBatch, columns: TokenColumns) -> None:
        assert _addresses(batch, columns) == self.inputs, "a graph's inputs must keep their addresses"
        self.graph.replay()


@dataclass(frozen=True)
class _AttentionCall:
    """A call between two pieces, on memory that the pieces share: of the attention back end's step, or (`run`) of the
    step of layers that keep states."""

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class _PiecewisePass:
    """graphs[i] ends with the input of calls[i]; `last` follows the last call."""

    backends: DeviceBackends
    graphs: list[Graph]
    calls: list[_AttentionCall]
    last: Graph
    inputs: tuple[int, ...]

    def replay(self, batch: DeviceBatch, columns: TokenColumns) -> None:
        assert _token_addresses(batch, columns) == self.inputs, "a graph's inputs must keep their addresses"
        step, states = self.backends.attention.plan(batch), self.backends.states.plan_on_device(batch)
        for graph, call in zip(self.graphs, self.calls, strict=True):
            graph.replay()
            getattr(states if call.method == "compute_states" else step, call.method)(*call.args)
        self.last.replay()


class _Pieces:
    """Takes the place of the attention back end's step, and of the states', while pieces are captured: each call ends
    one piece and begins the next."""

    def __init__(self, capture: GraphCapture, attended: torch.Tensor) -> None:
        """attended: [most tokens, H * D], the output of every layer's attention: the next piece reads it before the
        next call overwrites it."""
        self._capture = capture
        self._attended = attended
        self.graphs: list[Graph] = []
        self.calls: list[_AttentionCall] = []

    def attend(
        self, heads: HeadWeights, qkv: torch.Tensor, rotation: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self._attended[: qkv.shape[0]]
        self._between("attend", (heads,), qkv, rotation, out)
        return out

    def write_kv(self, heads: HeadWeights, key_value: torch.Tensor, rotation: Any) -> None:
        self._between("write_kv", (heads,), key_value, rotation)

    def attend_cached(
        self, heads: HeadWeights, query: torch.Tensor, rotation: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self._attended[: query.shape[0]]
        self._between("attend_cached", (heads,), query, rotation, out)
        return out

    def attend_latent(
        self,
        shape: LatentShape,
        inputs: tuple[torch.Tensor, ...],
        rotation: Any,
        selected: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = self._attended[: inputs[0].shape[0]]
        self._between("attend_latent", (shape,), inputs, rotation, selected, out)
        return out

    def attend_expanded(
        self,
        shape: LatentShape,
        expansion: LatentExpansion,
        inputs: tuple[torch.Tensor, ...],
        rotation: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_tokens, width = inputs[0].shape[0], shape.num_heads * expansion.value_dim
        out = self._attended.view(-1)[: num_tokens * width].view(num_tokens, width)
        self._between("attend_expanded", (shape, expansion), inputs, rotation, out)
        return out

    def select_keys(
        self, shape: IndexShape, inputs: tuple[torch.Tensor, ...], rotation: Any, selected: torch.Tensor
    ) -> None:
        self._between("select_keys", (shape,), inputs, rotation, selected)

    def compute_states(self, kernels: StateKernels, weights: Any, *tensors: torch.Tensor) -> None:
        self._between("compute_states", (kernels, weights), *tensors)

    def _between(self, method: str, layer: tuple[Any, ...], *args: Any) -> None:
        """End a piece with this call's input and begin the next. layer: its constants, which are kept as they are."""
        self.graphs.append(self._capture.end_capture())
        self.calls.append(_AttentionCall(method, (*layer, *(_borrowed(self._capture, value) for value in args))))
        self._capture.begin_capture()


def _borrowed(capture: GraphCapture, value: Any) -> Any:
    """`value` with its tensors borrowed: a tensor, a tuple or dataclass of them, or something else."""
    if isinstance(value, torch.Tensor):
        return capture.borrow(value)
    if isinstance(value, tuple):
        return tuple(_borrowed(capture, each) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _borrowed(capture, getattr(value, each.name)) for each in fields(value)})
    return value


def _token_addresses(batch: DeviceBatch, columns: TokenColumns) -> tuple[int, ...]:
    """The addresses of what a model reads of a step's tokens."""
    token_ids, others = columns
    return tuple(tensor.data_ptr() for tensor in (token_ids, batch.slot_positions, *others.values()))


def _addresses(batch: DeviceBatch, columns: TokenColumns) -> tuple[int, ...]:
    """The addresses of a full graph's inputs."""
    tensors = batch.rows, batch.query_start, batch.seq_lens
    tables = *batch.slot_mapping, *batch.block_tables, *batch.state_tables
    return (*_token_addresses(batch, columns), *(tensor.data_ptr() for tensor in (*tensors, *tables)))
