"""The model runner: one plan in, one result out, in the order of effects that `quire.step` documents."""

from __future__ import annotations

import numpy as np
import torch

from quire.attention.interface import AttentionBackend
from quire.models.interface import CausalLM
from quire.sampling.backend import SamplerBackend
from quire.sampling.batch import SampleBatch
from quire.sampling.sampler import SampledTokens, Sampler
from quire.step import StepPlan, StepResult
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBatch, build_input_batch
from quire.worker.kv_copy import BlockCopier
from quire.worker.kv_transfer import BlockTransfers
from quire.worker.nonfinite import report_nonfinite
from quire.worker.prompt_logprobs import PromptScorer
from quire.worker.request_state import RequestState

PROMPT_LOGITS_ELEMENTS = 2**22
"""The logits of prompt positions are computed by slices of at most this many elements (at least one position)."""


class ModelRunner:
    """Runs plans over the request state.

    Steps run in order, and a step writes the tokens it samples to the request state, so the next plan may schedule a
    token that the scheduler does not know yet.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        copy_blocks: BlockCopier,
        transfers: BlockTransfers,
        requests: RequestState,
        tables: BlockTables,
        sampler_backend: SamplerBackend,
        vocab_size: int,
    ) -> None:
        self._model = model
        self._backend = backend
        self._copy_blocks = copy_blocks
        self._transfers = transfers
        self._requests = requests
        self._tables = tables
        self._sampler = Sampler(requests.sampling, sampler_backend)
        self._prompt_scorer = PromptScorer(model, sampler_backend, max(1, PROMPT_LOGITS_ELEMENTS // vocab_size))

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan."""
        self._transfers.wait()
        self._update_rows(plan)
        if not plan.seq_ids:
            self._create_forks(plan, {})
            return StepResult(plan.step_id, [])
        requests = self._requests
        rows = requests.rows_of(plan.seq_ids)
        batch = build_input_batch(rows, plan.start_positions, plan.num_tokens, requests, self._tables)
        swaps_out = plan.transfers is not None and plan.transfers.swap_out
        if swaps_out and self._transfers.is_reading(written_blocks(batch, self._tables.block_size)):
            self._transfers.wait()
        hidden = self._model.forward(batch.token_ids, batch.positions, self._backend.plan(batch.attention))
        if plan.forks:
            ends = zip(plan.sample_seq_ids, batch.ends[plan.sample_from].tolist(), strict=True)
            self._create_forks(plan, dict(ends))
        sampled = self._sample(plan, batch, hidden)
        prompts = self._prompt_scorer.score(hidden, batch, requests)
        result = StepResult(
            step_id=plan.step_id,
            token_ids=sampled.token_ids.tolist(),
            logprobs=sampled.logprobs,
            prompt_logprobs={plan.seq_ids[index]: entries for index, entries in prompts.found.items()},
            candidates=sampled.candidates,
        )
        if sampled.nonfinite or prompts.nonfinite:
            report_nonfinite(result, plan, sampled.nonfinite, prompts.nonfinite)
        return result

    def _update_rows(self, plan: StepPlan) -> None:
        """Apply the plan's changes that take effect before the forward pass."""
        requests, tables = self._requests, self._tables
        for seq_id in plan.released:
            tables.clear(requests.release(seq_id))
        for new in plan.new_sequences:
            row = requests.add_request(new.seq_id, new.token_ids, new.num_prompt_tokens, new.sampling)
            tables.append(row, new.block_ids)
        self._create_branches(plan)
        if plan.transfers is not None:
            self._transfers.start(plan.transfers.swap_out, plan.transfers.swap_in)
        if plan.block_copies:
            if self._transfers.is_reading(destination for _, destination in plan.block_copies):
                self._transfers.wait()
            self._copy_blocks(plan.block_copies)
        for seq_id, block_ids in plan.new_blocks.items():
            tables.append(requests.row_of(seq_id), block_ids)
        for seq_id, group, logical_index, block_id in plan.replaced_blocks:
            tables.replace(requests.row_of(seq_id), group, logical_index, block_id)

    def _create_branches(self, plan: StepPlan) -> None:
        """Give new beams rows, and all beams the tokens that the scheduler chose for them."""
        requests = self._requests
        for fork in plan.beam_reorders:
            parent = requests.row_of(fork.parent)
            token_ids = requests.token_ids[parent, : requests.lengths[parent]]
            num_prompt_tokens = int(requests.num_prompt_tokens[parent])
            self._tables.copy(parent, requests.add_request(fork.child, token_ids, num_prompt_tokens, fork.sampling))
        for seq_id, token_id in plan.token_overrides:
            requests.replace_last(requests.row_of(seq_id), token_id)

    def _create_forks(self, plan: StepPlan, sampled_at: dict[int, int]) -> None:
        """Give children rows. sampled_at: sequence -> position of the token that this step samples for it.

        A child that is sampled continues its parent's tokens up to that position; a child with a history brings its
        tokens along; any other child has all tokens of its parent.
        """
        requests = self._requests
        for fork in plan.forks:
            parent = requests.row_of(fork.parent)
            num_tokens = sampled_at.get(fork.child, int(requests.lengths[parent]))
            token_ids = requests.token_ids[parent, :num_tokens] if fork.token_ids is None else fork.token_ids
            num_prompt_tokens = int(requests.num_prompt_tokens[parent])
            self._tables.copy(parent, requests.add_request(fork.child, token_ids, num_prompt_tokens, fork.sampling))

    def _sample(self, plan: StepPlan, batch: InputBatch, hidden: torch.Tensor) -> SampledTokens:
        """Choose the tokens of the plan's sampled sequences and write them to their rows."""
        if not plan.sample_seq_ids:
            return SampledTokens(np.empty(0, np.int64), {}, {})
        requests = self._requests
        source = np.array(plan.sample_from, np.int64)
        last = hidden[torch.from_numpy(batch.last_index[source])]
        rows, lengths = requests.rows_of(plan.sample_seq_ids), batch.ends[source]
        sample_batch = SampleBatch(rows, lengths, requests.num_prompt_tokens[rows], requests.token_ids)
        sampled = self._sampler.sample(lambda: self._model.compute_logits(last), sample_batch)
        requests.append(rows, lengths, sampled.token_ids)
        return sampled


def written_blocks(batch: InputBatch, block_size: int) -> list[int]:
    """The blocks that the model writes keys and values to in this step, of all KV groups."""
    slots = np.concatenate([slots.numpy() for slots in batch.attention.slot_mapping])
    blocks: list[int] = np.unique(slots // block_size).tolist()
    return blocks
