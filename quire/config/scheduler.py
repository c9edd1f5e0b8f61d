"""The scheduling slice."""

from __future__ import annotations

from dataclasses import dataclass

PRIORITY_SECONDS = 10.0


@dataclass(frozen=True)
class SchedulerConfig:
    """max_num_batched_tokens: token budget of a step. max_num_seqs: most sequences that run at once.
    max_prefill_chunk: most tokens that one sequence computes in one step (None: only the budget limits it).
    queue_depth: plans that may be in flight; 1 is synchronous, 2 plans step N+1 while step N runs.
    scheduling_policy: "fcfs", or "priority": then requests may bring one.
    priority_seconds: seconds of waiting that one level of priority is worth.
    preemption_mode: "recompute", "swap", or "auto", which takes the cheaper one for each victim.
    whole_prompts: each prompt is computed in one step. num_stages: of a pipeline: with more than one, plans in flight
    have no sequence in common but for prompts, and each has its part of the running sequences.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_prefill_chunk: int | None
    queue_depth: int
    scheduling_policy: str = "fcfs"
    priority_seconds: float = PRIORITY_SECONDS
    preemption_mode: str = "recompute"
    whole_prompts: bool = False
    num_stages: int = 1
