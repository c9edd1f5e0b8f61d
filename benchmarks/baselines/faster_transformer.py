"""Request-level batching, as a server in front of FasterTransformer does it (paper §6.1, "Baseline 1").

A batch is formed of the requests that arrived first, as many as find a region of the maximum, and runs until its last
request has ended; none joins or leaves meanwhile. All prompts are padded to the longest one, and an ended one is
computed on (its tokens are thrown away), as a batch of one tensor shape requires.

Padding is a row of its own beside each shorter prompt, which computes as many tokens as are missing, in a part of the
region that the prompt does not use yet, and is dropped with the next plan. Beams that have ended are not computed on.
"""

from __future__ import annotations

from collections import deque

from benchmarks.baselines.contiguous import ContiguousScheduler
from benchmarks.baselines.reservation import Reservation
from quire.config.engine import EngineConfig
from quire.decoding.sequence import Request, RequestStatus, Sequence
from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.layout import KVCacheLayout
from quire.sampling_params import SamplingParams
from quire.scheduler.plan_builder import PlanBuilder
from quire.step import SequenceSampling

PAD_TOKEN = 0
_PADDING = SequenceSampling(params=SamplingParams(), seed=0, stop_token_ids=[], bad_token_sequences=[])
"""Nothing is sampled from it."""


class FasterTransformerScheduler(ContiguousScheduler):
    """Computes the prompts of a new batch first, in as few steps as the token budget allows, then all next tokens."""

    keeps_ended = True

    def __init__(self, config: EngineConfig, layout: KVCacheLayout, reservation: Reservation) -> None:
        super().__init__(config, layout, reservation)
        self._prompts: deque[Request] = deque()
        """Of the batch, still to be computed."""
        self._padding: list[int] = []
        """Rows that the next plan drops."""

    @property
    def _most_rows(self) -> int:
        """Each prompt may have a row of padding beside it."""
        return max(1, self._max_num_seqs // 2)

    def _plan(self, builder: PlanBuilder, now: float) -> None:
        self._changes.released += self._padding
        self._padding.clear()
        if not self._rows:
            self._form_batch(now)
        if not self._prompts:
            self._schedule_batch(builder)
            return
        longest = max(request.num_prompt_tokens for request in self._rows)
        while self._prompts and longest <= builder.budget:
            request = self._prompts.popleft()
            if request.status is not RequestStatus.FINISHED:
                num_blocks = -(-request.num_prompt_tokens // self.kv.block_size)
                leader = self._schedule_prompt(builder, request, num_blocks)
                self._pad(builder, leader, num_blocks, longest - request.num_prompt_tokens)

    def _form_batch(self, now: float) -> None:
        waiting = self._waiting
        while waiting and self.kv.num_regions + len(waiting[0].live_sequences) <= self._most_rows:
            if not self._try_start(waiting[0], now):
                break
            self._prompts.append(waiting.popleft())

    def _pad(self, builder: PlanBuilder, leader: Sequence, num_blocks: int, num_tokens: int) -> None:
        """Compute `num_tokens` tokens of padding beside a prompt that uses the first `num_blocks` of its region, or as
        many as the rest of it has room for."""
        assert leader.blocks is not None
        size, unused = self.kv.block_size, leader.blocks.tables[0][num_blocks:]
        num_tokens = min(num_tokens, len(unused) * size)
        if num_tokens == 0:
            return
        padding = Sequence(next(self._seq_ids), 0, leader.request, _PADDING)
        padding.token_ids = [PAD_TOKEN] * (num_tokens + 1)  # one is left over, so that nothing is sampled
        used = unused[: -(-num_tokens // size)]
        padding.blocks = BlockTable([used], len(used) * size, None)
        builder.add_row(padding)
        builder.plan.new_sequences[-1].num_prompt_tokens = len(padding.token_ids)
        builder.schedule(padding, num_tokens)
        self._padding.append(padding.seq_id)

    def _schedule_batch(self, builder: PlanBuilder) -> None:
        for request in self._rows:
            has_ended = request.status is RequestStatus.FINISHED
            if has_ended and request.beam_search is not None:
                continue
            for sequence in request.sequences:
                if sequence.blocks is None:
                    continue
                if sequence.finish_reason is None:
                    self._schedule_next(builder, sequence, sequence.max_total_tokens)
                elif sequence.num_computed_tokens < self._longest:
                    self._schedule_next(builder, sequence, self._longest)

    def _leave(self, request: Request) -> None:
        if any(each.status is not RequestStatus.FINISHED for each in self._rows):
            return
        for each in self._rows:
            for sequence in each.sequences:
                if sequence.seq_id in self.kv:
                    self._drop(sequence)
        self._rows.clear()
        self._prompts.clear()
