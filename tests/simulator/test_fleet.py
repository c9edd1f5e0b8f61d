"""Many replicas: the same result in any number of processes, routers that do what they say."""

from __future__ import annotations

import collections
import os
import signal
from collections.abc import Iterator

import pytest

from quire.errors import InsufficientMemoryError, QuireError, UserError
from quire.simulator.fleet import ReplicaProcesses, ReplicaSpec, _windows, merged, simulate_fleet
from quire.simulator.replica import EngineSettings
from quire.simulator.trace import TraceRequest
from quire.simulator.workloads import Arrivals, stream
from tests.simulator.making import make_cost, settings


def spec() -> ReplicaSpec:
    return ReplicaSpec(make_cost(), settings(), objectives={"ttft": 0.01})


def requests() -> Iterator[TraceRequest]:
    for number, request in enumerate(stream("alpaca", Arrivals(300.0, num_requests=90))):
        group = f"group {number % 7}" if number % 3 else None
        yield TraceRequest(request.arrival, request.input_tokens + 64, request.output_tokens, group, 64 if group else 0)


@pytest.mark.parametrize("router", ["round-robin", "prefix-aware"])
def test_the_number_of_processes_changes_nothing(router: str) -> None:
    alone, together = (
        simulate_fleet(requests(), spec(), 3, router=router, num_processes=count, report_seconds=0.05)
        for count in (1, 2)
    )
    assert [each.as_json() for each in alone] == [each.as_json() for each in together]
    assert merged(alone).as_json() == merged(together).as_json()
    assert merged(alone).num_finished == 90
    assert merged(alone).num_blocks == 3 * 200


def test_one_replica_is_a_plain_run() -> None:
    from quire.simulator.replica import simulate

    (fleet,) = simulate_fleet(requests(), spec(), 1)
    assert fleet.as_json() == simulate(requests(), make_cost(), settings(), objectives={"ttft": 0.01}).as_json()


@pytest.mark.parametrize("count", [1, 2])
def test_what_fails_in_a_replica_is_raised(count: int) -> None:
    impossible = ReplicaSpec(make_cost("h100"), EngineSettings(kv_cache_memory=10))
    with pytest.raises(InsufficientMemoryError):
        simulate_fleet(requests(), impossible, 2, num_processes=count)


def test_a_bad_trace_ends_the_processes() -> None:
    def broken() -> Iterator[TraceRequest]:
        yield TraceRequest(0.0, 10, 5)
        raise UserError("line 2 is wrong")

    with pytest.raises(UserError, match="line 2 is wrong"):
        simulate_fleet(broken(), spec(), 2, num_processes=2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_dies_is_told(number: signal.Signals) -> None:
    """An interrupt from the keyboard reaches every process: it ends them without a word, the first one speaks."""
    group = ReplicaProcesses(spec(), [0])
    try:
        group.begin_window([[TraceRequest(0.0, 10, 5)]], 1.0)
        assert group.end_window() == [0]
        process = group._process
        os.kill(process.pid or 0, number)
        process.join(60)
        assert process.exitcode == -number
        with pytest.raises(QuireError, match="ended before its time"):
            group.finish_replicas()
    finally:
        group.close()


def test_time_goes_in_windows() -> None:
    """A request at the end of a window belongs to the next one; the empty ones between two requests are one."""
    arrivals = [TraceRequest(arrival, 1, 1) for arrival in (0.1, 0.2, 0.25, 1.1, 1.2)]
    found = [(until, [each.arrival for each in arrived]) for until, arrived in _windows(arrivals, 0.25)]
    assert found == [(0.25, [0.1, 0.2]), (0.5, [0.25]), (1.0, []), (1.25, [1.1, 1.2])]
    assert list(_windows([], 0.25)) == [(0.25, [])]


def test_reports_tell_the_router_who_is_done() -> None:
    """One replica has a long request and one a short one; a third comes when only the short one has ended."""
    requests = [TraceRequest(0.0, 10, 3000), TraceRequest(0.0, 10, 5), TraceRequest(0.8, 10, 5)]
    results = simulate_fleet(requests, spec(), 2, router="least-loaded")
    assert results[0].end > 0.8
    assert [result.num_requests for result in results] == [1, 2]


def test_prefix_aware_routing_finds_more_prefixes_than_round_robin() -> None:
    hits = {
        router: merged(simulate_fleet(requests(), spec(), 4, router=router, report_seconds=0.02))
        for router in ("round-robin", "prefix-aware")
    }
    found = {router: metrics.stats.prefix_cache_hits_total for router, metrics in hits.items()}
    assert found["prefix-aware"] > found["round-robin"]


def test_every_replica_gets_its_share() -> None:
    results = simulate_fleet(requests(), spec(), 3, router="least-loaded", report_seconds=0.02)
    shares = collections.Counter({number: result.num_requests for number, result in enumerate(results)})
    assert sum(shares.values()) == 90
    assert min(shares.values()) > 20
