"""What is exposed: vLLM's families by name, type, labels and buckets, whatever the scraper asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from quire.engine.messages import EngineReady
from quire.kv_cache.stats import EngineStats
from quire.metrics.families import LEGAL_NAME, MetricNames, one_two_five
from quire.metrics.prometheus import EngineMetrics
from quire.server.scrape import HttpCounter, _encoder_for
from quire.utils.shared_numbers import Numbers
from tests.long import one_in

MAX_MODEL_LEN = 4096
LENGTHS = "1 2 5 10 20 50 100 200 500 1000 2000"
TO_FIRST_TOKEN = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"  #
PER_TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
LATENCIES = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"

CACHE_LABELS = {"block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"}
CACHE_LABELS |= {"cache_dtype", "enable_prefix_caching"}
FAMILIES_OF_VLLM: dict[str, tuple[str, set[str], str]] = {
    "num_requests_running": ("gauge", set(), ""),
    "num_requests_waiting": ("gauge", set(), ""),
    "num_requests_waiting_by_reason": ("gauge", {"reason"}, ""),
    "engine_sleep_state": ("gauge", {"sleep_state"}, ""),
    "kv_cache_usage_perc": ("gauge", set(), ""),
    "cache_config_info": ("gauge", CACHE_LABELS, ""),
    "prefix_cache_queries": ("counter", set(), ""),
    "prefix_cache_hits": ("counter", set(), ""),
    "num_preemptions": ("counter", set(), ""),
    "spec_decode_num_drafts": ("counter", set(), ""),
    "spec_decode_num_draft_tokens": ("counter", set(), ""),
    "spec_decode_num_accepted_tokens": ("counter", set(), ""),
    "spec_decode_num_accepted_tokens_per_pos": ("counter", {"position"}, ""),
    "prompt_tokens": ("counter", set(), ""),
    "prompt_tokens_by_source": ("counter", {"source"}, ""),
    "prompt_tokens_cached": ("counter", set(), ""),
    "generation_tokens": ("counter", set(), ""),
    "request_success": ("counter", {"finished_reason"}, ""),
    "admission_rejections": ("counter", {"reason"}, ""),
    "tool_call_parser_invocations": ("counter", {"mode", "outcome", "request_type"}, ""),
    "request_prompt_tokens": ("histogram", set(), LENGTHS),
    "request_generation_tokens": ("histogram", set(), LENGTHS),
    "iteration_tokens_total": ("histogram", set(), "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"),
    "request_max_num_generation_tokens": ("histogram", set(), LENGTHS),
    "request_params_n": ("histogram", set(), "1 2 5 10 20"),
    "request_params_max_tokens": ("histogram", set(), LENGTHS),
    "time_to_first_token_seconds": ("histogram", set(), TO_FIRST_TOKEN),
    "inter_token_latency_seconds": ("histogram", set(), PER_TOKEN),
    "request_time_per_output_token_seconds": ("histogram", set(), PER_TOKEN),
    "e2e_request_latency_seconds": ("histogram", set(), LATENCIES),
    "request_queue_time_seconds": ("histogram", set(), LATENCIES),
    "request_inference_time_seconds": ("histogram", set(), LATENCIES),
    "request_prefill_time_seconds": ("histogram", set(), LATENCIES),
    "request_decode_time_seconds": ("histogram", set(), LATENCIES),
    "request_num_preemptions": ("histogram", set(), "1 2 3 4 5 10 20"),
    "request_prefill_kv_computed_tokens": ("histogram", set(), LENGTHS),
}
"""Of vLLM 0.33: name -> (type, labels besides model_name and engine, bucket bounds)."""

GATEWAY = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
"""What the Kubernetes gateway's inference extension reads by default (its proposal 003), with cache_config_info."""

ACCEPTS = [
    "",
    "*/*",
    "text/plain",
    "text/plain;version=0.0.4;q=0.5",
    "application/openmetrics-text",
    "application/openmetrics-text; version=0.0.1; charset=utf-8",
    # Prometheus 2.42
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    # Prometheus 3
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=1.0.0;"
    "escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0;escaping=underscores",
    "application/openmetrics-text;version=1.0.0;escaping=dots",
    "application/openmetrics-text;version=1.0.0;escaping=values",
    "application/openmetrics-text;version=2.0.0",
    "application/openmetrics-text;version=x;q=y",
    "text/plain;version=1.0.0;escaping=underscores",
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6,"
    "text/plain;version=1.0.0;escaping=values;q=0.4",
    "nonsense;;,=;q",
]


def make(names: MetricNames = MetricNames.VLLM) -> EngineMetrics:
    metrics = EngineMetrics(
        "m",
        EngineReady(max_model_len=MAX_MODEL_LEN, num_blocks=100, block_size=16, seconds={}, backend=""),
        names=names,
        cache_config={"cache_dtype": "float32", "enable_prefix_caching": "True"},
    )
    counter = HttpCounter(["/v1/completions"], Numbers.alone())
    counter.count_response("/v1/completions", "POST", 200)
    metrics.registry.register(counter)
    return metrics


def exposed(metrics: EngineMetrics) -> dict[str, Metric]:
    return {family.name: family for family in metrics.collect()}


def sample_names(families: Iterable[Metric]) -> set[str]:
    return {sample.name for family in families for sample in family.samples if not sample.name.endswith("_created")}


def test_families_of_vllm_are_exposed_as_vllm_does() -> None:
    families = exposed(make())
    assert {name.removeprefix("vllm:") for name in families if name.startswith("vllm:")} == set(FAMILIES_OF_VLLM)
    for name, (kind, labels, bounds) in FAMILIES_OF_VLLM.items():
        family = families[f"vllm:{name}"]
        assert family.type == kind, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {"model_name", "engine"} | labels, name
        found = [float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels]
        assert found == [*map(float, bounds.split()), *([float("inf")] if bounds else [])], name


def test_label_values() -> None:
    families = exposed(make())

    def values(name: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in families[f"vllm:{name}"].samples}

    assert values("prompt_tokens_by_source", "source") == {"local_compute", "local_cache_hit", "external_kv_transfer"}
    assert values("num_requests_waiting_by_reason", "reason") == {"capacity", "deferred"}
    assert values("request_success", "finished_reason") > {"stop", "length", "abort", "error"}
    assert values("admission_rejections", "reason") > {"max_num_queued_reqs", "max_num_queued_tokens"}
    assert values("engine_sleep_state", "sleep_state") == {"awake", "weights_offloaded", "discard_all"}
    assert values("tool_call_parser_invocations", "mode") == {"streaming", "non_streaming"}
    assert values("tool_call_parser_invocations", "outcome") == {"tool_call", "no_tool_call"}
    assert values("tool_call_parser_invocations", "request_type") == {"chat_completions", "responses", "other"}
    assert values("num_requests_running", "engine") == {"0"}


def test_every_other_family_has_our_prefix_without_a_colon() -> None:
    others = [name for name in exposed(make()) if not name.startswith("vllm:")]
    assert len(others) > 20
    for name in others:
        assert name.startswith("quire_"), name
        assert ":" not in name


@pytest.mark.parametrize(
    ("names", "prefixes"),
    [
        (MetricNames.VLLM, {"vllm:"}),
        (MetricNames.QUIRE, {"quire_"}),
        (MetricNames.BOTH, {"vllm:", "quire_"}),
    ],
)
def test_names_are_chosen(names: MetricNames, prefixes: set[str]) -> None:
    families = exposed(make(names))
    for name in FAMILIES_OF_VLLM:
        assert {prefix for prefix in ("vllm:", "quire_") if prefix + name in families} == prefixes, name
    assert "quire_kv_blocks_used" in families
    assert len(families) == len(list(make(names).collect())), "no family twice"


@pytest.mark.parametrize(("names", "accept"), one_in(3, MetricNames, ACCEPTS))
def test_names_do_not_depend_on_the_scraper(accept: str, names: MetricNames) -> None:
    metrics = make(names)
    plain = sample_names(parse_text(generate_latest(metrics.registry, escaping="allow-utf-8").decode()))
    encode, content_type = _encoder_for(accept)
    text = encode(metrics.registry).decode()
    parse = parse_open_metrics if content_type.startswith("application/openmetrics-text") else parse_text
    assert sample_names(parse(text)) == plain
    heads = {line.split()[2] for line in text.splitlines() if line.startswith(("# HELP", "# TYPE"))}
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for name in {re.split(r"[{ ]", line)[0] for line in lines} | heads:
        assert LEGAL_NAME.fullmatch(name), name
    for line in lines:
        name = re.split(r"[{ ]", line)[0]
        assert any(name.startswith(head) for head in heads), f"{name} stands under no head"


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        (ACCEPTS[0], False),
        (ACCEPTS[1], False),
        (ACCEPTS[4], True),
        (ACCEPTS[6], True),
        (ACCEPTS[7], True),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.9", False),
        ("application/openmetrics-text;q=0", False),
    ],
)
def test_the_format_follows_the_scraper(accept: str, is_open: bool) -> None:
    encode, content_type = _encoder_for(accept)
    assert content_type.startswith("application/openmetrics-text" if is_open else "text/plain; version=0.0.4")
    assert encode(make().registry).endswith(b"# EOF\n") == is_open


def test_the_gateway_finds_its_gauges() -> None:
    families = exposed(make())
    assert set(GATEWAY) <= set(families)
    assert all(families[name].type == "gauge" for name in GATEWAY)
    [info] = families["vllm:cache_config_info"].samples
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"], info.value) == ("16", "100", 1)
    assert info.labels["kv_cache_size_tokens"] == "1600"


def test_adapters_are_named_where_there_are_slots() -> None:
    metrics = make()
    assert "vllm:lora_requests_info" not in exposed(metrics)
    stats = EngineStats(max_running_adapters=2, num_adapter_slots=4, num_loaded_adapters=3)
    stats.running_adapters, stats.waiting_adapters = ["sql", "prose"], ["verse"]
    metrics.record_stats(stats)
    [info] = exposed(metrics)["vllm:lora_requests_info"].samples
    labels = {"max_lora": "2", "running_lora_adapters": "sql,prose", "waiting_lora_adapters": "verse"}
    assert labels.items() <= info.labels.items()
    assert info.value > 1e9, "the time"


def test_buckets_for_lengths() -> None:
    assert one_two_five(30) == (1, 2, 5, 10, 20)
    assert one_two_five(50) == (1, 2, 5, 10, 20, 50)
    assert one_two_five(1) == (1,)
