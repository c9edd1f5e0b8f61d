"""Reports of sequences with NaN or infinite logits; the scheduler ends only their requests."""

from __future__ import annotations

from collections.abc import Sequence

from quire.logging import get_logger
from quire.step import StepPlan, StepResult

logger = get_logger(__name__)


def report_nonfinite(result: StepResult, plan: StepPlan, sampled: Sequence[int], prompts: Sequence[int]) -> None:
    """Record the sequences in a step's result, each once, and in the log. sampled: indices into the plan's samples;
    prompts: into its batch."""
    names = [plan.sample_seq_ids[index] for index in sampled] + [plan.seq_ids[index] for index in prompts]
    result.nonfinite = list(dict.fromkeys(names))
    logger.error(
        "the model computed NaN or infinite logits for sequence %s; its weights are damaged or the dtype's range is "
        "too small for it (try dtype='float32')",
        ", ".join(map(str, result.nonfinite)),
    )
