"""Plans on a CPU: what kernels read are the host's columns themselves, and a step has run when a call returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.models.interface import CausalLM
from quire.sampling.batch import SampleBatch, TokenMasks
from quire.sampling.results import Deferred, Logprobs, Samples, ready
from quire.sampling.sampler import Sampler
from quire.step import StepPlan
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBatch
from quire.worker.platform.cpu_blocks import BlockCopier
from quire.worker.platform.cpu_inputs import CacheBackends, prepare_inputs
from quire.worker.pooling import PooledRows, pool_rows
from quire.worker.sample_rows import SampleRows

PROMPT_LOGITS_ELEMENTS = 2**22


class NoCopy:
    """The PendingCopy of a CPU: results are on the host."""

    def wait(self) -> list[torch.Tensor]:
        return []


class CpuColumns:
    """Implements RequestColumns. token_ids: [num_rows, max_model_len + 1] int32 (one more, because a sequence that has
    just reached its end may be run once more before the scheduler knows).

    The token table is reserved and not touched, so a row takes physical memory only as far as it was ever filled.
    """

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self.token_ids = np.zeros((num_rows, max_model_len + 1), np.int32)

    def write_tokens(self, row: int, position: int, token_ids: Sequence[int]) -> None:
        self.token_ids[row, position : position + len(token_ids)] = token_ids

    def copy_tokens(self, source: int, destination: int, num_tokens: int) -> None:
        self.token_ids[destination, :num_tokens] = self.token_ids[source, :num_tokens]

    def write_blocks(self, row: int, group: int, start: int, entries: Sequence[int] | np.ndarray) -> None:
        """Kernels read BlockTables."""

    def copy_blocks(self, source: int, destination: int, group: int, num_entries: int) -> None:
        """Kernels read BlockTables."""

    def write_sampling(self, row: int) -> None:
        """Kernels read SamplingRows."""


class CpuCompute:
    """Implements StepCompute."""

    def __init__(
        self,
        model: CausalLM,
        backends: CacheBackends,
        copy_blocks: BlockCopier,
        columns: CpuColumns,
        tables: BlockTables,
        sampler: Sampler[np.ndarray],
        *,
        has_head: bool = False,
    ) -> None:
        """has_head: pooled samples go through the model's own projection (`CausalLM.compute_logits`)."""
        self.columns = columns
        self.prompt_logits_elements = PROMPT_LOGITS_ELEMENTS
        self.model = model
        self.backends = backends
        self.copy_blocks = copy_blocks
        self.tables = tables
        self.sampler = sampler
        self.has_head = has_head
        self._no_copy = NoCopy()

    def stage(
        self, plan: StepPlan, batch: InputBatch, samples: SampleRows | None, pooled: PooledRows | None
    ) -> CpuStep:
        return CpuStep(self, plan, batch)

    def score_prompt(self, hidden: torch.Tensor, row: int, start: int, num_top: int) -> Logprobs:
        targets = self.columns.token_ids[row, start : start + len(hidden)].astype(np.int64)
        return self.sampler.logprobs(self.model.compute_logits(hidden), targets, num_top)

    def copy_out(self, tensors: Iterable[torch.Tensor]) -> NoCopy:
        return self._no_copy

    def warm_up(self, launch: Callable[[StepPlan], object]) -> None:
        """Nothing is compiled."""

    def capture_next(self) -> bool:
        return False


class CpuStep(NamedTuple):
    """Implements ComputeStep."""

    compute: CpuCompute
    plan: StepPlan
    batch: InputBatch

    def copy_blocks(self) -> None:
        self.compute.copy_blocks(self.plan.block_copies)

    def forward(self) -> torch.Tensor:
        compute = self.compute
        token_ids, batch = prepare_inputs(self.batch, compute.columns.token_ids, compute.tables)
        rows = None if self.batch.logits_rows is None else torch.from_numpy(self.batch.logits_rows)
        segments = None if self.batch.second_segments is None else torch.from_numpy(self.batch.segments)
        return compute.model.forward(compute.backends.forward_batch(token_ids, batch, rows, segments))

    def sample(self, hidden: torch.Tensor, samples: SampleRows, masks: TokenMasks | None) -> Samples:
        compute, rows = self.compute, samples.rows
        read = hidden if samples.are_read_rows else hidden[torch.from_numpy(samples.last_index)]
        logits = compute.model.compute_logits(read)
        batch = SampleBatch(rows, rows, samples.lengths, samples.num_prompt_tokens, compute.columns.token_ids)
        return compute.sampler.sample(logits, batch, masks)

    def pool(self, hidden: torch.Tensor, pooled: PooledRows) -> Deferred[np.ndarray]:
        return ready(pool_rows(hidden, pooled, self.compute.model, has_head=self.compute.has_head))
