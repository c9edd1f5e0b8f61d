"""Random arrivals, aborts, finishes, preemptions, forks and prefix hits: the invariants hold after every step.

Each machine draws an engine (pool size, block size, windows, limits, queue depth), then drives it. The fake executor
verifies every plan; `Scheduler.check` runs after every rule; at the end every block is free and every completion
equals that of a lone run in an engine without a cache.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from quire.config.engine import EngineConfig
from quire.request import FinishReason
from tests.fakes.core import CoreDriver, generate_alone, make_config, pool_alone
from tests.fakes.ledger import numbers
from tests.machines import run_machine

_PREFIXES = [[(11 * family + 3 * i) % 90 + 1 for i in range(40)] for family in range(3)]
_STOP_TOKENS = [5, 17, 40]


ENGINES = {
    "num_blocks": st.integers(6, 60),
    "block_size": st.sampled_from([1, 2, 4, 8]),
    "windows": st.sampled_from([(None,), (None, None), (5, 5), (None, 7), (None, 5, 5), (3, 9)]),
    "max_num_seqs": st.integers(1, 6),
    "max_num_batched_tokens": st.integers(6, 40),
    "max_prefill_chunk": st.sampled_from([None, 1, 5]),
    "queue_depth": st.sampled_from([1, 2, 3, 4]),
    "preemption_mode": st.sampled_from(["recompute", "swap", "swap", "auto"]),
    "num_host_blocks": st.sampled_from([3, 20, 200]),
}
"""Options of the engines that every machine draws; `engine_config` takes them."""


def engine_config(num_host_blocks: int, **options: Any) -> EngineConfig:
    """An engine as a machine has drawn it. Only one that swaps has a host pool, or one with a disk behind it."""
    if options["preemption_mode"] != "recompute" or options.get("offload"):
        options["num_host_blocks"] = num_host_blocks
    return make_config(max_model_len=64, **options)


class EngineMachine(RuleBasedStateMachine):
    totals: ClassVar[Counter[str]] = Counter()
    """Statistics of all machines that were driven to their end."""

    @initialize(
        **ENGINES,
        priority_seconds=st.sampled_from([0.02, 10.0]),
        max_pins=st.sampled_from([0, 1, 2, 3]),
        piece_tokens=st.sampled_from([8, 1000]),
        enable_prefix_caching=st.booleans(),
    )
    def start(self, max_pins: int, piece_tokens: int, **options: Any) -> None:
        self.drive(CoreDriver(engine_config(**options)), max_pins)
        hashing = self.driver.scheduler._admitter._hashing
        hashing.piece_tokens, hashing.short_tokens = piece_tokens, 8

    def drive(self, driver: CoreDriver, max_pins: int) -> None:
        """Drive an engine that has no requests yet. max_pins: prefixes that may be registered at a time."""
        self.driver = driver
        self.max_pins = max_pins
        self.requests: dict[str, dict] = {}
        self.aborted: set[tuple[str, int | None]] = set()
        self.prefixes: list[str] = []

    @rule(
        family=st.integers(0, 2),
        shared=st.integers(0, 30),
        own=st.lists(st.integers(1, 90), min_size=1, max_size=12),
        max_tokens=st.integers(1, 14),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        greedy=st.booleans(),
        seed=st.integers(0, 3),
        salt=st.sampled_from(["", "", "tenant"]),
        stop=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        priority=st.sampled_from([0, 0, 0, 1, -1, 3, -3]),
        timeout_s=st.sampled_from([None, None, None, None, None, 0.05, 0.2]),
        constraint=st.sampled_from(["", "", "5", "70", "70"]),
    )
    def add(self, family, shared, own, salt, n, greedy, stop, priority, **request) -> None:  # type: ignore[no-untyped-def]
        name = f"r{len(self.requests)}"
        request["prompt"] = _PREFIXES[family][:shared] + own
        request["n"] = n
        request["temperature"] = 0.0 if greedy else 1.0
        if stop:
            request["stop_token_ids"] = _STOP_TOKENS
        self.requests[name] = request
        self.driver.add(name, salt=salt, priority=priority, **request)

    @rule(
        family=st.integers(0, 2),
        shared=st.integers(0, 20),
        own=st.lists(st.integers(1, 90), min_size=1, max_size=6),
        max_tokens=st.integers(1, 14),
        n=st.integers(1, 4),
        spare=st.sampled_from([0, 0, 1]),
        num_ends=st.sampled_from([0, 3, 20]),
        length_penalty=st.sampled_from([-1.0, 0.0, 1.0]),
        early_stopping=st.sampled_from([True, False, "never"]),
        constraint=st.sampled_from(["", "", "5", "70"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add_beam_search(self, family, shared, own, n, spare, num_ends, **request) -> None:  # type: ignore[no-untyped-def]
        name = f"r{len(self.requests)}"
        request |= {"prompt": _PREFIXES[family][:shared] + own, "n": n, "best_of": n + spare, "use_beam_search": True}
        request["eos"] = tuple(range(num_ends))
        request["logprobs"] = 1
        self.requests[name] = request
        self.driver.add(name, **request)

    @rule(
        family=st.integers(0, 2),
        shared=st.integers(0, 30),
        own=st.lists(st.integers(1, 90), min_size=1, max_size=12),
        timeout_s=st.sampled_from([None, None, None, 0.05]),
        priority=st.sampled_from([0, 0, 1, -1]),
    )
    def add_pooled(self, family: int, shared: int, own: list[int], timeout_s: float | None, priority: int) -> None:
        name = f"r{len(self.requests)}"
        request = {"prompt": _PREFIXES[family][:shared] + own, "pooling": True, "max_tokens": 1, "n": 1}
        self.requests[name] = {**request, "timeout_s": timeout_s}
        self.driver.add(name, priority=priority, **self.requests[name])

    @rule(
        family=st.integers(0, 2),
        shared=st.lists(st.integers(8, 40), min_size=2, max_size=3),
        own=st.integers(1, 90),
        max_tokens=st.integers(1, 6),
        n=st.sampled_from([1, 1, 1, 2]),
        salt=st.sampled_from(["", "", "", "tenant"]),
        stranger=st.booleans(),
    )
    def add_together(self, family, shared, own, salt, stranger, **request) -> None:  # type: ignore[no-untyped-def]
        """Several with one prefix, of which each takes a part; the last may be a stranger with a prefix of its own."""
        for index, length in enumerate(shared):
            its_family = family + 1 if stranger and index + 1 == len(shared) else family
            name = f"r{len(self.requests)}"
            prompt = [*_PREFIXES[its_family % 3][:length], (own + index) % 90 + 1]
            self.requests[name] = {"prompt": prompt, "temperature": 1.0, **request}
            self.driver.add(name, salt=salt, **self.requests[name])

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            core = self.driver.core
            if core.has_work:
                may_be_empty = bool(core._in_flight) or not self.driver.scheduler.has_requests
                planned = core.stats().steps_total
                self.driver.step()
                self.driver.scheduler.check()
                # The last ones may have run out of time.
                may_be_empty = may_be_empty or not self.driver.scheduler.has_requests
                assert may_be_empty or core.stats().steps_total > planned, "requests wait, and nothing is computed"

    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data, whole: bool) -> None:  # type: ignore[no-untyped-def]
        if not self.requests:
            return
        name = data.draw(st.sampled_from(sorted(self.requests)))
        index = None if whole else data.draw(st.integers(0, self.requests[name]["n"] - 1))
        self.driver.abort(name, index)
        if whole or "use_beam_search" not in self.requests[name]:  # clients cannot name a beam
            self.aborted.add((name, index))

    @rule(family=st.integers(0, 2), length=st.integers(1, 16), salt=st.sampled_from(["", "", "", "tenant"]))
    def register_prefix(self, family: int, length: int, salt: str) -> None:
        """Few at a time: with most of the pool registered nothing else would happen."""
        scheduler = self.driver.scheduler
        live = [name for name in self.prefixes if scheduler.kv.is_registered(name) or name in scheduler._requests]
        if len(live) == self.max_pins:
            return
        name = f"p{len(self.prefixes)}"
        self.prefixes.append(name)
        self.driver.register_prefix(name, _PREFIXES[family][:length], salt)

    @rule(data=st.data(), action=st.sampled_from(["unregister", "abort", None, None, None]))
    def unregister_or_abort_a_prefix(self, data, action: str | None) -> None:  # type: ignore[no-untyped-def]
        registered = [name for name in self.prefixes if self.driver.scheduler.kv.is_registered(name)]
        if registered and action == "unregister":
            self.driver.scheduler.unregister_prefix(data.draw(st.sampled_from(registered)))
            self.totals["unregistered"] += 1
        elif self.prefixes and action == "abort":
            self.driver.abort(self.prefixes[-1])

    @rule()
    def forget_cache(self) -> None:
        self.driver.scheduler.kv.reset_prefix_cache()

    @invariant()
    def check(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            self.take_stock()

    def take_stock(self) -> None:
        """With no request left: nothing is held, and every completion is that of a lone run."""
        for name in self.prefixes:
            is_registered = self.driver.scheduler.kv.is_registered(name)
            assert not is_registered or self.driver.finished[name, 0] is FinishReason.LENGTH
            self.totals["registered"] += is_registered
            self.totals["registrations refused"] += name in self.driver.refused
            if is_registered:
                self.driver.scheduler.unregister_prefix(name)
        self.driver.scheduler.check()
        assert self.driver.core.stats().num_used_blocks == 0
        self.totals.update(numbers(self.driver.core.stats()))
        self.totals["aborts"] += len(self.aborted)
        self.totals["masks"] += self.driver.masks.num_masks
        self.totals["pooled"] += len(self.driver.pooled)
        self.totals["hypotheses"] += len(self.driver.rankings)
        for name, request in self.requests.items():
            if name in self.driver.refused:
                continue
            expected = generate_alone(**{**request, "timeout_s": None})
            if name in self.driver.pooled:
                assert self.driver.pooled[name] == pool_alone(request["prompt"])
            for index in range(request["n"]):
                tokens = self.driver.tokens.get((name, index), [])
                timed_out = self.driver.finished.get((name, index)) is FinishReason.TIMEOUT
                assert not timed_out or request["timeout_s"] is not None
                if timed_out or (name, None) in self.aborted or (name, index) in self.aborted:
                    assert tokens == expected[index][: len(tokens)]
                else:
                    assert tokens == expected[index]
                    assert (name in self.driver.pooled) == ("pooling" in request)
                    assert self.driver.finished[name, index] in (FinishReason.STOP, FinishReason.LENGTH)


def test_random_schedules() -> None:
    """Hundreds of engine steps, each followed by `check` (`make soak` takes as many as it is told)."""
    EngineMachine.totals.clear()
    run_machine(EngineMachine, examples=11, steps=100)
    # Which engines hypothesis draws is chance (it draws constants of whatever modules are imported, too), so only what
    # comes by the hundred is asked for; test_traffic.py draws from seeds of its own, and asks for what is rarer.
    totals = EngineMachine.totals
    assert totals["steps_total"] > 1_000
    common = ("copied_blocks_total", "prefix_cache_hits_total", "evictions_total", "aborts")
    for name in (*common, "hypotheses", "pooled", "masks"):
        assert totals[name] > 0, name
