"""EngineMetrics: snapshots and deltas in, Prometheus text out."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire.clock import VirtualClock
from quire.metrics.prometheus import COUNTERS, GAUGES, SHARES, EngineMetrics
from quire.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.stats import EngineStats, shares

NAMES_OF_VLLM = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
    "num_preemptions",
    "request_success",
    "request_prompt_tokens",
    "request_generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "iteration_tokens_total",
    "cache_config_info",
}


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def metrics(clock: VirtualClock) -> EngineMetrics:
    return EngineMetrics('a "name"', block_size=16, num_blocks=100, max_model_len=256, clock=clock)


def sums(metrics: EngineMetrics) -> dict[str, float]:
    """Every sample without buckets, by name without the prefix (and finish reason, where there is one)."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            if sample.name.startswith("quire:") and "le" not in sample.labels:
                assert sample.labels["model_name"] == 'a "name"'
                name = sample.name.removeprefix("quire:") + sample.labels.get("finished_reason", "")
                found[name] = sample.value
    return found


def delta(
    name: str, tokens: list[list[int]], *, reasons: list[str | None] | None = None, first: float = 0.0
) -> RequestOutput:
    """One output: the new tokens of each sequence, and how it ended."""
    ends = reasons or [None] * len(tokens)
    return RequestOutput(
        request_id=name,
        prompt=None,
        prompt_token_ids=[1, 2, 3],
        outputs=[
            CompletionOutput(index, "", new, finish_reason=end)
            for index, (new, end) in enumerate(zip(tokens, ends, strict=True))
        ],
        finished=reasons is not None and None not in reasons,
        metrics=RequestMetrics(queue_time=0.25, time_to_first_token=first, latency=first),
    )


def test_names(metrics: EngineMetrics) -> None:
    families = {family.name.removeprefix("quire:") for family in metrics.collect()}
    assert families >= NAMES_OF_VLLM


def test_counters_and_gauges_come_from_the_last_snapshot(metrics: EngineMetrics) -> None:
    fields = [field for field, _ in (*COUNTERS.values(), *GAUGES.values())]
    metrics.record_stats(EngineStats(num_blocks=100, **dict.fromkeys(fields, 7)))
    metrics.record_stats(EngineStats(num_blocks=100, **{field: 9 + number for number, field in enumerate(fields)}))
    found = sums(metrics)
    for name, (field, _) in COUNTERS.items():
        assert found[f"{name}_total"] == 9 + fields.index(field)
    for name, (field, _) in GAUGES.items():
        assert found[name] == 9 + fields.index(field)
    assert found["kv_cache_usage_perc"] == found["kv_blocks_used"] / 100
    derived = shares(metrics.stats)
    assert {name: found[name] for name in SHARES} == {name: derived[key] for name, (key, _) in SHARES.items()}
    assert metrics.num_running == found["num_requests_running"]


def test_tokens_of_an_iteration(metrics: EngineMetrics) -> None:
    for steps, tokens in ((1, 10), (1, 10), (3, 40)):
        metrics.record_stats(EngineStats(steps_total=steps, scheduled_tokens_total=tokens))
    found = sums(metrics)
    assert (found["iteration_tokens_total_count"], found["iteration_tokens_total_sum"]) == (3, 40)


def test_times_of_a_request(metrics: EngineMetrics, clock: VirtualClock) -> None:
    clock.advance(100)
    metrics.record_outputs([delta("r", [[5]], first=1.0)])
    clock.advance(0.5)
    metrics.record_outputs([delta("r", [[6, 7]], first=1.0)])
    clock.advance(1.5)
    metrics.record_outputs([delta("r", [[8]], reasons=["stop"], first=1.0)])
    found = sums(metrics)
    assert found["time_to_first_token_seconds_sum"] == 1.0
    assert (found["inter_token_latency_seconds_count"], found["inter_token_latency_seconds_sum"]) == (3, 2.0)
    assert found["request_queue_time_seconds_sum"] == 0.25
    assert found["request_prefill_time_seconds_sum"] == 0.75
    assert found["request_decode_time_seconds_sum"] == 2.0
    assert found["request_inference_time_seconds_sum"] == 2.75
    assert found["e2e_request_latency_seconds_sum"] == 3.0
    assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(2.0 / 3)
    assert found["request_prompt_tokens_sum"] == 3
    assert found["request_generation_tokens_sum"] == 4
    assert found["request_success_totalstop"] == 1


def test_sequences_of_one_request(metrics: EngineMetrics, clock: VirtualClock) -> None:
    metrics.record_outputs([delta("r", [[5], [6]], first=1.0)])
    clock.advance(1)
    metrics.record_outputs([delta("r", [[5], [6]], reasons=["stop", None], first=1.0)])
    assert sums(metrics)["e2e_request_latency_seconds_count"] == 0
    metrics.record_outputs([delta("r", [[], [6]], reasons=["stop", "length"], first=1.0)])
    found = sums(metrics)
    assert found["time_to_first_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == 1
    assert found["inter_token_latency_seconds_count"] == 3
    assert found["request_generation_tokens_sum"] == 5


def test_an_aborted_request_counts_but_has_no_latency(metrics: EngineMetrics) -> None:
    metrics.record_outputs([delta("queued", [[]], reasons=["abort"])])
    metrics.record_outputs([delta("begun", [[1]], first=1.0)])
    metrics.record_outputs([delta("begun", [[]], reasons=["abort"], first=1.0)])
    found = sums(metrics)
    assert found["request_success_totalabort"] == 2
    assert found["request_prompt_tokens_count"] == 2
    assert found["e2e_request_latency_seconds_count"] == 0
    assert found["time_to_first_token_seconds_count"] == 1


def test_nothing_is_kept_of_finished_requests(metrics: EngineMetrics) -> None:
    for number in range(100):
        metrics.record_outputs([delta(f"r{number}", [[1]], reasons=["stop"], first=1.0)])
    assert metrics._requests == {}


def test_two_engines_do_not_share(metrics: EngineMetrics) -> None:
    other = EngineMetrics("other", block_size=16, num_blocks=1, max_model_len=256)
    other.record_outputs([delta("r", [[1]], reasons=["stop"], first=1.0)])
    assert sums(metrics)["request_success_totalstop"] == 0


def test_a_request_that_ran_out_of_time_counts_as_such(metrics: EngineMetrics) -> None:
    metrics.record_outputs([delta("queued", [[]], reasons=["timeout"])])
    metrics.record_outputs([delta("begun", [[1, 2]], reasons=["timeout"], first=1.0)])
    found = sums(metrics)
    assert found["request_success_totaltimeout"] == 2
    assert found["e2e_request_latency_seconds_count"] == 1, "one that never ran has none"
