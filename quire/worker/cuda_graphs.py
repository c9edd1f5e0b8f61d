"""Model's forward pass on a device: eager, as one CUDA graph, or as graphs between the layers' attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from quire.attention.device_batch import NO_PROMPTS, DeviceBatch, StateKernels, TokenColumns
from quire.attention.interface import AttentionStep
from quire.attention.states import StateBackend
from quire.config.adapters import ADAPTER_SLOTS
from quire.kernels.arguments import HeadWeights, IndexShape, LatentExpansion, LatentShape
from quire.layers.batch import ForwardBatch, ForwardResult
from quire.layers.overlay import RowOverlay
from quire.logging import get_logger
from quire.models.interface import CausalLM
from quire.worker.graph_dispatch import Execution, ExecutionSettings
from quire.worker.platform.graph_capture import Graph, GraphCapture, capturing

logger = get_logger(__name__)


class DeviceBackend(Protocol):
    """Interface of a device's attention or state back end that CudaGraphRunner needs to run and capture passes."""

    def plan(self, batch: DeviceBatch) -> AttentionStep: ...

    def lengths_to_compile(self, longest: int) -> tuple[tuple[int, int], ...]:
        """Lengths to compile kernels for; see TritonAttention.lengths_to_compile."""
        ...


class DeviceBackends(NamedTuple):
    """A model's back ends of attention and of recurrent states on a device."""

    attention: DeviceBackend
    states: StateBackend

    def forward_batch(
        self,
        columns: TokenColumns,
        batch: DeviceBatch,
        logits_rows: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """Input of a forward pass. logits_rows: see ForwardBatch."""
        attention, states = self.attention.plan(batch), self.states.plan_on_device(batch)
        token_ids, others, hidden = columns
        return ForwardBatch(token_ids, batch.slot_positions, attention, logits_rows, states, others, hidden=hidden)


PaddedInputs = Callable[[Execution], tuple[DeviceBatch, TokenColumns]]
"""Padding-only inputs of an execution's size, in the tensors that its steps use."""


@dataclass(frozen=True)
class PassShape:
    """Sizes, dtype and device of a model's passes. attention_size: elements of a token's attention output over all
    heads. longest: maximum tokens of a sequence. num_rows: [1] int32, receives the number of unpadded tokens of a pass
    (None: unused). taps: `ForwardBatch.taps` of every pass."""

    attention_size: int
    longest: int
    dtype: torch.dtype
    device: torch.device
    num_rows: torch.Tensor | None = None
    taps: tuple[int, ...] = ()


class CudaGraphRunner:
    """Runs forward passes on a device, eagerly or by captured CUDA graphs. Inputs of captured sizes must always be in
    the same tensors."""

    def __init__(
        self,
        model: CausalLM,
        backends: DeviceBackends,
        shape: PassShape,
        settings: ExecutionSettings,
        capture: GraphCapture | None,
    ) -> None:
        """capture: records graphs; None without them, then `settings` must allow none."""
        self.settings = settings
        self._all = settings.executions()
        assert capture is not None or not self._all, "CUDA graph sizes are configured, but no GraphCapture was given"
        largest_piecewise = max(settings.piecewise_sizes, default=0)
        largest = max((each.num_tokens for each in self._all), default=0)
        self.model = model
        self._backends = backends
        self._longest = shape.longest
        self._num_rows = shape.num_rows
        self._taps = shape.taps
        self._capture_of = capture
        self._largest = largest
        self._results: list[torch.Tensor] = []
        """Results of captured passes, [largest, size] each: hidden states and taps."""
        self._attended = torch.zeros(largest_piecewise, shape.attention_size, dtype=shape.dtype, device=shape.device)
        self._captured: dict[Execution, _CapturedPass] = {}
        pieces = [each for each in self._all if each.kind == "piecewise"]
        full = [each for each in self._all if each.kind == "full"]
        # Largest first, with adapters before without: the others then fit into its memory.
        for each in (pieces, full):
            each.sort(key=lambda each: (each.num_tokens, each.adapts), reverse=True)
        num_largest = 2 if settings.adapts else 1
        self._at_start = (*pieces[:num_largest], *full)
        self._wanted = [*self._at_start, *pieces[num_largest:]]

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    @property
    def has_uncaptured(self) -> bool:
        """True while sizes remain for `capture_next`, which idle workers call."""
        return bool(self._wanted)

    def run(
        self,
        execution: Execution,
        batch: DeviceBatch,
        columns: TokenColumns,
        rows: torch.Tensor | None = None,
        overlay: RowOverlay | None = None,
    ) -> ForwardResult[torch.Tensor]:
        """Run one forward pass over inputs prepared at the execution's sizes. rows: [R], to return (None: all);
        captured passes compute all. overlay: excludes full graphs. Returns hidden states [R, hidden] and taps; the next
        call may overwrite them. Padded rows are undefined."""
        if self._num_rows is not None:
            self._num_rows.copy_(batch.query_start[-1:])
        if ADAPTER_SLOTS in columns.others and not execution.adapts:
            columns = columns.without(ADAPTER_SLOTS)
        if execution.kind == "eager":
            return self._forward(batch, columns, rows, overlay)
        result = self._run_captured(execution, batch, columns, overlay)
        return result if rows is None else result._replace(hidden=result.hidden.index_select(0, rows))

    def _run_captured(
        self, execution: Execution, batch: DeviceBatch, columns: TokenColumns, overlay: RowOverlay | None
    ) -> ForwardResult[torch.Tensor]:
        if execution.kind == "full":
            assert overlay is None, "an overlay's rows are applied between pieces"
            # A graph contains its grids, which must cover every step that uses it; each of them is a decode.
            rows = execution.num_tokens // execution.num_seqs
            batch = replace(batch, max_query_len=rows, max_seq_len=self._longest, host=NO_PROMPTS)
        key = replace(execution.captured_as, overlaid=None if overlay is None else overlay.layers)
        captured = self._captured.get(key)
        if captured is None:
            result = self._forward(batch, columns, None, overlay)
            self._results = self._results or [
                each.new_zeros(self._largest, each.shape[1]) for each in (result.hidden, *result.tapped.values())
            ]
            self._capture(key, batch, columns)
            return result
        captured.replay(batch, columns, overlay)
        hidden, *tapped = (each[: execution.num_tokens] for each in self._results)
        return ForwardResult(hidden, dict(zip(self._taps, tapped, strict=True)))

    def capture_at_start(self, padded_inputs: PaddedInputs) -> None:
        """Capture all full graphs and the largest piecewise one, as far as memory allows. See `capture_next`."""
        while self._wanted and self._wanted[0] in self._at_start:
            self.capture_next(padded_inputs)

    def capture_next(self, padded_inputs: PaddedInputs) -> bool:
        """Capture one more size; returns whether one was left. Call it in idle time: no step that uses the tensors of
        `padded_inputs` may be in progress."""
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
        overlay: RowOverlay | None = None,
    ) -> ForwardResult[torch.Tensor]:
        inputs = self._backends.forward_batch(columns, batch, rows)
        return self.model.forward(inputs._replace(overlay=overlay, taps=self._taps))

    def _capture(self, key: Execution, batch: DeviceBatch, columns: TokenColumns) -> None:
        self._wanted = [each for each in self._wanted if each != key]
        if self._capture_of is None:
            return
        captured = self._try_capture(self._capture_of, key, batch, columns)
        if captured is None:
            self._capture_of.make_room()
            captured = self._try_capture(self._capture_of, key, batch, columns)
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
        self._captured[key] = captured

    def _try_capture(
        self, capture: GraphCapture, key: Execution, batch: DeviceBatch, columns: TokenColumns
    ) -> _CapturedPass | None:
        try:
            with capturing(capture):
                if key.kind == "full":
                    return self._capture_full(capture, batch, columns)
                return self._capture_pieces(capture, batch, columns, key.overlaid)
        except torch.OutOfMemoryError:
            return None

    def _capture_full(self, capture: GraphCapture, batch: DeviceBatch, columns: TokenColumns) -> _CapturedPass:
        capture.begin_capture()
        self._keep(self._forward(batch, columns), batch.num_tokens)
        return _FullPass(capture.end_capture(), _addresses(batch, columns))

    def _capture_pieces(
        self, capture: GraphCapture, batch: DeviceBatch, columns: TokenColumns, overlaid: tuple[int, ...] | None
    ) -> _CapturedPass:
        pieces = _Pieces(capture, self._attended, overlaid or ())
        capture.begin_capture()
        token_ids, others, hidden = columns
        inputs = ForwardBatch(token_ids, batch.slot_positions, pieces, states=pieces, columns=others, hidden=hidden)
        overlay = None if overlaid is None else pieces
        self._keep(self.model.forward(inputs._replace(overlay=overlay, taps=self._taps)), batch.num_tokens)
        last = capture.end_capture()
        return _PiecewisePass(self._backends, pieces.graphs, pieces.calls, last, _token_addresses(batch, columns))

    def _keep(self, result: ForwardResult[torch.Tensor], num_tokens: int) -> None:
        for kept, computed in zip(self._results, (result.hidden, *result.tapped.values()), strict=True):
            kept[:num_tokens].copy_(computed)


class _CapturedPass(Protocol):
    def replay(self, batch: DeviceBatch, columns: TokenColumns, overlay: RowOverlay | None) -> None: ...


@dataclass(frozen=True)
class _FullPass:
    """Captured pass of one padded batch size as a single graph, replayed for steps up to it. inputs: addresses at
    capture."""

    graph: Graph
    inputs: tuple[int, ...]

    def replay(self, batch: DeviceBatch, columns: TokenColumns, overlay: RowOverlay | None) -> None:
        assert _addresses(batch, columns) == self.inputs, "a graph's inputs must keep their addresses"
        self.graph.replay()


@dataclass(frozen=True)
class _AttentionCall:
    """Call between two pieces, on shared memory: of the attention step, the state step or the overlay."""

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class _PiecewisePass:
    """Captured pass of one size in pieces between attention calls: graphs[i] ends with the input of calls[i]; `last`
    follows the last call."""

    backends: DeviceBackends
    graphs: list[Graph]
    calls: list[_AttentionCall]
    last: Graph
    inputs: tuple[int, ...]

    def replay(self, batch: DeviceBatch, columns: TokenColumns, overlay: RowOverlay | None) -> None:
        assert _token_addresses(batch, columns) == self.inputs, "a graph's inputs must keep their addresses"
        step, states = self.backends.attention.plan(batch), self.backends.states.plan_on_device(batch)
        others = {"compute_states": states, "put": overlay, "add_behind": overlay}
        for graph, call in zip(self.graphs, self.calls, strict=True):
            graph.replay()
            getattr(others.get(call.method, step), call.method)(*call.args)
        self.last.replay()


class _Pieces(AttentionStep):
    """Stand-in for attention, states and overlay during capture: each of their calls ends one graph and begins the
    next."""

    def __init__(self, capture: GraphCapture, attended: torch.Tensor, layers: tuple[int, ...]) -> None:
        """attended: [max tokens, H * D], output of every layer's attention. layers: layers after which an overlay adds
        rows."""
        self.layers = layers
        self._capture = capture
        self._attended = attended
        self.graphs: list[Graph] = []
        self.calls: list[_AttentionCall] = []

    def attend(self, heads: HeadWeights, qkv: torch.Tensor, rotation: Any) -> torch.Tensor:
        out = self._part(qkv, heads.shape.num_heads * heads.shape.head_dim)
        return self._between("attend", (heads,), qkv, rotation, out)

    def attend_latent(
        self, shape: LatentShape, inputs: tuple[torch.Tensor, ...], rotation: Any, selected: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self._part(inputs[0], shape.num_heads * shape.rank)
        return self._between("attend_latent", (shape,), inputs, rotation, selected, out)

    def attend_expanded(
        self, shape: LatentShape, expansion: LatentExpansion, inputs: tuple[torch.Tensor, ...], rotation: Any
    ) -> torch.Tensor:
        out = self._part(inputs[0], shape.num_heads * expansion.value_dim)
        return self._between("attend_expanded", (shape, expansion), inputs, rotation, out)

    def select_keys(self, shape: IndexShape, inputs: tuple[torch.Tensor, ...], rotation: Any) -> torch.Tensor:
        out = torch.empty(len(inputs[0]), shape.top, dtype=torch.int32, device=inputs[0].device)
        return self._between("select_keys", (shape,), inputs, rotation, out)

    def compute_states(self, kernels: StateKernels, weights: Any, *tensors: torch.Tensor) -> None:
        self._between("compute_states", (kernels, weights), *tensors)

    def put(self, x: torch.Tensor) -> torch.Tensor:
        return self._between("put", (), x)

    def add_behind(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._between("add_behind", (layer,), x)

    def _part(self, tokens: torch.Tensor, width: int) -> torch.Tensor:
        return self._attended.view(-1)[: len(tokens) * width].view(len(tokens), width)

    def _between(self, method: str, layer: tuple[Any, ...], *args: Any) -> Any:
        """End a graph with this call's input and start the next. args: tensors; the last, the output, is returned."""
        self.graphs.append(self._capture.end_capture())
        self.calls.append(_AttentionCall(method, (*layer, *(_borrowed(self._capture, value) for value in args))))
        self._capture.begin_capture()
        return args[-1]


def _borrowed(capture: GraphCapture, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return capture.borrow(value)
    if isinstance(value, tuple):
        return tuple(_borrowed(capture, each) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _borrowed(capture, getattr(value, each.name)) for each in fields(value)})
    return value


def _token_addresses(batch: DeviceBatch, columns: TokenColumns) -> tuple[int, ...]:
    token_ids, others, hidden = columns
    tensors = (token_ids, batch.slot_positions, *others.values(), hidden)
    return tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)


def _addresses(batch: DeviceBatch, columns: TokenColumns) -> tuple[int, ...]:
    tensors = batch.rows, batch.query_start, batch.seq_lens
    tables = *batch.slot_mapping, *batch.block_tables, *batch.state_tables
    return (*_token_addresses(batch, columns), *(tensor.data_ptr() for tensor in (*tensors, *tables)))
