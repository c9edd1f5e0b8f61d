"""The scheduling slice."""

from __future__ import annotations

from dataclasses import dataclass

PRIORITY_SECONDS = 10.0


@dataclass(frozen=True)
class SchedulerConfig:
    """max_num_batched_tokens: token budget of a step. max_num_seqs: most running sequences. max_prefill_chunk: most
    tokens of one sequence in a step (None: only the budget limits it). queue_depth: plans in flight; 1 is synchronous,
    2 plans step N+1 while step N runs. scheduling_policy: "fcfs" or "priority". priority_seconds: seconds of waiting
    that one level of priority is worth. preemption_mode: "recompute", "swap", or "auto" (the cheaper one for each
    victim). whole_prompts: each prompt is computed in one step. num_stages: pipeline stages; with more than one, plans
    in flight share no sequence except prompts, and each has its part of the running sequences."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_prefill_chunk: int | None
    queue_depth: int
    scheduling_policy: str = "fcfs"
    priority_seconds: float = PRIORITY_SECONDS
    preemption_mode: str = "recompute"
    whole_prompts: bool = False
    num_stages: int = 1
