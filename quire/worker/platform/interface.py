"""Interface between the worker and the hardware it computes on. A Platform serves the worker's life cycle (memory,
weights, pools) and makes the StepCompute, which runs plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
import torch

from quire.config.model import ModelConfig
from quire.kv_cache.deal import Deal
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import DeviceShare
from quire.layers.expert_balance import ExpertBalancer
from quire.layers.experts import ExpertCounters
from quire.models.adapters import ModelAdapters
from quire.models.interface import CausalLM
from quire.models.vision import VisionEncoder
from quire.models.weight_files import Progress
from quire.parallel.interface import ExpertExchange
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
"""Execution of plans: in the calling thread, on an executor's thread, or enqueued on a device."""


class PendingCopy(Protocol):
    """Tensors on their way from a device to the host; a step's result waits for them."""

    def wait(self) -> list[torch.Tensor]:
        """Wait for this copy; return the host tensors in order."""
        ...


class RequestColumns(Protocol):
    """Columns of the request state for kernels: tokens, block tables, sampling parameters, step columns. On a device
    each call stages a write for the next step; no word may be written twice without a copy of a row in between."""

    def write_tokens(self, row: int, position: int, token_ids: Sequence[int]) -> None: ...

    def copy_tokens(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy a row's first tokens to a forked row."""
        ...

    def begin_text(self, row: int, num_tokens: int, scope: str, prediction: Sequence[int]) -> None:
        """Start a text for draft look-up in a row with written tokens (`Finder.begin_text`)."""
        ...

    def copy_text(self, source: int, destination: int, num_tokens: int) -> None:
        """Start a text for draft look-up with the first tokens of another row."""
        ...

    def end_text(self, row: int, num_tokens: int) -> None:
        """End the row's text of `num_tokens` tokens as its sequence leaves; look-ups may keep the output."""
        ...

    def write_blocks(self, row: int, group: int, start: int, entries: Sequence[int] | np.ndarray) -> None:
        """Write block-table entries from index `start` on (quire/worker/block_tables.py)."""
        ...

    def copy_blocks(self, source: int, destination: int, group: int, num_entries: int) -> None:
        """Copy the first entries of a row's block table to a forked row."""
        ...

    def write_sampling(self, row: int) -> None:
        """Write a new sequence's sampling parameters to where kernels read them."""
        ...

    def write_values(self, row: int, values: Mapping[str, int], lists: Mapping[str, TokenValues] = ...) -> None:
        """Write the row's step-column values (`NewSequence.columns` and `token_columns`)."""
        ...

    def copy_values(self, source: int, destination: int) -> None:
        """Copy a row's step-column values to a forked row."""
        ...

    def place_drafts(self, plan: StepPlan, requests: RequestState) -> Placed:
        """Write the step's drafts to the token table, after the known tokens."""
        ...

    def input_batch(
        self, rows: np.ndarray, starts: Sequence[int], counts: Sequence[int], rows_version: int
    ) -> InputBatch:
        """Batch of a step whose tokens are all read (`InputBatch.of`), valid until the next call. rows: [S] int64.
        rows_version: see InputBatch."""
        ...


class ComputeStep(Protocol):
    """Work of one plan, in the order of the model runner's calls. No call waits for a device."""

    def copy_blocks(self) -> None:
        """Run the plan's block copies; all sources are read first."""
        ...

    def forward(self) -> torch.Tensor:
        """Run the model over the scheduled tokens. Returns at least [R, hidden size], the rows read."""
        ...

    def sample(self, hidden: torch.Tensor, samples: SampleRows, masks: TokenMasks | None) -> Samples:
        """Sample a token for each row, of those that its mask allows, and write it to the token table."""
        ...

    def accept(
        self, hidden: torch.Tensor, samples: Samples | None, sampled: SampleRows | None, requests: RequestState
    ) -> Accepted:
        """Accept drafts that equal the sampled tokens, and find drafts for the next step. hidden: result of `forward`.
        samples, sampled: None if nothing is sampled. Only called if `StepCompute.has_drafts`."""
        ...

    def pool(self, hidden: torch.Tensor, pooled: PooledRows) -> Deferred[np.ndarray]:
        """Vectors of pooling requests, [P, width] float32, when they have come. pooled: argument to `stage`."""
        ...


class StepCompute(Protocol):
    """Computes plans over its request state, on one platform; ModelRunner calls it. prompt_logits_elements: maximum
    logits of prompt positions computed at once (at least one position)."""

    prompt_logits_elements: int
    has_drafts: bool
    """True if plans may have drafts."""
    writes_ahead: bool
    """True if a draft model writes to further blocks of the step's sequences."""
    reads_all: bool
    """True if the hidden states of all tokens are read, for drafts."""
    samples: bool
    """True if the last layer and sampling are computed here."""
    tells_drafts: bool
    """True if results have all samples' drafts, for other pipeline stages."""

    @property
    def columns(self) -> RequestColumns: ...

    def stage(
        self, plan: StepPlan, batch: InputBatch, samples: SampleRows | None, pooled: PooledRows | None
    ) -> ComputeStep:
        """Start a plan: bring its column changes and its batch to the device."""
        ...

    def score_prompt(self, hidden: torch.Tensor, row: int, start: int, num_top: int) -> Logprobs:
        """Log-probabilities of the row's tokens from position `start` on. hidden: [N, hidden size], the preceding
        positions."""
        ...

    def copy_out(self, tensors: Iterable[torch.Tensor]) -> PendingCopy:
        """Start the copy of computed tensors to the host."""
        ...

    def warm_up(self, launch: Callable[[StepPlan], object]) -> None:
        """Compile and capture what the first steps need. The request state must be empty."""
        ...

    def capture_next(self) -> bool:
        """Capture one more graph while no plan is outstanding; returns whether one was left. Called while idle."""
        ...


class HostBlockTensors(Protocol):
    """Memory of the host pool, for swapped sequences and KV connectors. pages[j]: [num_host_blocks + 1, page bytes]
    uint8."""

    @property
    def pages(self) -> Sequence[torch.Tensor]: ...

    def close(self) -> None:
        """Release system resources; no copy may be in progress."""
        ...


@dataclass(frozen=True)
class StepLimits:
    """Sizes of the largest step. longest: maximum tokens of a sequence. max_drafts: maximum drafts of a sequence per
    step."""

    block_size: int
    max_num_tokens: int
    max_num_seqs: int
    longest: int
    max_drafts: int = 0

    @property
    def max_num_rows(self) -> int:
        """Maximum rows of logits: one per sequence and draft."""
        return max(self.max_num_seqs, min(self.max_num_tokens, self.max_num_seqs * (1 + self.max_drafts)))


class MemoryMeter(Protocol):
    """Measures a platform's memory at the start, to size the pools."""

    def free(self) -> int:
        """Bytes still available where the model computes."""
        ...

    def step_bytes(self, model: CausalLM, limits: StepLimits, estimate: int) -> int | None:
        """Peak bytes of the largest step from dummy steps; None if not measurable. estimate: approximate result, for
        errors. Raises InsufficientMemoryError."""
        ...

    def device_share(self, model: CausalLM, limits: StepLimits, available: int, activations: int) -> DeviceShare | None:
        """Bytes of a separate device's memory by use, which leaves the rest to the pool; None for a CPU."""
        ...

    def dummy_pass(self, model: CausalLM, limits: StepLimits, batch: InputBatch) -> Callable[[], torch.Tensor]:
        """Forward pass over a dummy batch with a small pool, to measure; it returns hidden states."""
        ...


class HeadInputs(NamedTuple):
    """Inputs and outputs of a draft head. taps: layers of the model, whose results it reads side by side (none: the
    model's own results). token_ids: [logits] int64, the token of each of its logits (None: all in order). is_apart:
    True for a head with weights and layer numbers of its own."""

    taps: tuple[int, ...] = ()
    token_ids: np.ndarray | None = None
    is_apart: bool = False


class DraftModel(NamedTuple):
    """Draft model, or a draft head, with layers after the model's in the KV cache. meter: measures its memory; None
    for a head, whose activations are estimated. head: head's inputs (None: it is a model)."""

    config: ModelConfig
    model: CausalLM
    meter: MemoryMeter | None
    head: HeadInputs | None = None

    @property
    def is_apart(self) -> bool:
        """True if it shares neither weights nor layer numbers with the model. False: a draft head."""
        return self.head is None or self.head.is_apart


class Platform(Protocol):
    """Hardware as used by one worker (CpuPlatform, CudaPlatform). Calls are sequential, and inside `computing` unless
    stated otherwise."""

    def mode(self, queue_depth: int) -> Mode:
        """Mode in which an executor runs plans here. May be called anywhere."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """Context of the worker's calls: inference mode, threads or streams. Re-entrant, for any thread."""
        ...

    def is_computing(self) -> bool:
        """True if the calling thread is known to be in this context, then not entered again."""
        ...

    def synchronize(self) -> None:
        """Wait for all enqueued work. May be called anywhere."""
        ...

    def describe(self) -> str:
        """One line for users: kernels, device, formats. May be called anywhere."""
        ...

    def code_identity(self) -> dict[str, str]:
        """Names and versions of the computing code; only engines with equal bits share blocks on disk."""
        ...

    stage: Stage
    """Layers to compute."""
    deal: Deal
    """Tokens to keep, in dealt groups."""
    expert_counts: ExpertCounters | None
    """Rows computed per layer and expert, int64, on the model's device; None if not counted."""

    balancer: ExpertBalancer | None
    """Moves experts between ranks; None: they stay."""

    exchange: ExpertExchange | None
    """Exchange with other replicas' experts; None: this one has all."""

    adapters: ModelAdapters | None
    """Adapters of the loaded model; None without `enable_lora`."""

    draft_model: DraftModel | None

    def load_model(self, progress: Progress) -> CausalLM:
        """Load the model and set `expert_counts`, `balancer` and `draft_model`. Raises ModelLoadError or
        InsufficientMemoryError."""
        ...

    def load_images(self) -> ImageOverlays | None:
        """Encoder of images; None for a model without. Raises as `load_model`."""
        ...

    def meter(self) -> MemoryMeter: ...

    def allocate_pages(self, layout: KVCacheLayout) -> list[torch.Tensor]:
        """Device pool: zeroed [num_blocks, page bytes] uint8 each. Raises InsufficientMemoryError."""
        ...

    def allocate_host_pool(self, layout: KVCacheLayout) -> HostBlockTensors:
        """Memory on the host for the blocks of swapped sequences. Raises InsufficientMemoryError."""
        ...

    def make_transfers(self, pages: Sequence[torch.Tensor], host_pool: HostBlockTensors) -> BlockTransfers: ...

    def make_compute(
        self,
        model: CausalLM,
        layout: KVCacheLayout,
        pages: Sequence[torch.Tensor],
        tables: BlockTables,
        sampling: SamplingRows,
        values: ColumnValues,
    ) -> StepCompute:
        """StepCompute with empty request columns, and kernels over these and the host's `tables`, `sampling` and
        `values`. Raises ConfigError if the columns are too large to address."""
        ...

    def offload_weights(self, model: CausalLM, encoder: VisionEncoder | None) -> DeviceWeights | None:
        """Move the weights of the model and its encoder to the host and free device memory; None on a CPU, where they
        are already. Raises InsufficientMemoryError with nothing changed."""
        ...

    def release_reserve(self) -> None:
        """Return memory that the allocator holds unused to the system, for a sleep."""
        ...
