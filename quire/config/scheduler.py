from __future__ import annotations

from dataclasses import dataclass

PRIORITY_SECONDS = 10.0


@dataclass(frozen=True)
class SchedulerConfig:
    """Scheduling settings. Fields with an option's name have its meaning. max_prefill_chunk: None: only the budget
    limits it. whole_prompts: a prompt is computed in one step. num_stages: pipeline stages; with several, plans in
    flight share no sequence except prompts, and each has its part of the running sequences."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_prefill_chunk: int | None
    queue_depth: int
    scheduling_policy: str = "fcfs"
    priority_seconds: float = PRIORITY_SECONDS
    preemption_mode: str = "recompute"
    whole_prompts: bool = False
    num_stages: int = 1
