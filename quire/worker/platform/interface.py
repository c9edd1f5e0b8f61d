"""The interface between the worker and what it computes on: a CPU, or a device with memory and streams of its own.

A Platform serves the worker's life (memory, weights, pools). It makes the StepCompute, which serves the plans: the
model runner tells it what a plan computes, and it knows the kernels, and where the request state lies that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
import torch

from quire.config.model import ModelConfig
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import DeviceShare
from quire.layers.experts import ExpertCounters
from quire.models.adapters import ModelAdapters
from quire.models.interface import CausalLM
from quire.models.weight_files import Progress
from quire.parallel.stage import Stage
from quire.sampling.batch import TokenMasks
from quire.sampling.parameters import SamplingRows
from quire.sampling.results import Deferred, Logprobs, Samples
from quire.step import StepPlan, TokenValues
from quire.worker.block_tables import BlockTables
from quire.worker.columns import ColumnValues
from quire.worker.input_batch import InputBatch
from quire.worker.kv_transfer import BlockTransfers
from quire.worker.pooling import PooledRows
from quire.worker.sample_rows import SampleRows

if TYPE_CHECKING:
    from quire.worker.drafts import Accepted, Placed
    from quire.worker.images import ImageOverlays
    from quire.worker.platform.weight_offload import DeviceWeights
    from quire.worker.request_state import RequestState

Mode = Literal["inline", "thread", "queued"]
"""The way in which plans run: inside the call that starts them, on a thread of the executor, or enqueued on a device,
which the host waits for when it asks for a result."""


class PendingCopy(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[torch.Tensor]:
        """Wait for this copy alone; return the host tensors, in the order they were given."""
        ...


class RequestColumns(Protocol):
    """Columns of the request state that kernels read: tokens, block tables, sampling parameters, the step's columns.

    On a CPU they are the host's columns. On a device each call records a staged write, which the next step sends; no
    word may be written twice in one plan without a copy in between. BlockTables and SamplingRows hold what is written
    of theirs already.
    """

    def write_tokens(self, row: int, position: int, token_ids: Sequence[int]) -> None: ...

    def copy_tokens(self, source: int, destination: int, num_tokens: int) -> None:
        """The first tokens of row `source` become those of row `destination`."""
        ...

    def begin_text(self, row: int, num_tokens: int, scope: str, prediction: Sequence[int]) -> None:
        """The row, whose tokens are written, begins a text that drafts are looked up in (`Finder.begin_text`)."""
        ...

    def copy_text(self, source: int, destination: int, num_tokens: int) -> None:
        """Row `destination` begins such a text with the first tokens of row `source`."""
        ...

    def end_text(self, row: int, num_tokens: int) -> None:
        """The row's text is over, with as many tokens."""
        ...

    def write_blocks(self, row: int, group: int, start: int, entries: Sequence[int] | np.ndarray) -> None:
        """Entries of a block table (quire/worker/block_tables.py), from index `start` on."""
        ...

    def copy_blocks(self, source: int, destination: int, group: int, num_entries: int) -> None:
        """Copy the first entries of a row's block table to another row's."""
        ...

    def write_sampling(self, row: int) -> None:
        """The row's sampling parameters."""
        ...

    def write_values(self, row: int, values: Mapping[str, int], lists: Mapping[str, TokenValues] = ...) -> None:
        """The row's values of the step's columns, as `NewSequence.columns` and `token_columns` have them."""
        ...

    def copy_values(self, source: int, destination: int) -> None:
        """Copy the values of a row's step columns to another row."""
        ...

    def place_drafts(self, plan: StepPlan, requests: RequestState) -> Placed:
        """Bring the step's drafts to the token table, behind the known tokens of their sequences."""
        ...

    def input_batch(
        self, rows: np.ndarray, starts: Sequence[int], counts: Sequence[int], rows_version: int
    ) -> InputBatch:
        """The batch of a step whose tokens are all read (`InputBatch.of`), valid until the next call. rows: [S] int64.
        rows_version: for the field of InputBatch."""
        ...


class ComputeStep(Protocol):
    """The work of one plan, in the order that the model runner calls for it. No call waits for a device."""

    def copy_blocks(self) -> None:
        """Run the plan's block copies, every source as it was before all of them."""
        ...

    def forward(self) -> torch.Tensor:
        """Run the model over the scheduled tokens. Returns [R or more, hidden size], of the rows that are read."""
        ...

    def sample(self, hidden: torch.Tensor, samples: SampleRows, masks: TokenMasks | None) -> Samples:
        """Choose a token for each sampled row, of those that its mask allows, and write it to the row."""
        ...

    def accept(
        self, hidden: torch.Tensor, samples: Samples | None, sampled: SampleRows | None, requests: RequestState
    ) -> Accepted:
        """Keep those drafts of the step that were drawn as well, and find drafts for the next one. hidden: as `forward`
        returned it. samples, sampled: None in a step that samples nothing. Called where `StepCompute.has_drafts`."""
        ...

    def pool(self, hidden: torch.Tensor, pooled: PooledRows) -> Deferred[np.ndarray]:
        """The pooled samples, [P, width] float32. pooled: the rows that `stage` was given."""
        ...


class StepCompute(Protocol):
    """Computes plans over the request state that it keeps.

    prompt_logits_elements: the logits of prompt positions are computed by slices of at most this many elements (at
    least one position).
    """

    prompt_logits_elements: int
    has_drafts: bool
    """True where plans may have drafts."""
    writes_ahead: bool
    """Blocks of a step's sequences are written beside those of its tokens: a model makes drafts."""
    reads_all: bool
    """The hidden states of all tokens are read: drafts are made from them."""
    samples: bool
    """The last layer is computed here, and samples are drawn here."""

    @property
    def columns(self) -> RequestColumns: ...

    def stage(
        self, plan: StepPlan, batch: InputBatch, samples: SampleRows | None, pooled: PooledRows | None
    ) -> ComputeStep:
        """Begin a plan: bring what it changes in the columns, and the columns of its batch, to the device."""
        ...

    def score_prompt(self, hidden: torch.Tensor, row: int, start: int, num_top: int) -> Logprobs:
        """Log-probabilities of the row's tokens from position `start` on. hidden: [N, hidden size], the positions
        before each of them."""
        ...

    def copy_out(self, tensors: Iterable[torch.Tensor]) -> PendingCopy:
        """Send what the steps so far have computed to the host."""
        ...

    def warm_up(self, launch: Callable[[StepPlan], object]) -> None:
        """Compile and capture what the first steps would have to wait for. The request state must be empty."""
        ...

    def capture_next(self) -> bool:
        """Capture one more graph, while no plan is outstanding; returns whether there was one left."""
        ...


class HostPool(Protocol):
    """The pool of blocks on the host. pages[j]: [num_host_blocks + 1, page bytes] uint8."""

    @property
    def pages(self) -> Sequence[torch.Tensor]: ...

    def close(self) -> None:
        """Release what the system keeps for it. No copy from or to it may be under way."""
        ...


@dataclass(frozen=True)
class StepLimits:
    """Sizes of the largest step: tokens and sequences. longest: most tokens of one sequence. max_drafts: most drafts of
    a sequence in a step."""

    block_size: int
    max_num_tokens: int
    max_num_seqs: int
    longest: int
    max_drafts: int = 0

    @property
    def max_num_rows(self) -> int:
        """Rows of logits, at most: each sequence has one, and one for each of its drafts."""
        return max(self.max_num_seqs, min(self.max_num_tokens, self.max_num_seqs * (1 + self.max_drafts)))


class MemoryMeter(Protocol):
    """Measures what the pools can have, before they exist."""

    def free(self) -> int:
        """Bytes that this process could still take where the model computes."""
        ...

    def step_bytes(self, model: CausalLM, limits: StepLimits, estimate: int) -> int | None:
        """The peak of the largest step, measured by running dummy steps; None where it cannot be measured. estimate:
        what it will be about. Raises InsufficientMemoryError."""
        ...

    def device_share(self, model: CausalLM, limits: StepLimits, available: int, activations: int) -> DeviceShare | None:
        """The arithmetic of a device with memory of its own; None for a CPU."""
        ...

    def dummy_pass(self, model: CausalLM, limits: StepLimits, batch: InputBatch) -> Callable[[], torch.Tensor]:
        """A forward pass over a dummy batch, with a small pool of its own: what it computes means nothing, what it
        takes is what a real step takes. Returns its hidden states."""
        ...


class HeadInputs(NamedTuple):
    """What a head for drafts reads, and guesses. taps: layers of the model whose results it reads side by side (none:
    the model's own results). token_ids: [logits] int64, the token of each of its logits (None: all are in order).
    is_apart: its weights and its layers' numbers are its own, not the model's."""

    taps: tuple[int, ...] = ()
    token_ids: np.ndarray | None = None
    is_apart: bool = False


class DraftModel(NamedTuple):
    """A model that makes another one's drafts, or a head that does. Its layers are behind that one's in the KV cache.
    meter: measures what it takes (None: of a head, it is estimated). head: what a head reads (None: it is a model)."""

    config: ModelConfig
    model: CausalLM
    meter: MemoryMeter | None
    head: HeadInputs | None = None

    @property
    def is_apart(self) -> bool:
        """Its weights and its layers' numbers are its own."""
        return self.head is None or self.head.is_apart


class Platform(Protocol):
    """A kind of hardware, as a worker uses it. Calls come one after the other, inside `computing` where nothing else is
    said."""

    def mode(self, queue_depth: int) -> Mode:
        """The way in which an executor runs plans here. Called anywhere."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """The context of the worker's calls: torch's inference mode, threads or streams of this platform. Whichever
        thread calls, also inside such a context."""
        ...

    def is_computing(self) -> bool:
        """True where the thread that calls is known to be in such a context, which is then not entered again: between
        two steps of a model on a CPU that takes 35 microseconds."""
        ...

    def synchronize(self) -> None:
        """Return when everything enqueued has run. Called anywhere."""
        ...

    def describe(self) -> str:
        """One line for users: kernels, device, formats of weights and KV cache. Called anywhere."""
        ...

    def code_identity(self) -> dict[str, str]:
        """The code that computes: blocks on disk are shared only between engines whose code computes the same bits."""
        ...

    stage: Stage
    """The layers that it computes."""
    expert_counts: ExpertCounters | None
    """Rows that each expert of each layer has computed, by the expert's number: int64, where the model computes. None
    without the option of that name."""

    adapters: ModelAdapters | None
    """Of the model that was loaded last; None without the option `enable_lora`."""

    draft_model: DraftModel | None
    """Makes drafts for the model that was loaded last; None: nothing does."""

    def load_model(self, progress: Progress) -> CausalLM:
        """Fills `expert_counts` and `draft_model`. Raises ModelLoadError, or InsufficientMemoryError."""
        ...

    def load_images(self) -> ImageOverlays | None:
        """The encoder of the images of prompts; None for a model that is given none. Raises as `load_model`."""
        ...

    def meter(self) -> MemoryMeter: ...

    def allocate_pages(self, layout: KVCacheLayout) -> list[torch.Tensor]:
        """The pool where the model computes: [num_blocks, page bytes] uint8 each, zero. Raises
        InsufficientMemoryError."""
        ...

    def allocate_host_pool(self, layout: KVCacheLayout) -> HostPool:
        """Raises InsufficientMemoryError."""
        ...

    def make_transfers(self, pages: Sequence[torch.Tensor], host_pool: HostPool) -> BlockTransfers: ...

    def make_compute(
        self,
        model: CausalLM,
        layout: KVCacheLayout,
        pages: Sequence[torch.Tensor],
        tables: BlockTables,
        sampling: SamplingRows,
        values: ColumnValues,
    ) -> StepCompute:
        """Empty columns, and kernels over them and over `tables`, `sampling` and `values`, the host's columns. Raises
        ConfigError when the columns cannot be addressed."""
        ...

    def offload_weights(self, model: CausalLM) -> DeviceWeights | None:
        """Move the weights to the host and free the device's memory; None where they are on the host anyway. Raises
        InsufficientMemoryError, without any change."""
        ...

    def release_reserve(self) -> None:
        """Free memory that is only kept in reserve."""
        ...
