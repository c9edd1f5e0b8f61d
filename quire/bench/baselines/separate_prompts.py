"""The paper's own way to form a batch, over the product's scheduler and paged KV cache.

In the system of the paper a step computes prompts or next tokens, never both: while a waiting request finds room, the
step consists of new prompts alone, and all running requests wait for it. The product hands out tokens instead, prompts
and next tokens in one step. The difference is one of speed where many short requests arrive; memory is the same.
"""

from __future__ import annotations

from quire.scheduler.plan_builder import PlanBuilder
from quire.scheduler.scheduler import Scheduler
from quire.step import StepPlan


class SeparatePromptsScheduler(Scheduler):
    """Prompts first, in a step of their own; then everybody's next token. What the token budget cuts off a prompt is
    computed with the latter."""

    def schedule(self, now: float) -> StepPlan | None:
        builder = PlanBuilder(next(self._step_ids), self._max_num_batched_tokens)
        self.kv.loader.arrive()
        self._admit_waiting(builder, now)
        if not builder.sequences:
            self._schedule_running(builder, 0)
        return self._finish_plan(builder)
