"""One workload through an engine core, its accounts of KV memory summed over all steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.paper.workloads import PaperRequest
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest
from quire.errors import QuireError
from quire.kv_cache.stats import EngineStats
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams

TEXT_TOKENS = 512
"""Tokens of one text that the model writes."""


@dataclass(slots=True)
class Usage:
    """Sums over the steps of a run. Quotients are averages over steps in which a step counts by its memory, so they do
    not depend on how many requests ran side by side."""

    num_steps: int = 0
    num_used_blocks: int = 0
    num_logical_blocks: int = 0
    num_used_slots: int = 0
    num_stored_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0

    def add(self, stats: EngineStats) -> None:
        """Take the state after a step. Counters are those of the whole run."""
        self.num_steps += 1
        self.num_used_blocks += stats.num_used_blocks
        self.num_logical_blocks += stats.num_logical_blocks
        self.num_used_slots += stats.num_used_blocks * stats.block_size
        self.num_stored_tokens += stats.num_stored_tokens

    @property
    def saved(self) -> float:
        """Blocks saved by sharing, of the blocks without sharing (Fig. 15)."""
        return 1 - self.num_used_blocks / self.num_logical_blocks

    @property
    def stored(self) -> float:
        """Slots of allocated blocks that hold a token's state (Fig. 2)."""
        return self.num_stored_tokens / self.num_used_slots


def sampling(n: int) -> SamplingParams:
    """Parallel sampling of `n` (basic sampling for 1): only the length ends a sequence."""
    return SamplingParams(n=n, temperature=1.0, ignore_eos=True, detokenize=False)


def beam_search(width: int) -> SamplingParams:
    """Only the length ends a beam."""
    return SamplingParams(n=width, use_beam_search=True, temperature=0.0, ignore_eos=True, detokenize=False)


def write_text(core: EngineCore, num_tokens: int, seed: int) -> list[int]:
    """At least `num_tokens` tokens of text that the model writes, sampled: what prompts are cut from."""
    texts = -(-num_tokens // TEXT_TOKENS)
    for number in range(texts):
        core.handle(
            AddRequest(
                EngineRequest(
                    request_id=f"text-{number}",
                    prompt_token_ids=[number],
                    params=sampling(1),
                    max_tokens=TEXT_TOKENS,
                    seed=seed + number,
                )
            )
        )
    tokens: dict[str, list[int]] = {f"text-{number}": [] for number in range(texts)}
    while core.has_work:
        for update in core.step().updates:
            tokens[update.request_id] += update.new_token_ids
    return [token for text in tokens.values() for token in text]


def run(
    core: EngineCore,
    name: str,
    requests: Sequence[PaperRequest],
    params: SamplingParams,
    *,
    on_done: Callable[[int], None] = lambda count: None,
) -> Usage:
    """Submit everything at once, step until all is done. on_done: told how many requests each step finished.

    Raises QuireError when the engine refuses a request.
    """
    before = core.stats()
    for number, request in enumerate(requests):
        core.handle(
            AddRequest(
                EngineRequest(
                    request_id=f"{name}-{number}",
                    prompt_token_ids=request.token_ids,
                    params=params,
                    max_tokens=request.output_len,
                    seed=number,
                )
            )
        )
    usage, stats = Usage(), before
    while core.has_work:
        outputs = core.step()
        for rejected in outputs.rejections:
            raise QuireError(f"the engine refused {rejected.request_id}: {rejected.message}")
        num_finished, stats = stats.finished_requests_total, core.stats()
        on_done(stats.finished_requests_total - num_finished)
        if stats.num_used_blocks:
            usage.add(stats)
    usage.num_generated_tokens = stats.generation_tokens_total - before.generation_tokens_total
    usage.num_preemptions = stats.preemptions_total - before.preemptions_total
    return usage
