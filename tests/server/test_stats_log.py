"""The lines of a server under load."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from quire.clock import VirtualClock
from quire.kv_cache.stats import EngineStats
from quire.logging import JsonFormatter
from quire.server import stats_log
from quire.server.settings import ServerSettings
from quire.server.stats_log import StatsLog, log_stats


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What the server's logger gets, from now on."""
    found: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    handler = Keep()
    stats_logger().addHandler(handler)
    yield found
    stats_logger().removeHandler(handler)


def stats_logger() -> logging.Logger:
    return logging.getLogger(stats_log.__name__)


def test_a_line_has_the_values_of_the_metrics_and_rates_between_two_lines(records: list[logging.LogRecord]) -> None:
    clock, stats = VirtualClock(), [EngineStats(num_blocks=200, steps_total=5, prompt_tokens_total=1000)]
    log = StatsLog(lambda: stats[0], clock)
    clock.advance(10)
    log.log()
    assert not records  # the steps before the first line are none of its
    stats[0] = EngineStats(
        num_blocks=200,
        num_used_blocks=50,
        num_running=3,
        num_waiting=2,
        steps_total=9,
        prompt_tokens_total=3000,
        generation_tokens_total=120,
        prefix_cache_queries_total=2000,
        prefix_cache_hits_total=500,
    )
    clock.advance(10)
    log.log()
    [record] = records
    assert record.getMessage() == (
        "3 running, 2 waiting; 200.0 prompt tokens/s, 12.0 generated tokens/s; KV cache 25.0 % used; prefix hits 25.0 %"
    )
    line = json.loads(JsonFormatter().format(record))
    assert line["level"] == "INFO"
    assert line["logger"] == "quire.server.stats_log"
    expected = {"running": 3, "waiting": 2, "prompt_tokens_per_second": 200.0, "generation_tokens_per_second": 12.0}
    expected |= {"kv_cache_usage": 0.25, "prefix_cache_hit_rate": 0.25}
    assert {name: line[name] for name in expected} == expected


def test_an_idle_server_logs_nothing_and_a_waiting_one_does(records: list[logging.LogRecord]) -> None:
    clock, stats = VirtualClock(), [EngineStats(steps_total=5)]
    log = StatsLog(lambda: stats[0], clock)
    # Requests that began and ended between two lines; then none; then one that no step computes.
    for now, count in (
        (EngineStats(steps_total=6), 1),
        (EngineStats(steps_total=6), 1),
        (EngineStats(num_waiting=1), 2),
    ):
        stats[0] = now
        clock.advance(10)
        log.log()
        assert len(records) == count


def test_a_log_of_errors_alone_has_no_such_line(
    records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_logger(), "isEnabledFor", lambda level: level >= logging.ERROR)
    clock, stats = VirtualClock(), [EngineStats()]
    log = StatsLog(lambda: stats[0], clock)
    stats[0] = EngineStats(num_running=1)
    clock.advance(10)
    log.log()
    assert not records


@pytest.mark.parametrize("disabled", [False, True])
async def test_lines_come_while_a_server_serves_unless_its_option_says_otherwise(
    disabled: bool, records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_log, "INTERVAL_SECONDS", 0.0)
    with log_stats(ServerSettings(disable_log_stats=disabled), lambda: EngineStats(num_running=1)):
        for _ in range(5):
            await asyncio.sleep(0)
    num_logged = len(records)
    assert bool(num_logged) is not disabled
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(records) == num_logged
