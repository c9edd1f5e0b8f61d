"""The snapshot tells the truth: it is compared with the manager's own books while random schedules run."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from quire.engine.messages import Call, CallResult
from quire.kv_cache.block_pool import CACHED_STATE, FREE_STATE, MOST_OWNERS
from quire.kv_cache.layout import NULL_BLOCK
from quire.scheduler.snapshot import KVSnapshot, RequestView
from tests.fakes.core import CoreDriver, make_config
from tests.kv_cache.test_manager import FULL, make_manager, start


def snapshot(driver: CoreDriver) -> KVSnapshot:
    """As a front end gets it: asked of the core, and through msgpack."""
    answer = driver.core.handle(Call(1, "kv_snapshot"))
    assert answer is not None
    kv = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=CallResult).kv
    assert kv is not None
    return kv


def check_against_the_books(driver: CoreDriver) -> KVSnapshot:
    kv, manager = snapshot(driver), driver.scheduler.kv
    pool = manager.pool
    free, cached = set(pool._free), set(pool._evictable)
    assert len(kv.states) == len(pool.ref_counts)
    for block, state in enumerate(kv.states):
        if block == NULL_BLOCK or block in free:
            assert state == FREE_STATE
        elif block in cached:
            assert state == CACHED_STATE
        else:
            assert state == pool.ref_counts[block]
    owners, host_owners = [0] * len(kv.states), [0] * len(kv.host_states)
    for request in kv.requests:
        check_request(request, kv)
        for sequence in request.sequences:
            for table in sequence.tables:
                for block in table:
                    owners[block] += block != NULL_BLOCK
            for table in sequence.host_tables:
                for block in table:
                    host_owners[block] += block != NULL_BLOCK
    assert owners == pool.ref_counts, "every reference is a table entry of a request or prefix in the snapshot"
    assert host_owners == manager.host.blocks.ref_counts == list(kv.host_states)
    live = driver.scheduler._requests
    shown = [request for request in kv.requests if request.status != "pinned"]
    assert {request.request_id for request in shown} == set(live), "each live request once"
    assert len(shown) == len(live)
    statuses = [request.status for request in shown]
    stats = driver.core.stats()
    assert statuses.count("running") == stats.num_running
    assert len(statuses) - statuses.count("running") == stats.num_waiting
    assert statuses == sorted(statuses, key=lambda status: status != "running")
    return kv


def check_request(view: RequestView, kv: KVSnapshot) -> None:
    for sequence in view.sequences:
        assert len(sequence.tables) == len(kv.windows)
        lengths = {len(table) for table in sequence.tables}
        assert len(lengths) == 1, "the groups' tables are equally long"
        (num_blocks,) = lengths
        if view.status == "swapped":
            assert num_blocks == 0
            assert sequence.host_tables
            num_blocks = len(sequence.host_tables[0])
            assert 0 < sequence.num_stored_tokens <= num_blocks * kv.block_size
            continue
        assert sequence.host_tables == []
        if view.status not in ("running", "pinned") or num_blocks == 0:
            assert sequence.num_stored_tokens == sequence.num_filled_slots == num_blocks == 0
            continue
        assert sequence.num_stored_tokens == (num_blocks - 1) * kv.block_size + sequence.num_filled_slots
        assert 0 < sequence.num_filled_slots <= kv.block_size
        if sequence.tables and None in kv.windows:
            full = sequence.tables[kv.windows.index(None)]
            assert NULL_BLOCK not in full


REQUEST = st.fixed_dictionaries(
    {
        "shared": st.integers(0, 20),
        "own": st.integers(1, 12),
        "n": st.sampled_from([1, 1, 2, 4]),
        "max_tokens": st.integers(1, 12),
        "steps": st.integers(0, 4),
        "abort": st.sampled_from([None, None, None, "whole", 0, 1]),
    }
)


@given(
    requests=st.lists(REQUEST, min_size=1, max_size=8),
    num_blocks=st.integers(8, 50),
    windows=st.sampled_from([(None,), (5, 5), (None, 7)]),
    queue_depth=st.sampled_from([1, 2]),
    enable_prefix_caching=st.booleans(),
    num_host_blocks=st.sampled_from([0, 6, 100]),
)
def test_every_look_agrees_with_the_books(requests: list[dict], **options) -> None:  # type: ignore[no-untyped-def, type-arg]
    mode = "swap" if options["num_host_blocks"] else "recompute"
    driver = CoreDriver(make_config(max_model_len=64, preemption_mode=mode, **options))
    for number, request in enumerate(requests):
        prompt = [*range(1, request["shared"] + 1), *([50 + number] * request["own"])]
        driver.add(f"r{number}", prompt, n=request["n"], max_tokens=request["max_tokens"], temperature=1.0)
        check_against_the_books(driver)
        for _ in range(request["steps"]):
            if driver.core.has_work:
                driver.step()
                check_against_the_books(driver)
        if request["abort"] is not None:
            driver.abort(f"r{number}", None if request["abort"] == "whole" else request["abort"])
            check_against_the_books(driver)
    while driver.core.has_work:
        driver.step()
        check_against_the_books(driver)
    kv = snapshot(driver)
    assert kv.requests == []
    assert set(kv.states) <= {FREE_STATE, CACHED_STATE}


def test_sharing_and_the_last_block_of_four_samples() -> None:
    driver = CoreDriver(make_config(block_size=4))
    driver.add("a", list(range(1, 11)), n=4, max_tokens=4, temperature=1.0)
    driver.step()
    [request] = snapshot(driver).requests
    kv = snapshot(driver)
    assert [kv.states[block] for block in request.sequences[0].tables[0]] == [4, 4, 4]
    assert [sequence.num_filled_slots for sequence in request.sequences] == [2, 2, 2, 2]
    assert [sequence.num_output_tokens for sequence in request.sequences] == [1, 1, 1, 1]
    driver.step()
    kv = snapshot(driver)
    tails = [sequence.tables[0][2] for sequence in kv.requests[0].sequences]
    assert len(set(tails)) == 4, "copied on write"
    assert [kv.states[block] for block in tails] == [1, 1, 1, 1]


def test_what_waits_and_what_was_preempted() -> None:
    driver = CoreDriver(make_config(num_blocks=8, block_size=4, max_model_len=32))
    for name in ("first", "second", "third"):
        driver.add(name, [ord(name[0])] * 14, max_tokens=10)
    seen = set()
    while driver.core.has_work:
        driver.step()
        kv = snapshot(driver)
        seen |= {(request.request_id, request.status) for request in kv.requests}
        assert all(request.num_preemptions > 0 for request in kv.requests if request.status == "preempted")
    assert {("first", "running"), ("third", "waiting"), ("second", "preempted")} <= seen


def test_what_is_swapped_out() -> None:
    driver = CoreDriver(
        make_config(num_blocks=8, num_host_blocks=20, block_size=4, max_model_len=32, preemption_mode="swap")
    )
    for name in ("first", "second"):
        driver.add(name, [ord(name[0])] * 14, max_tokens=10)
    while driver.core.stats().num_swapped == 0:
        driver.step()
    kv = check_against_the_books(driver)
    [request] = [request for request in kv.requests if request.status == "swapped"]
    assert request.request_id == "second"
    assert request.sequences[0].tables == [[]]
    assert sum(state > 0 for state in kv.host_states) == len(request.sequences[0].host_tables[0]) > 0
    driver.run()


def test_requests_deferred_for_a_pending_prefix_are_marked() -> None:
    driver = CoreDriver(make_config(block_size=4, max_prefill_chunk=8))
    for number in range(2):
        driver.add(f"r{number}", [*range(1, 31), 60 + number])
    driver.step()
    assert [request.waits_for_prefix for request in snapshot(driver).requests] == [False, True]


def test_windows_are_named_by_group_and_passed_blocks_are_zero() -> None:
    driver = CoreDriver(make_config(block_size=4, windows=(None, 5)))
    driver.add("a", list(range(1, 31)), max_tokens=8)
    for _ in range(5):  # blocks are given back when the next one is needed
        driver.step()
    kv = snapshot(driver)
    assert sorted(kv.windows, key=str) == [5, None]
    [sequence] = kv.requests[0].sequences
    assert sequence.tables[kv.windows.index(5)][0] == NULL_BLOCK
    assert sequence.tables[kv.windows.index(None)][0] != NULL_BLOCK


@pytest.mark.parametrize(("num_owners", "state"), [(253, 253), (254, 254), (255, 254), (256, 254), (300, 254)])
def test_a_count_that_no_byte_holds(num_owners: int, state: int) -> None:
    kv = make_manager()
    owners = [start(kv, list(range(8)))]
    owners += [kv.fork(owners[0], 8) for _ in range(num_owners - 1)]
    kv.free(start(kv, list(range(20, 29))))
    states = kv.pool.states()
    assert MOST_OWNERS == 254
    assert {states[block] for block in owners[0].tables[0]} == {state}
    assert states.count(CACHED_STATE) == 2, "no number of owners reads as a cached block"


def test_a_large_pool() -> None:
    kv = make_manager((FULL,), num_blocks=100_000, block_size=16)
    blocks = start(kv, [1] * 1_000_000)
    states = kv.pool.states()
    assert len(states) == 100_001
    assert states.count(1) == 62_500
    kv.free(blocks)
    assert kv.pool.states().count(1) == 0


def test_registered_prefixes_show_their_blocks() -> None:
    driver = CoreDriver(make_config(num_blocks=40, block_size=4))
    driver.register_prefix("p", list(range(1, 11)))
    driver.run()
    kv = check_against_the_books(driver)
    (prefix,) = kv.requests
    assert (prefix.request_id, prefix.status, prefix.num_prompt_tokens) == ("p", "pinned", 10)
    (sequence,) = prefix.sequences
    assert (sequence.num_stored_tokens, sequence.num_filled_slots, len(sequence.tables[0])) == (10, 2, 3)
    driver.add("r", list(range(1, 15)), max_tokens=3)
    driver.step()
    kv = check_against_the_books(driver)
    assert [request.status for request in kv.requests] == ["running", "pinned"]
    assert kv.requests[0].sequences[0].tables[0][:2] == sequence.tables[0][:2], "the full blocks are shared"
