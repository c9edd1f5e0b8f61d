"""Random traffic for a random engine over the fake executor: everything that can cross, crossed, from one seed.

An episode draws an engine (pool as small as one request, block size, windows, limits, queue depth), feeds it requests
of every kind, aborts some, and steps. After each step the scheduler's and the KV cache's invariants are checked, and
the accounts slot by slot; the executor verifies every read and write of KV memory. At the end of an episode every block
is free, and every completion is that of a lone run in an engine without cache, chunks or neighbours.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from quire.config.engine import EngineConfig
from quire.request import FinishReason
from quire.step import StepPlan
from tests.fakes.core import CoreDriver, generate_alone, make_config, pool_alone
from tests.fakes.drafts import RandomDrafts, make_drafting_driver
from tests.fakes.ledger import numbers

STEPS_PER_EPISODE = 150
MAX_MODEL_LEN = 64
PREFIXES = [[(11 * family + 3 * i) % 90 + 1 for i in range(40)] for family in range(3)]
STOP_TOKENS = [5, 17, 40]
DAMAGING = 95
"""Generated now and then. What comes behind it has non-finite logits, in some engines."""
WINDOWS: list[tuple[int | None, ...]] = [(None,), (None, None), (5, 5), (None, 7), (None, 5, 5), (3, 9)]

KINDS: list[dict[str, Any]] = [
    {},
    {},
    {"n": 2},
    {"n": 3},
    {"pooling": True, "max_tokens": 1},
    {"n": 1, "best_of": 3},
    {"n": 2, "use_beam_search": True, "early_stopping": True},
    {"n": 1, "best_of": 4, "use_beam_search": True},
    {"n": 4, "use_beam_search": True, "early_stopping": "never", "length_penalty": 0.5},
]
EXERCISED = {
    "preemptions_total": 0.01,
    "recomputed_tokens_total": 0.05,
    "prefix_cache_hits_total": 0.05,
    "evictions_total": 0.1,
    "copied_blocks_total": 0.02,
    "aborts": 0.01,
    "beam_searches": 0.02,
    "pooled": 0.01,
    "pinned_to_the_end": 0.0005,
    "timed_out_requests_total": 0.005,
    "nonfinite": 0.002,
    "swap_preemptions_total": 0.005,
    "prefix_cache_waits_total": 0.0001,
}
"""What a long run must have seen, at least so often for each step."""


class Episode:
    """One engine and its traffic."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.options = self._draw_engine()
        self._nonfinite_token = rng.choice([None, None, DAMAGING])
        self.driver = self._make_driver(make_config(max_model_len=MAX_MODEL_LEN, **self.options))
        self.requests: dict[str, dict[str, Any]] = {}
        self.aborted: set[tuple[str, int | None]] = set()
        self.prefixes: list[str] = []
        """Names of prefixes that were asked to be registered."""
        self._max_prefixes = rng.choice([0, 1, 2])
        self.num_steps = 0
        self.num_pinned_to_the_end = 0
        self._load = rng.choice([0.1, 0.4, 1.0])
        """Requests that arrive in a step, on average."""
        self._share_of_lines = rng.choice([0.0, 0.0, 0.5])
        """Requests in the background."""

    def _make_driver(self, config: EngineConfig) -> CoreDriver:
        return CoreDriver(config, nonfinite_token=self._nonfinite_token)

    def run(self, num_steps: int = STEPS_PER_EPISODE) -> Counter[str]:
        """Traffic for `num_steps` steps, then on to the end. Returns what happened."""
        for _ in range(num_steps):
            self._events()
            if self.driver.core.has_work:
                self._step()
        while self.driver.core.has_work:
            self._step()
        self._unpin_all()
        self.driver.assert_all_free()
        self._compare_with_lone_runs()
        totals = numbers(self.driver.core.stats())
        totals.update(
            pooled=len(self.driver.pooled),
            beam_searches=sum("use_beam_search" in request for request in self.requests.values()),
            engine_steps=self.num_steps,
            pinned_to_the_end=self.num_pinned_to_the_end,
            requests=len(self.requests),
            refused=len(self.driver.refused),
            aborts=len(self.aborted),
            nonfinite=sum(reason is FinishReason.ERROR for reason in self.driver.finished.values()),
        )
        return totals

    def _draw_engine(self) -> dict[str, Any]:
        rng = self._rng
        return {
            "num_blocks": rng.choice([rng.randint(6, 12), rng.randint(8, 30), rng.randint(20, 80)]),
            "block_size": rng.choice([1, 2, 4, 8]),
            "windows": rng.choice(WINDOWS),
            "max_num_seqs": rng.randint(1, 8),
            "max_num_batched_tokens": rng.randint(8, 40),
            "max_prefill_chunk": rng.choice([None, 1, 5]),
            "queue_depth": rng.choice([1, 2]),
            "enable_prefix_caching": rng.random() < 0.7,
            "preemption_mode": rng.choice(["recompute", "swap", "swap", "auto"]),
            "num_host_blocks": rng.choice([4, 12, 80]),
        }

    def _events(self) -> None:
        rng = self._rng
        while rng.random() < self._load / (1 + self._load) and self._num_open < 2 * self.options["max_num_seqs"] + 4:
            self._add()
        if rng.random() < 0.03:
            shared, count = rng.randint(8, 40), rng.randint(2, 4)
            family = rng.randrange(3)
            for _ in range(count):
                self._add(family=family, shared=shared)
        if self.requests and rng.random() < 0.05:
            # Mostly one of the latest: the others are over.
            name = rng.choice(list(self.requests)[-8:])
            index = rng.choice([None, rng.randrange(self.requests[name].get("n", 1))])
            self.driver.abort(name, index)
            self.driver.scheduler.check()
            self.aborted.add((name, index))
        if rng.random() < 0.01:
            self.driver.scheduler.kv.reset_prefix_cache()
        self._register_or_unregister()

    def _register_or_unregister(self) -> None:
        """Few at a time: with most of the pool registered nothing else would happen."""
        rng, scheduler = self._rng, self.driver.scheduler
        live = [name for name in self.prefixes if scheduler.kv.is_registered(name) or name in scheduler._requests]
        if len(live) < self._max_prefixes and rng.random() < 0.1:
            name = f"p{len(self.prefixes)}"
            self.prefixes.append(name)
            self.driver.register_prefix(
                name, rng.choice(PREFIXES)[: rng.randint(1, 16)], rng.choice(["", "", "tenant"])
            )
        elif live and rng.random() < 0.03:
            name = rng.choice(live)
            if scheduler.kv.is_registered(name):
                scheduler.unregister_prefix(name)
            else:
                self.driver.abort(name)
            self.driver.ledger.check(scheduler)

    def _unpin_all(self) -> None:
        for name in self.prefixes:
            if self.driver.scheduler.kv.is_registered(name):
                self.driver.scheduler.unregister_prefix(name)
                self.num_pinned_to_the_end += 1
        assert self.driver.core.stats().num_registered_blocks == 0

    @property
    def _num_open(self) -> int:
        stats = self.driver.core.stats()
        return stats.num_running + stats.num_waiting

    def _add(self, *, family: int | None = None, shared: int | None = None) -> None:
        rng = self._rng
        family = rng.randrange(3) if family is None else family
        shared = rng.choice([0, rng.randint(0, 30)]) if shared is None else shared
        own = [rng.randint(1, 90) for _ in range(rng.randint(1, 12))]
        prompt = PREFIXES[family][:shared] + own
        max_tokens = rng.randint(1, 14)
        kind = rng.choice([kind for kind in KINDS if _width(kind) <= self.options["max_num_seqs"]])
        if rng.random() < 0.9:
            # The smallest pools take short requests only; let few be refused.
            while len(prompt) + max_tokens > 2 and not self._fits(len(prompt), max_tokens, _width(kind)):
                prompt, max_tokens = prompt[-max(1, len(prompt) - 2) :], max(1, max_tokens - 1)
        request: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "seed": rng.randrange(4),
            "temperature": rng.choice([0.0, 1.0]),
            "prompt_logprobs": rng.choice([None, None, None, 0]),
            **kind,
        }
        if rng.random() < 0.3:
            request["stop_token_ids"] = STOP_TOKENS
            request["min_tokens"] = min(3, request["max_tokens"])
        name = f"r{len(self.requests)}"
        self.requests[name] = request
        self.driver.add(
            name,
            salt=rng.choice(["", "", "", "tenant"]),
            priority=rng.choice([0, 0, 0, -1, 1, 2]),
            timeout_s=rng.choice([None, None, None, None, rng.uniform(0.01, 0.6)]),
            is_background=rng.random() < self._share_of_lines,
            **request,
        )

    def _fits(self, prompt_len: int, max_tokens: int, width: int) -> bool:
        """Whether a request fits the pool with a little to spare, by rule of thumb."""
        size, stats = self.options["block_size"], self.driver.core.stats()
        per_group = prompt_len // size + width * (-(-max_tokens // size) + 1)
        num_groups = self.driver.scheduler.kv.num_groups
        return num_groups * per_group <= stats.num_blocks - stats.num_registered_blocks

    def _step(self) -> None:
        core, scheduler = self.driver.core, self.driver.scheduler
        may_be_empty = bool(core._in_flight) or not scheduler.has_requests
        planned = core.stats().steps_total
        self.driver.step()
        self.num_steps += 1
        scheduler.check()
        # Unless the last one's time was over.
        may_be_empty |= not scheduler.has_requests
        assert may_be_empty or core.stats().steps_total > planned, "requests wait, and nothing is computed"
        assert self.num_steps < 100 * STEPS_PER_EPISODE, "no end in sight"

    def _compare_with_lone_runs(self) -> None:
        for name, request in self.requests.items():
            if name in self.driver.refused:
                continue
            reasons = [self.driver.finished.get((name, index)) for index in range(request.get("n", 1))]
            if "use_beam_search" in request and not {FinishReason.TIMEOUT, FinishReason.ERROR}.isdisjoint(reasons):
                continue  # the best that it had by then, of which some had ended; or nothing
            if name in self.driver.pooled:
                assert self.driver.pooled[name] == pool_alone(request["prompt"])
                assert self.driver.finished[name, 0] is FinishReason.STOP
            alone = generate_alone(**request)
            if FinishReason.ERROR in reasons:
                assert any(self._nonfinite_token in tokens for tokens in alone), "non-finite without a cause"
            for index, expected in enumerate(alone):
                tokens = self.driver.tokens.get((name, index), [])
                assert self._nonfinite_token not in tokens[:-1], "it went on behind the non-finite logits"
                ended_early = self.driver.finished.get((name, index)) in (FinishReason.TIMEOUT, FinishReason.ERROR)
                if ended_early or {(name, None), (name, index)} & self.aborted:
                    assert tokens == expected[: len(tokens)]
                else:
                    assert tokens == expected
                    assert self.driver.finished[name, index] in (FinishReason.STOP, FinishReason.LENGTH)


class DraftingEpisode(Episode):
    """An episode with drafts, some of which are accepted, and one to four plans in flight."""

    def _draw_engine(self) -> dict[str, Any]:
        return {**super()._draw_engine(), "queue_depth": self._rng.randint(1, 4)}

    def _make_driver(self, config: EngineConfig) -> CoreDriver:
        drafter = RandomDrafts(
            self._rng.randrange(1000), self._rng.randint(1, 6), right=self._rng.choice([0.3, 0.7, 1.0])
        )
        driver = make_drafting_driver(config, drafter, nonfinite_token=self._nonfinite_token)
        self._num_trimmed = 0
        follow = driver.ledger.follow

        def observe(plan: StepPlan) -> None:
            self._num_trimmed += len(plan.trimmed_tables)
            follow(plan)

        driver.executor.observe = observe
        return driver

    def run(self, num_steps: int = STEPS_PER_EPISODE) -> Counter[str]:
        totals = super().run(num_steps)
        executor = self.driver.executor
        totals[f"queue_depth_{self.options['queue_depth']}"] += 1
        totals.update(
            drafts=executor.num_drafts, accepted_drafts=executor.num_accepted_drafts, trimmed_tables=self._num_trimmed
        )
        return totals


def _width(kind: dict[str, Any]) -> int:
    return int(kind.get("best_of") or kind.get("n", 1))


def run_traffic(seed: int, num_steps: int, make_episode: Callable[[random.Random], Episode] = Episode) -> Counter[str]:
    """Episodes, one after the other, until `num_steps` steps are done. A failure names the episode to replay."""
    totals: Counter[str] = Counter()
    while totals["engine_steps"] < num_steps:
        name = f"{seed}.{totals['episodes']}"
        episode = make_episode(random.Random(name))
        try:
            totals += episode.run()
        except BaseException as error:
            error.add_note(f"in episode {name} after {episode.num_steps} steps: {episode.options}")
            raise
        totals["episodes"] += 1
    return totals
