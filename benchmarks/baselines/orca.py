"""Orca's iteration-level scheduling (Yu et al., OSDI 2022) over contiguous regions, as the paper assumes it (§6.1).

After every step finished requests leave and waiting ones join, whole prompts in a batch with everybody's next tokens,
as in all of the paper's systems (§4.3). Three reservations make the paper's three variants
(benchmarks/baselines/reservation.py).
"""

from __future__ import annotations

from benchmarks.baselines.contiguous import ContiguousScheduler
from quire.decoding.sequence import Request
from quire.scheduler.plan_builder import PlanBuilder


class OrcaScheduler(ContiguousScheduler):
    """First come, first served: the first request that finds no region keeps all others waiting."""

    def _plan(self, builder: PlanBuilder, now: float) -> None:
        for request in self._rows:
            for sequence in request.sequences:
                if sequence.blocks is not None:
                    self._schedule_next(builder, sequence, sequence.max_total_tokens)
        self._start_waiting(builder, now)

    def _start_waiting(self, builder: PlanBuilder, now: float) -> None:
        waiting = self._waiting
        while waiting and waiting[0].num_prompt_tokens <= builder.budget:
            request = waiting[0]
            num_rows = self.kv.num_regions + len(request.live_sequences)
            if num_rows > self._max_num_seqs or not self._try_start(request, now):
                break
            waiting.popleft()
            self._schedule_prompt(builder, request)

    def _leave(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.finish_reason is not None and sequence.seq_id in self.kv:
                self._drop(sequence)
        if not request.live_sequences:
            self._rows.remove(request)
