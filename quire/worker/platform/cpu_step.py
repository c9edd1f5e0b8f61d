"""Plans on a CPU: kernels read the host's columns, and a step has run when a call returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from quire.config.adapters import ADAPTER_SLOTS
from quire.models.interface import CausalLM
from quire.parallel.stage import WHOLE_MODEL, Stage
from quire.sampling.batch import SampleBatch, TokenMasks
from quire.sampling.results import Deferred, Logprobs, Samples, ready
from quire.sampling.sampler import Sampler
from quire.step import StepPlan
from quire.worker.drafts import NOTHING_ACCEPTED, Accepted
from quire.worker.input_batch import InputBatch
from quire.worker.platform.cpu_blocks import BlockCopier
from quire.worker.platform.cpu_inputs import CpuColumns, StepInputs
from quire.worker.pooling import PooledRows, generated_samples, pool_rows
from quire.worker.request_state import RequestState
from quire.worker.sample_rows import SampleRows

if TYPE_CHECKING:
    from quire.worker.platform.shared_inputs import SharedInputs

PROMPT_LOGITS_ELEMENTS = 2**22


class NoCopy:
    """PendingCopy of a CPU, whose results are on the host."""

    def wait(self) -> list[torch.Tensor]:
        return []


class CpuCompute:
    """Computes plans on a CPU (StepCompute)."""

    def __init__(
        self,
        model: CausalLM,
        copy_blocks: BlockCopier,
        columns: CpuColumns,
        inputs: StepInputs,
        sampler: Sampler[np.ndarray],
        *,
        has_head: bool = False,
        pipeline: Stage = WHOLE_MODEL,
        shared: SharedInputs | None = None,
    ) -> None:
        """inputs: gathered from `columns`. has_head: pooled samples go through `CausalLM.compute_logits`. pipeline:
        this rank's stage. shared: `inputs`, where ranks share prompts."""
        self.shared = shared
        self.samples, self.tells_drafts = pipeline.is_last, pipeline.count > 1
        self.columns = columns
        self.has_drafts = columns.drafts is not None
        self.writes_ahead = columns.drafts is not None and columns.drafts.writes_blocks
        self.computed_drafts = columns.drafts if self.writes_ahead else None
        """Drafts that layers make (None: none)."""
        self.reads_all = columns.drafts is not None and columns.drafts.reads_all
        self.prompt_logits_elements = PROMPT_LOGITS_ELEMENTS
        self.model = model
        self.inputs = inputs
        self.copy_blocks = copy_blocks
        self.sampler = sampler
        self.has_head = has_head
        self._no_copy = NoCopy()

    def stage(
        self, plan: StepPlan, batch: InputBatch, samples: SampleRows | None, pooled: PooledRows | None
    ) -> CpuStep:
        return CpuStep(self, plan, batch)

    def score_prompt(self, hidden: torch.Tensor, row: int, start: int, num_top: int) -> Logprobs:
        targets = self.columns.token_ids[row, start : start + len(hidden)].astype(np.int64)
        slots = self.columns.values.of_rows(ADAPTER_SLOTS, np.full(len(hidden), row))
        return self.sampler.logprobs(self.model.compute_logits(hidden, slots), targets, num_top)

    def copy_out(self, tensors: Iterable[torch.Tensor]) -> NoCopy:
        return self._no_copy

    def warm_up(self, launch: Callable[[StepPlan], object]) -> None:
        """Does nothing: no kernel is compiled."""

    def capture_next(self) -> bool:
        return False


class CpuStep(NamedTuple):
    """One plan in progress on a CPU (ComputeStep)."""

    compute: CpuCompute
    plan: StepPlan
    batch: InputBatch

    def copy_blocks(self) -> None:
        self.compute.copy_blocks(self.plan.block_copies)

    def forward(self) -> torch.Tensor:
        compute, batch, drafts = self.compute, self.batch, self.compute.computed_drafts
        if drafts is not None and drafts.make(batch, compute.columns.token_ids):
            compute.columns.gather_again(batch)
        rows = None if batch.logits_rows is None else torch.from_numpy(batch.logits_rows)
        inputs, taps = compute.inputs.forward_batch(batch, rows), () if drafts is None else drafts.taps
        if batch.overlay is not None or taps:
            overlay = None if batch.overlay is None else batch.overlay.over(torch.from_numpy(batch.overlay.rows))
            inputs = inputs.having(overlay=overlay, taps=taps)
        result = compute.model.forward(inputs)
        if compute.shared is not None and compute.samples:
            result = compute.shared.gather(result)
        if drafts is not None:
            drafts.keep_results(result)
        return result.hidden

    def sample(self, hidden: torch.Tensor, samples: SampleRows, masks: TokenMasks | None) -> Samples:
        compute, rows = self.compute, samples.rows
        read = hidden if samples.are_read_rows else hidden[torch.from_numpy(samples.last_index)]
        logits = compute.model.compute_logits(read, compute.columns.values.of_rows(ADAPTER_SLOTS, rows))
        batch = SampleBatch(rows, rows, samples.lengths, samples.num_prompt_tokens, compute.columns.token_ids)
        return compute.sampler.sample(logits, batch, masks)

    def accept(
        self, hidden: torch.Tensor, samples: Samples | None, sampled: SampleRows | None, requests: RequestState
    ) -> Accepted:
        drafts, table, accepted = self.compute.columns.drafts, self.compute.columns.token_ids, NOTHING_ACCEPTED
        assert drafts is not None, "accepted where there are drafts"
        if drafts.num_skipped and sampled is not None and sampled.firsts is None:
            drafts.num_skipped -= 1
            return accepted
        if samples is None or sampled is None:
            if drafts.follows:
                drafts.follow(self.batch, self._lengths(requests), table)
            return accepted
        rows, last = sampled.rows, sampled.lengths
        if sampled.firsts is not None:
            counts = drafts.accept(samples.token_ids.read(iter(())), sampled.sources)
            rows, last = rows[sampled.firsts[:-1]], last[sampled.firsts[:-1]] + counts - 1
            for seq_id, place in zip(sampled.seq_ids, last.tolist(), strict=True):
                requests.lengths[seq_id] = place + 1
            accepted = Accepted(ready(counts))
        if drafts.follows:
            drafts.follow(self.batch, self._lengths(requests), table)
        needed: Sequence[int] = range(len(rows)) if self.compute.tells_drafts else self.plan.masked_samples
        if self.plan.masked_samples and self.plan.pooled and not self.compute.tells_drafts:
            needed = [place for place, index in enumerate(generated_samples(self.plan)) if index in set(needed)]
        found = drafts.look_up(rows, last, table, needed)
        if found is None:
            return accepted
        tokens = ready(drafts.tokens_of(rows)) if len(needed) else None
        return accepted._replace(found=ready(found), token_ids=tokens)

    def _lengths(self, requests: RequestState) -> np.ndarray:
        return np.fromiter(map(requests.lengths.__getitem__, self.plan.seq_ids), np.int64, len(self.plan.seq_ids))

    def pool(self, hidden: torch.Tensor, pooled: PooledRows) -> Deferred[np.ndarray]:
        compute = self.compute
        slots = compute.columns.values.of_rows(ADAPTER_SLOTS, pooled.rows) if compute.has_head else None
        return ready(pool_rows(hidden, pooled, compute.model, slots, has_head=compute.has_head))
