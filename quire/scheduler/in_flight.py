"""Plans in flight: the scheduler's data on a plan until its result."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from quire.decoding.sequence import Sequence
from quire.errors import UserError
from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.matching import matcher_of
from quire.step import SamplingInputs, StepPlan, TokenLogprobs

Sampled: TypeAlias = tuple[Sequence, list[int], list[TokenLogprobs] | None]
"""(sequence, its new tokens, their logprobs where requested)."""


class InFlight(msgspec.Struct, frozen=True):
    plan: StepPlan
    sequences: list[Sequence]
    """Aligned with the plan's columns of the batch."""
    filled: list[tuple[Sequence, BlockTable, int]]
    """Sequences that may fill a block, with their blocks at planning time and computed tokens after the plan (an upper
    bound with drafts in flight)."""
    samples: list[Sequence]
    """Aligned with the plan's `sample_seq_ids`."""
    forked: list[tuple[Sequence, list[Sequence]]]
    """Sequences that fork after this plan's forward pass, with their children."""
    resumed: list[tuple[Sequence, BlockTable, int]]
    """Sequences that this plan swaps in, with their blocks and numbers of computed tokens."""
    discarded: list[Sequence]
    """Samples that get no token from this plan because their masks come too late."""

    @property
    def awaits_masks(self) -> bool:
        return any(_awaits_mask(self.samples[index]) for index in self.plan.masked_samples)

    def sampling_inputs(self) -> tuple[SamplingInputs, list[tuple[Sequence, UserError]]]:
        """Masks of tokens that constraints allow, and the sequences that cannot continue, with reasons. Called when all
        earlier results are known. The workers drop samples whose mask is missing (`discarded`); they are computed
        again."""
        masks: dict[int, bytes] = {}
        draft_masks: dict[int, list[bytes]] = {}
        failed, discarded = [], []
        for index in self.plan.masked_samples:
            sequence = self.samples[index]
            if sequence.finish_reason is not None:
                continue
            if _awaits_mask(sequence):
                discarded.append(index)
                self.discarded.append(sequence)
                sequence.num_pending_tokens -= 1
                continue
            try:
                mask = _next_mask(sequence) if sequence.foreseen is None else sequence.foreseen.mask
            except UserError as error:
                failed.append((sequence, error))
                continue
            if mask is not None:
                masks[index] = mask
            drafts = self.plan.drafts.get(sequence.seq_id)
            if drafts and drafts == sequence.draft_token_ids[: len(drafts)]:
                draft_masks[index] = matcher_of(sequence).draft_masks()[: len(drafts)]
        return SamplingInputs(self.plan.step_id, masks, discarded, draft_masks), failed

    def commit(self, kv: KVCacheManager) -> None:
        """Make the blocks that this step filled findable by their content (prefix index)."""
        for sequence, blocks, end in self.filled:
            if sequence.blocks is blocks:
                num_known = len(sequence.token_ids)
                kv.cache_blocks(blocks, sequence.token_ids, end if end < num_known else num_known)
        for sequence, blocks, num_computed in self.resumed:
            if sequence.blocks is blocks:
                kv.cache_blocks(blocks, sequence.token_ids, num_computed)


def _awaits_mask(sequence: Sequence) -> bool:
    """True while the sequence's mask is missing, which a first token or a beam always waits for."""
    if sequence.finish_reason is not None or sequence.foreseen is not None:
        return False
    if sequence.awaits_matcher:
        return True
    can_wait = sequence.num_output_tokens and sequence.request.beam_search is None
    return bool(can_wait) and not matcher_of(sequence).has_mask


def _next_mask(sequence: Sequence) -> bytes | None:
    """Mask of the tokens that may come next; if a beam's text is complete, of the end tokens alone."""
    matcher = matcher_of(sequence)
    return matcher.mask_of(*sequence.request.eos_token_ids) if matcher.is_finished else matcher.mask()
