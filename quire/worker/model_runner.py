"""Model runner: plans in, results out, in the order of effects that `quire.step` documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from quire.config.pooling import PoolingConfig
from quire.errors import QuireError, is_interrupt
from quire.logging import get_logger
from quire.sampling.batch import TokenMasks
from quire.sampling.errors import NonFiniteLogitsError
from quire.sampling.results import Deferred, Samples
from quire.step import SamplingInputs, StepPlan, StepResult
from quire.worker.drafts import NOTHING_ACCEPTED, Accepted, add_accepted, note_found
from quire.worker.input_batch import InputBatch, build_input_batch
from quire.worker.kv_transfer import BlockTransfers
from quire.worker.masks import read_masks
from quire.worker.overlays import OverlaySource
from quire.worker.platform.interface import ComputeStep, PendingCopy, StepCompute
from quire.worker.pooling import PooledRows, add_pooled, generated_samples, pooled_rows, pooling_batch
from quire.worker.prompt_logprobs import PromptScorer, PromptScores
from quire.worker.request_state import RequestState
from quire.worker.sample_rows import SampleRows, build_sample_rows

logger = get_logger(__name__)


@dataclass(slots=True)
class Launched:
    """Started step. sampled: rows of `samples`. accepted: drafts to keep. pooled: vectors of pooling requests, [P,
    width]. copy: transfer of the tensors of `samples`, `accepted`, `pooled`, then `scores`; None: nothing was computed.
    tells_drafts: the result has all samples' drafts. error: from sampling that awaited its inputs."""

    plan: StepPlan
    samples: Samples | None = None
    sampled: SampleRows | None = None
    accepted: Accepted = NOTHING_ACCEPTED
    pooled: Deferred[np.ndarray] | None = None
    scores: Sequence[PromptScores] = ()
    copy: PendingCopy | None = None
    tells_drafts: bool = False
    error: BaseException | None = None

    def collect(self) -> StepResult:
        """Wait for the step's result, once, on the thread that collects. Raises the error of sampling, or QuireError if
        its inputs have not come."""
        plan, samples = self.plan, self.samples
        if self.error is not None:
            raise self.error
        if plan.masked_samples and self.copy is None:
            raise QuireError(f"step {plan.step_id} has no result, because its sampling inputs have not come")
        result = StepResult(plan.step_id, [])
        if self.copy is None:
            return result
        hosts = iter(self.copy.wait())
        nonfinite: Sequence[int] = ()
        if samples is not None:
            found, accepted = samples.assemble(hosts), self.accepted
            if samples.failed:
                result.failed = self._failed(samples.failed)
            if accepted.counts is None:
                token_ids, logprobs, result.candidates, nonfinite = found
                result.token_ids = [[token_id] for token_id in token_ids]
                if logprobs:
                    result.logprobs = {index: [entry] for index, entry in logprobs.items()}
            else:
                assert self.sampled is not None, "samples have rows"
                assert self.sampled.firsts is not None, "drafts have rows"
                nonfinite = add_accepted(result, found, self.sampled.firsts.tolist(), accepted.counts.read(hosts))
            if accepted.found is not None:
                counts = accepted.found.read(hosts)
                tokens = () if accepted.token_ids is None else accepted.token_ids.read(hosts)
                note_found(result, plan, counts, tokens, tells_all=self.tells_drafts)
        if self.pooled is not None:
            nonfinite = add_pooled(result, plan, self.pooled.read(hosts), nonfinite)
        nonfinite_prompts = []
        for scores in self.scores:
            try:
                result.prompt_logprobs[plan.seq_ids[scores.index]] = scores.assemble(hosts)
            except NonFiniteLogitsError:
                nonfinite_prompts.append(scores.index)
        if nonfinite or nonfinite_prompts:
            _report_nonfinite(result, plan, nonfinite, nonfinite_prompts)
        return result

    def _failed(self, rows: Mapping[int, str]) -> dict[int, str]:
        firsts = None if self.sampled is None else self.sampled.firsts
        if firsts is None:
            return dict(rows)
        return {int(np.searchsorted(firsts, row, "right")) - 1: reason for row, reason in rows.items()}


class Computed(NamedTuple):
    """Step between forward pass and sampling, which may wait for masks. hidden: [R, hidden size], hidden states of the
    read tokens."""

    launched: Launched
    step: ComputeStep
    hidden: torch.Tensor
    batch: InputBatch
    sampled: SampleRows | None
    pooled: PooledRows | None


class ModelRunner:
    """Runs plans over the request state, in order. A step writes its sampled tokens to the request state, so the next
    plan may schedule tokens that the scheduler does not know yet."""

    def __init__(
        self,
        compute: StepCompute,
        requests: RequestState,
        transfers: BlockTransfers,
        vocab_size: int,
        pooling: PoolingConfig | None = None,
        overlays: OverlaySource | None = None,
    ) -> None:
        self._overlays = overlays
        self._compute = compute
        self._requests = requests
        self._transfers = transfers
        self._vocab_size = vocab_size
        self._pooling = pooling
        self._unsampled: Computed | None = None
        """Last step, while it awaits its sampling inputs."""
        self._prompt_scorer = PromptScorer(compute, requests, max(1, compute.prompt_logits_elements // vocab_size))

    def launch(self, plan: StepPlan) -> Launched:
        """Start one plan. If it expects masks (sampling inputs), it is sampled when they come."""
        assert self._unsampled is None, f"step {plan.step_id} is launched before the last one was sampled"
        requests, transfers = self._requests, self._transfers
        transfers.wait()
        requests.update(plan)
        starts: Sequence[int] = plan.start_positions
        counts: Sequence[int] = plan.num_tokens
        num_drafts: np.ndarray | None = None
        if (plan.num_drafts or requests.drafted) and requests.has_drafts(plan):
            starts, counts, num_drafts = requests.columns.place_drafts(plan, requests)
        batch = build_input_batch(plan.seq_ids, starts, counts, requests, num_drafts)
        if self._pooling is not None:
            batch = pooling_batch(batch, self._pooling.method)
        if self._compute.reads_all:
            batch = batch._replace(logits_rows=None, read_start=batch.query_start)
        if self._overlays is not None:
            batch = batch._replace(overlay=self._overlays.of_step(plan, batch))
        sampled = pooled = None
        seq_ids, sources = plan.sample_seq_ids, plan.sample_from
        if plan.pooled:
            pooled = pooled_rows(plan, batch, "last" if self._pooling is None else self._pooling.method)
            generated = generated_samples(plan)
            seq_ids, sources = [seq_ids[index] for index in generated], [sources[index] for index in generated]
        if seq_ids:
            sampled = build_sample_rows(seq_ids, sources, batch, requests)
        step = self._compute.stage(plan, batch, sampled, pooled)
        self._move_blocks(plan, step)
        if not plan.seq_ids:
            return Launched(plan)
        swaps_out = plan.transfers is not None and plan.transfers.swap_out
        if swaps_out and (
            self._compute.writes_ahead
            or transfers.is_reading(requests.tables.written(batch.rows, batch.starts, batch.ends))
        ):
            transfers.wait()
        launched = Launched(plan)
        computed = Computed(launched, step, step.forward(), batch, sampled, pooled)
        if plan.masked_samples:
            self._unsampled = computed
        else:
            self._finish(computed, None)
        return launched

    def sample(self, inputs: SamplingInputs) -> None:
        """Sample the launched step that awaits these masks."""
        computed, self._unsampled = self._unsampled, None
        assert computed is not None, f"no step awaits the sampling inputs of step {inputs.step_id}"
        try:
            plan = computed.launched.plan
            firsts = None if computed.sampled is None else computed.sampled.firsts
            self._finish(computed, read_masks(inputs, plan, self._vocab_size, firsts))
            for index in inputs.discarded:
                self._requests.lengths[plan.sample_seq_ids[index]] -= 1
        except BaseException as error:
            computed.launched.error = error
            if is_interrupt(error):
                raise

    def _finish(self, computed: Computed, masks: TokenMasks | None) -> None:
        launched, step, hidden, batch, sampled, pooled = computed
        if not self._compute.samples:  # another stage samples; a later plan brings the tokens (`StepPlan.sampled`)
            launched.copy = self._compute.copy_out(())
            return
        if sampled is not None:
            launched.samples, launched.sampled = step.sample(hidden, sampled, masks), sampled
        if self._compute.has_drafts:
            launched.accepted = step.accept(hidden, launched.samples, sampled, self._requests)
            launched.tells_drafts = self._compute.tells_drafts
        launched.pooled = None if pooled is None else step.pool(hidden, pooled)
        launched.scores = self._prompt_scorer.score(hidden, batch)
        launched.copy = self._compute.copy_out(_tensors(launched))

    def warm_up(self) -> None:
        self._compute.warm_up(self.launch)

    def capture_next(self) -> bool:
        return self._compute.capture_next()

    def _move_blocks(self, plan: StepPlan, step: ComputeStep) -> None:
        if plan.transfers is not None:
            self._transfers.start(plan.transfers.swap_out, plan.transfers.swap_in)
        if plan.block_copies:
            if self._transfers.is_reading(destination for _, destination in plan.block_copies):
                self._transfers.wait()
            step.copy_blocks()


def _tensors(launched: Launched) -> Iterator[torch.Tensor]:
    if launched.samples is not None:
        yield from launched.samples.tensors()
        for part in launched.accepted:
            if part is not None:
                yield from part.tensors
    if launched.pooled is not None:
        yield from launched.pooled.tensors
    for each in launched.scores:
        yield from each.tensors()


def _report_nonfinite(result: StepResult, plan: StepPlan, sampled: Sequence[int], prompts: Sequence[int]) -> None:
    """Record the sequences in a step's result, each once, and in the log. sampled: indices into the plan's samples;
    prompts: into its batch."""
    names = [plan.sample_seq_ids[index] for index in sampled] + [plan.seq_ids[index] for index in prompts]
    result.nonfinite = list(dict.fromkeys(names))
    logger.error(
        "the model computed NaN or infinite logits for sequence %s; its weights are damaged or the dtype's range is "
        "too small for it (try dtype='float32')",
        ", ".join(map(str, result.nonfinite)),
    )
