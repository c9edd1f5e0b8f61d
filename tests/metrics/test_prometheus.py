"""EngineMetrics: snapshots and deltas in, Prometheus text out."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire.clock import VirtualClock
from quire.engine.messages import EngineReady
from quire.kv_cache.stats import NAMES, POSITIONS, EngineStats, shares
from quire.metrics.families import COUNTERS, GAUGES
from quire.metrics.prometheus import EngineMetrics
from quire.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams

READY = EngineReady(max_model_len=256, num_blocks=100, block_size=16, seconds={}, backend="")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def metrics(clock: VirtualClock) -> EngineMetrics:
    return EngineMetrics('a "name"', READY, clock=clock)


def sums(metrics: EngineMetrics) -> dict[str, float]:
    """Every sample without buckets, by name without the prefix, with the value of a label of its own behind it."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            if sample.name.startswith(("quire_", "vllm:")) and "le" not in sample.labels:
                labels = dict(sample.labels)
                assert (labels.pop("model_name"), labels.pop("engine")) == ('a "name"', "0")
                own = next(iter(labels.values())) if len(labels) == 1 else ""
                found[sample.name.removeprefix("quire_").removeprefix("vllm:") + own] = sample.value
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
        num_cached_tokens=2,
        metrics=RequestMetrics(queue_time=0.25, time_to_first_token=first, latency=first),
    )


def test_counters_and_gauges_come_from_the_last_snapshot(metrics: EngineMetrics) -> None:
    """Each from its own field: all fields differ."""
    lists = {POSITIONS, *NAMES}
    names = [name for name in EngineStats.__struct_fields__ if name not in lists]
    first = EngineStats(**dict.fromkeys(names, 7))
    fields = {field: 1000 + number for number, field in enumerate(names)}
    last = EngineStats(**fields)
    for stats in (first, last):
        metrics.record_stats(stats)
    found = sums(metrics)
    for suffix, families in (("_total", COUNTERS), ("", GAUGES)):
        for family in families:
            for row in family.rows:
                assert found[family.name + suffix + "".join(row.labels)] == row.read(last), family.name
    assert found["num_requests_running"] == metrics.stats.num_running == fields["num_running"]
    assert found["num_requests_waiting"] == fields["num_waiting"]
    assert found["num_preemptions_total"] == fields["preemptions_total"]
    assert found["kv_cache_usage_perc"] == shares(last)["kv_cache_usage"] == found["kv_blocks_used"] / last.num_blocks
    assert found["prompt_tokens_total"] == fields["prompt_tokens_total"]
    read = [row.read(last) for family in (*COUNTERS, *GAUGES) for row in family.rows if len(family.rows) == 1]
    assert len(read) - len(set(read)) == 1, "prompt_tokens_cached and prefix_cache_hits alone have the same value"


def test_accepted_drafts_by_position(metrics: EngineMetrics) -> None:
    metrics.record_stats(EngineStats(accepted_drafts_by_position=[5, 2, 0]))
    found = sums(metrics)
    assert [found[f"spec_decode_num_accepted_tokens_per_pos_total{place}"] for place in range(3)] == [5, 2, 0]
    assert "spec_decode_num_accepted_tokens_per_pos_total3" not in found


def test_parts_add_up(metrics: EngineMetrics) -> None:
    metrics.record_stats(EngineStats(prompt_tokens_total=50, prefix_cache_hits_total=20, num_waiting=7, num_deferred=3))
    found = sums(metrics)
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert [found[f"prompt_tokens_by_source_total{source}"] for source in sources] == [30, 20, 0]
    assert sum(found[f"prompt_tokens_by_source_total{source}"] for source in sources) == found["prompt_tokens_total"]
    assert found["prompt_tokens_cached_total"] == 20
    reasons = [found[f"num_requests_waiting_by_reason{reason}"] for reason in ("capacity", "deferred")]
    assert (reasons, sum(reasons)) == ([4, 3], found["num_requests_waiting"])


def test_parameters_of_a_request(metrics: EngineMetrics) -> None:
    params = SamplingParams(n=3)

    def request(**changes: bool) -> EngineRequest:
        return EngineRequest(request_id="r", prompt_token_ids=[1], params=params, max_tokens=40, seed=0, **changes)

    metrics.record_request("r", request(), None)
    metrics.record_request("p", request(pooling=True), None)
    metrics.record_request("q", request(register_prefix=True), None)
    found = sums(metrics)
    assert (found["request_params_n_count"], found["request_params_n_sum"]) == (1, 3)
    assert (found["request_params_max_tokens_count"], found["request_params_max_tokens_sum"]) == (1, 40)


def test_refused_requests(metrics: EngineMetrics) -> None:
    metrics.record_rejection("max_num_queued_reqs")
    metrics.record_rejection("max_num_queued_reqs")
    found = sums(metrics)
    reasons = ("max_num_queued_reqs", "max_num_queued_tokens", "rate_limit")
    assert [found[f"admission_rejections_total{reason}"] for reason in reasons] == [2, 0, 0]


@pytest.mark.parametrize(("level", "state"), [(0, "awake"), (1, "weights_offloaded"), (2, "discard_all")])
def test_sleep(level: int, state: str) -> None:
    metrics = EngineMetrics('a "name"', READY, sleep_level=lambda: level)
    found = {name: value for name, value in sums(metrics).items() if name.startswith("engine_sleep_state")}
    assert sum(found.values()) == found[f"engine_sleep_state{state}"] == 1


def test_tokens_of_an_iteration(metrics: EngineMetrics) -> None:
    """A prompt of 10 tokens, of which a cache had 2, and 3 of an answer; the last comes after its step's plan."""
    for steps, tokens in ((1, 0), (1, 1), (3, 2), (3, 3)):
        metrics.record_stats(
            EngineStats(
                steps_total=steps, prompt_tokens_total=10, prefix_cache_hits_total=2, generation_tokens_total=tokens
            )
        )
    found = sums(metrics)
    assert (found["iteration_tokens_total_count"], found["iteration_tokens_total_sum"]) == (3, 8 + 3)


def test_times_of_a_request(metrics: EngineMetrics, clock: VirtualClock) -> None:
    clock.advance(100)
    metrics.record_outputs([delta("r", [[5]], first=1.0)])
    clock.advance(0.5)
    metrics.record_outputs([delta("r", [[6, 7]], first=1.0)])
    clock.advance(1.5)
    last = delta("r", [[8]], reasons=["stop"], first=1.0)
    last.metrics.num_preemptions = 3
    metrics.record_outputs([last])
    found = sums(metrics)
    assert (found["request_num_preemptions_count"], found["request_num_preemptions_sum"]) == (1, 3)
    assert found["time_to_first_token_seconds_sum"] == 1.0
    assert (found["inter_token_latency_seconds_count"], found["inter_token_latency_seconds_sum"]) == (3, 2.0)
    assert found["request_queue_time_seconds_sum"] == 0.25
    assert found["request_prefill_time_seconds_sum"] == 0.75
    assert found["request_decode_time_seconds_sum"] == 2.0
    assert found["request_inference_time_seconds_sum"] == 2.75
    assert found["e2e_request_latency_seconds_sum"] == 3.0
    assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(2.0 / 3)
    assert found["request_prompt_tokens_sum"] == 3
    assert found["request_prefill_kv_computed_tokens_sum"] == 1, "the others were cached"
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
    assert found["request_max_num_generation_tokens_sum"] == 3


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
    other = EngineMetrics("other", READY)
    other.record_outputs([delta("r", [[1]], reasons=["stop"], first=1.0)])
    assert sums(metrics)["request_success_totalstop"] == 0


def test_a_request_that_ran_out_of_time_counts_as_such(metrics: EngineMetrics) -> None:
    metrics.record_outputs([delta("queued", [[]], reasons=["timeout"])])
    metrics.record_outputs([delta("begun", [[1, 2]], reasons=["timeout"], first=1.0)])
    found = sums(metrics)
    assert found["request_success_totaltimeout"] == 2
    assert found["e2e_request_latency_seconds_count"] == 1, "one that never ran has none"
