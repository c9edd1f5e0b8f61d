"""A drafter for tests: some of the tokens that a sequence will get, some wrong ones, by the scheduler or the worker."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from quire.config.engine import EngineConfig
from quire.decoding.drafts import NO_DRAFTS, Drafter, Drafts, note_found_drafts
from quire.decoding.sequence import Sequence
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.preemption import PreemptionCosts
from quire.scheduler.scheduler import Scheduler
from quire.step import StepPlan, StepResult
from tests.fakes.core import CoreDriver


def make_drafting_driver(config: EngineConfig, drafter: Drafter, **options: Any) -> CoreDriver:
    """A driver whose scheduler asks `drafter`."""

    def drafting(config: EngineConfig, layout: KVCacheLayout, costs: PreemptionCosts | None) -> Scheduler:
        kv = KVCacheManager(layout, enable_prefix_caching=config.cache.enable_prefix_caching)
        return Scheduler(config.scheduler, kv, costs, drafter=drafter)

    driver = CoreDriver(config, make_scheduler=drafting, **options)
    if isinstance(drafter, RandomDrafts):
        drafter.executor = driver.executor
        driver.executor.propose_drafts = drafter.propose_by_worker
    return driver


class RandomDrafts:
    """A drafter, and the worker's half of one: how many drafts, whose, and which of them are right is chance."""

    asks_always = True

    def __init__(self, seed: int, max_drafts: int, *, right: float = 0.7, by_worker: float = 0.5) -> None:
        """right: the share of right drafts. by_worker: the share that the worker proposes where both could."""
        self.max_drafts = max_drafts
        self.executor: Any = None
        """The fake executor, which knows the tokens to come."""
        self._random = random.Random(seed)
        self._right = right
        self._by_worker = by_worker

    def propose(self, sequence: Sequence, limit: int, batch_size: int) -> Drafts:
        assert 1 <= limit <= self.max_drafts
        num_tokens = self._random.randint(0, limit)
        if not num_tokens:
            return NO_DRAFTS
        if sequence.num_pending_tokens or self._random.random() < self._by_worker:
            return Drafts(num_tokens)
        right = self.executor.foresee(sequence.seq_id, num_tokens)
        return Drafts(num_tokens, self.propose_by_worker(sequence.seq_id, right, num_tokens))

    def note_step(self, samples: list[Sequence], plan: StepPlan, result: StepResult, seconds: float) -> None:
        note_found_drafts(samples, result)

    def propose_by_worker(self, seq_id: int, right: list[int], num_tokens: int) -> list[int]:
        """`FakeExecutor.propose_drafts`."""
        return [token if self._random.random() < self._right else self._random.randrange(97) for token in right]


class HostileDrafter:
    """A drafter of `method: custom_class` that does what it may not, and now and then what it should: by the number of
    a sequence's tokens nothing, too much, garbage, ends, ids that are no tokens of the model, or what followed its last
    token before."""

    ENDS = tuple(range(0, 97, 6))
    """Stop tokens of the requests of tests/e2e/test_random_schedules.py."""

    def __init__(self, max_drafts: int) -> None:
        self._most = max_drafts

    def propose(self, token_ids: np.ndarray) -> list[int]:
        size = len(token_ids)
        places = np.flatnonzero(token_ids[:-1] == token_ids[-1])
        right = token_ids[places[-1] + 1 :].tolist() if len(places) else []
        match size % 8:
            case 0:
                return []
            case 1:
                return [(7 * size + each) % 97 for each in range(5 * self._most)]
            case 2:
                return [*right[:1], self.ENDS[size % len(self.ENDS)], 0, 6]
            case 3:
                return [*right[:2], 97, 2**31 - 1]
            case 4:
                return [-1, *right]
        return right * (1 + self._most)
