"""The baselines over the fake executor: the product's tokens, every slot accounted for, everything given back."""

from __future__ import annotations

import random

import pytest

from quire.errors import ConfigError
from quire.request import FinishReason
from tests.benchmarks.baselines.drive import BASELINES, Driver
from tests.fakes.core import generate_alone, make_config

ORCAS = ["Orca (Max)", "Orca (Pow2)", "Orca (Oracle)"]


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed).randrange(1, 97) for _ in range(length)]


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("system", BASELINES)
def test_tokens_are_the_products(system: str, queue_depth: int) -> None:
    """Greedy, sampled, parallel and beams, more than fit at once, some aborted, one out of time."""
    driver = Driver(system, num_blocks=50, max_num_seqs=8, queue_depth=queue_depth)
    rng = random.Random(5)
    expected: dict[str, list[list[int]]] = {}
    for number in range(24):
        name = f"r{number}"
        length, max_tokens = rng.randrange(1, 24), rng.randrange(1, 20)
        extra: dict[str, object] = {}
        match number % 6:
            case 1:
                extra = {"temperature": 1.0}
            case 2:
                extra = {"temperature": 1.0, "n": 2}
            case 3:
                extra = {"use_beam_search": True, "n": 2}
            case 4:
                extra = {"stop_token_ids": [3, 5, 8, 13, 21, 34, 55, 89]}
        tokens = prompt(number, length)
        driver.add(name, tokens, max_tokens=max_tokens, **extra)
        expected[name] = generate_alone(tokens, max_tokens=max_tokens, **extra)
    late = prompt(99, 4)
    driver.add("late", late, max_tokens=20, timeout_s=0.055)
    for _ in range(3):
        driver.step()
    driver.abort("r7")
    driver.abort("r2", 1)
    driver.abort("r20")
    driver.run()
    assert driver.finished.pop(("late", 0)) is FinishReason.TIMEOUT
    for name, outputs in expected.items():
        for index, output in enumerate(outputs):
            found = driver.tokens.get((name, index), [])
            if name in ("r7", "r20") or (name, index) == ("r2", 1):
                assert found == output[: len(found)]
            else:
                assert found == output, (name, index)
                assert (name, index) in driver.finished


@pytest.mark.parametrize("system", BASELINES)
def test_random_arrivals_and_aborts_leave_nothing_behind(system: str) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        driver = Driver(system, num_blocks=rng.randrange(34, 90), block_size=rng.choice([1, 4, 16]), queue_depth=2)
        for number in range(60):
            n = rng.choice([1, 1, 1, 2, 3])
            beam = n > 1 and rng.random() < 0.5
            params = {"use_beam_search": True} if beam else {"temperature": rng.choice([0.0, 1.0])}
            driver.add(
                f"r{number}", prompt(number, rng.randrange(1, 30)), max_tokens=rng.randrange(1, 34), n=n, **params
            )
            for _ in range(rng.randrange(4)):
                driver.step()
            if rng.random() < 0.2:
                driver.abort(f"r{rng.randrange(number + 1)}", rng.choice([None, 0]))
                driver.system.check()
        driver.run()
        assert driver.system.kv.num_regions == 0
        assert driver.executor.live_seq_ids == [] or not driver.core.has_work


def test_orca_runs_as_many_as_find_a_region() -> None:
    """128 slots: two regions of the maximum (64), or eight that hold 10 to 16 tokens."""
    batches = {}
    for system in ORCAS:
        driver = Driver(system, num_blocks=32, max_num_seqs=16)
        for number in range(8):
            driver.add(f"r{number}", prompt(number, 4), max_tokens=9)
        driver.run()
        batches[system] = max(driver.batch_sizes)
    # 4 + 9 tokens; 4 + 16 of Pow2 take a chunk of 32.
    assert batches == {"Orca (Max)": 2, "Orca (Pow2)": 4, "Orca (Oracle)": 8}


def test_orca_lets_requests_join_and_leave_between_steps() -> None:
    driver = Driver("Orca (Max)", num_blocks=32)
    driver.add("long", prompt(1, 4), max_tokens=8)
    driver.add("short", prompt(2, 6), max_tokens=2)
    driver.add("next", prompt(3, 5), max_tokens=2)
    driver.run()
    # Prompts of 4 and 6; both go on; "short" has ended and the whole prompt of "next" joins the first one's next token.
    assert [sorted(plan.num_tokens) for plan in driver.executor.plans][:4] == [[4, 6], [1, 1], [1, 5], [1, 1]]


def test_the_first_that_does_not_fit_keeps_the_others_waiting() -> None:
    driver = Driver("Orca (Oracle)", num_blocks=16)
    driver.add("half", prompt(1, 20), max_tokens=12)
    driver.add("too large for now", prompt(2, 20), max_tokens=30)
    driver.add("small", prompt(3, 2), max_tokens=2)
    driver.step()
    assert driver.core.stats().num_running == 1
    driver.run()
    assert len(driver.finished) == 3


def test_request_level_batch_runs_until_its_last_request_ends() -> None:
    driver = Driver("FasterTransformer", num_blocks=32, max_num_seqs=8)
    driver.add("long", prompt(1, 4), max_tokens=8)
    driver.add("short", prompt(2, 6), max_tokens=2)
    driver.add("next", prompt(3, 5), max_tokens=2)
    driver.run()
    plans = [sorted(plan.num_tokens) for plan in driver.executor.plans]
    # The prompts, the shorter one with two tokens of padding; then both rows in each of seven steps, though one has
    # ended; only then the third.
    assert plans == [[2, 4, 6]] + [[1, 1]] * 7 + [[5], [1]]
    assert [len(driver.tokens[name, 0]) for name in ("long", "short", "next")] == [8, 2, 2]


def test_no_request_joins_a_batch_that_runs_though_there_is_room() -> None:
    driver = Driver("FasterTransformer", num_blocks=128, max_num_seqs=16)
    driver.add("first", prompt(1, 4), max_tokens=5)
    driver.step()
    driver.add("next", prompt(3, 5), max_tokens=2)
    driver.run()
    plans = [sorted(plan.num_tokens) for plan in driver.executor.plans]
    assert plans == [[4], *[[1]] * 4, [5], [1]]


def test_rows_that_have_ended_stop_at_the_end_of_their_region() -> None:
    driver = Driver("FasterTransformer", num_blocks=32, max_model_len=32, max_num_seqs=8)
    driver.add("late", prompt(1, 30), max_tokens=2)
    driver.add("long", prompt(2, 2), max_tokens=30)
    driver.run()
    assert len(driver.tokens["long", 0]) == 30


def test_what_is_reserved_and_wasted_in_the_middle_of_a_run() -> None:
    """Maximum 64. A request of 4 + 8 tokens has 5 computed after two steps; the other has 4 + 2 and ends then."""
    driver = Driver("Orca (Max)", num_blocks=40)
    driver.add("one", prompt(1, 4), max_tokens=8)
    driver.add("two", prompt(2, 4), max_tokens=3)
    driver.step()
    driver.step()
    accounts = driver.system.accounts()
    assert (accounts.stored, accounts.reserved) == (5 + 5, 7 + 2)
    assert (accounts.internal, accounts.rounding, accounts.free) == (52 + 57, 0, 32)
    stats = driver.core.stats()
    assert (stats.num_used_blocks, stats.num_reserved_slots, stats.num_wasted_slots) == (32, 9, 109)


def test_parallel_samples_copy_the_prompt_and_share_nothing() -> None:
    driver = Driver("Orca (Oracle)", num_blocks=32)
    driver.add("r", prompt(1, 6), max_tokens=4, n=3, temperature=1.0)
    driver.step()
    assert driver.core.stats().num_used_blocks == 3 * 4  # 10 tokens: 3 blocks of 4, a chunk of 4
    driver.run()
    assert [len(plan.block_copies) for plan in driver.executor.plans] == [0, 2 * 2, 0, 0]
    assert driver.executor.plans[0].total_tokens == 6


def test_refusals() -> None:
    driver = Driver("Orca (Max)", num_blocks=32, max_num_batched_tokens=16)
    driver.add("long prompt", prompt(1, 17), max_tokens=2)
    driver.add("too many", prompt(1, 4), n=3, temperature=1.0)
    driver.add("urgent", prompt(1, 4), priority=1)
    driver.register_prefix("pinned", prompt(1, 4))
    driver.add("fits", prompt(1, 4), n=2, temperature=1.0)
    driver.run()
    assert {name: message.split(",")[0] for name, message in driver.refused.items()} == {
        "long prompt": "the prompt has 17 tokens",
        "too many": "the request reserves 3 x 64 contiguous KV slots",
        "urgent": "the baseline serves in order of arrival: it knows no priority",
        "pinned": "the baseline has no prefix cache to pin in",
    }
    assert {name for name, _ in driver.finished} == {"fits"}


def test_a_pool_smaller_than_the_models_context_lowers_it() -> None:
    """20 blocks: the largest chunk has 16 blocks of 4, so no sequence is longer than 64 tokens."""
    driver = Driver("Orca (Pow2)", num_blocks=20, max_model_len=100)
    assert driver.core.ready.max_model_len == 64
    driver.add("r", prompt(1, 4), max_tokens=60)
    driver.run()
    assert len(driver.tokens["r", 0]) == 60


def test_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match="attend to every token"):
        Driver("Orca (Max)", windows=(None, 8))
    assert make_config(windows=(None, 8)).model.sliding_windows == (None, 8)


def test_snapshot_shows_regions() -> None:
    driver = Driver("Orca (Oracle)", num_blocks=8)
    driver.add("r", prompt(1, 5), max_tokens=5)
    driver.add("waits", prompt(1, 20), max_tokens=5)
    driver.step()
    snapshot = driver.system.snapshot()
    assert snapshot.states == bytes([0, 1, 1, 1, 1, 0, 0, 0, 0])
    first, second = snapshot.requests
    assert (first.status, first.sequences[0].tables, first.sequences[0].num_filled_slots) == ("running", [[1, 2, 3]], 1)
    assert (second.status, second.sequences[0].tables) == ("waiting", [[]])
    driver.run()
