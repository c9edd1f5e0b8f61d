"""Metric families of an engine: names, kinds, labels and sources of values.

vLLM's families keep its names, labels and buckets (0.33).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from quire.kv_cache.stats import EngineStats, shares

THEIR_PREFIX = "vllm:"
OUR_PREFIX = "quire_"
LEGAL_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
"""Names that every Prometheus accepts; others would be escaped for some scrapers."""


class MetricNames(enum.StrEnum):
    """Names for the families that vLLM has. The other families always have the prefix `quire_`."""

    VLLM = "vllm"
    QUIRE = "quire"
    BOTH = "both"

    def prefixes(self, *, is_vllm: bool) -> tuple[str, ...]:
        """Prefixes of a family's names. is_vllm: vLLM has it."""
        if not is_vllm or self is MetricNames.QUIRE:
            return (OUR_PREFIX,)
        return (THEIR_PREFIX,) if self is MetricNames.VLLM else (THEIR_PREFIX, OUR_PREFIX)


class ToolReading(NamedTuple):
    """Labels of the counter of tool parsers' runs over answers: a whole choice, or a piece of a stream."""

    mode: str
    outcome: str
    request_type: str

    @classmethod
    def all(cls) -> Iterator[ToolReading]:
        outcomes, types = ("tool_call", "no_tool_call"), ("chat_completions", "responses", "other")
        return (cls(*labels) for labels in product(("streaming", "non_streaming"), outcomes, types))


Read = Callable[[EngineStats], float]


class Row(NamedTuple):
    """One labelled value of a family. labels: values of the family's own labels."""

    labels: tuple[str, ...]
    read: Read


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """Counter or gauge read from the engine's last snapshot. name: name with neither prefix nor `_total`. labels:
    besides `model_name` and `engine`."""

    name: str
    help: str
    rows: tuple[Row, ...]
    is_vllm: bool
    labels: tuple[str, ...] = ()


def _field(name: str) -> Read:
    return lambda stats: float(getattr(stats, name))


def _share(key: str) -> Read:
    return lambda stats: shares(stats)[key]


def _plain(families: Mapping[str, tuple[str, str]], *, is_vllm: bool) -> tuple[MetricFamily, ...]:
    return tuple(
        MetricFamily(name, help, (Row((), _field(field)),), is_vllm) for name, (field, help) in families.items()
    )


def local_compute(stats: EngineStats) -> float:
    return stats.prompt_tokens_total - stats.prefix_cache_hits_total


COUNTERS: tuple[MetricFamily, ...] = (
    *_plain(
        {
            "prefix_cache_queries": ("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
            "prefix_cache_hits": ("prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
            "num_preemptions": ("preemptions_total", "Times that a request gave up its KV blocks to others."),
            "prompt_tokens": ("prompt_tokens_total", "Prompt tokens of started requests, cached ones included."),
            "prompt_tokens_cached": ("prefix_cache_hits_total", "Prompt tokens that were found in a cache."),
            "generation_tokens": ("generation_tokens_total", "Tokens generated."),
            "spec_decode_num_drafts": ("drafts_total", "Times that a sequence had drafts in a step."),
            "spec_decode_num_draft_tokens": ("draft_tokens_total", "Drafts that steps computed."),
            "spec_decode_num_accepted_tokens": (
                "accepted_draft_tokens_total",
                "Drafts that were the sequences' own tokens.",
            ),
        },
        is_vllm=True,
    ),
    MetricFamily(
        "prompt_tokens_by_source",
        "Prompt tokens by where their keys and values came from; blocks of host memory and disk are local.",
        (
            Row(("local_compute",), local_compute),
            Row(("local_cache_hit",), _field("prefix_cache_hits_total")),
            Row(("external_kv_transfer",), lambda stats: 0.0),
        ),
        is_vllm=True,
        labels=("source",),
    ),
    *_plain(
        {
            "prefix_cache_waits": (
                "prefix_cache_waits_total",
                "Times that a request waited for a running one to compute the prefix they share.",
            ),
            "prefix_cache_evictions": ("evictions_total", "Cached blocks given up for a new owner."),
            "host_cache_hit_blocks": (
                "host_cache_hit_blocks_total",
                "KV blocks of prefix hits that came from host memory.",
            ),
            "disk_cache_hit_blocks": ("disk_cache_hit_blocks_total", "KV blocks of prefix hits that came from disk."),
            "offload_stored_blocks": ("offload_stored_blocks_total", "KV blocks written to disk."),
            "offload_stored_bytes": ("offload_stored_bytes_total", "Bytes of KV blocks written to disk."),
            "offload_store_failures": (
                "offload_store_failures_total",
                "KV blocks that could not be written to disk.",
            ),
            "offload_loaded_blocks": ("offload_loaded_blocks_total", "KV blocks read from disk."),
            "offload_loaded_bytes": ("offload_loaded_bytes_total", "Bytes of KV blocks read from disk."),
            "offload_load_failures": (
                "offload_load_failures_total",
                "KV blocks gone from disk, damaged or unreadable.",
            ),
            "engine_steps": ("steps_total", "Steps of the engine."),
            "recomputed_tokens": ("recomputed_tokens_total", "Tokens computed again after a preemption."),
            "swap_preemptions": ("swap_preemptions_total", "Preemptions that swapped the KV blocks to the host."),
            "swapped_out_blocks": ("swapped_out_blocks_total", "Blocks copied to the host pool."),
            "swapped_in_blocks": ("swapped_in_blocks_total", "Blocks copied back from the host pool."),
            "swapped_bytes": ("swapped_bytes_total", "Bytes copied to the host pool and back."),
            "copied_blocks": ("copied_blocks_total", "Blocks copied on write."),
            "encoder_images": ("encoded_images_total", "Images whose encoding has begun."),
            "encoder_seconds": ("encoder_seconds_total", "Seconds that images were encoded."),
            "adapter_loads": ("adapter_loads_total", "Loads of adapters into a slot."),
        },
        is_vllm=False,
    ),
)

GAUGES: tuple[MetricFamily, ...] = (
    *_plain(
        {
            "num_requests_running": ("num_running", "Requests that are being computed."),
            "num_requests_waiting": ("num_waiting", "Requests that wait for a place, preempted ones included."),
        },
        is_vllm=True,
    ),
    MetricFamily(
        "num_requests_waiting_by_reason",
        "Waiting requests by reason: 'capacity' for slots, blocks or tokens of a step; 'deferred' for an event, "
        "such as a prefix that another request computes or blocks being loaded. The sum is num_requests_waiting.",
        (
            Row(("capacity",), lambda stats: stats.num_waiting - stats.num_deferred),
            Row(("deferred",), _field("num_deferred")),
        ),
        is_vllm=True,
        labels=("reason",),
    ),
    MetricFamily(
        "kv_cache_usage_perc",
        "Share of the KV blocks in use, 0 to 1.",
        (Row((), _share("kv_cache_usage")),),
        is_vllm=True,
    ),
    *_plain(
        {
            "num_requests_preempted": ("num_preempted", "Requests that wait after a preemption."),
            "num_requests_swapped": ("num_swapped", "Preempted requests whose KV blocks are in the host pool."),
            "kv_blocks_used": ("num_used_blocks", "KV blocks that a running sequence refers to."),
            "kv_blocks_cached": ("num_cached_blocks", "Free KV blocks whose content a prefix can still hit."),
            "kv_blocks_registered": (
                "num_registered_blocks",
                "KV blocks of registered prefixes; they count as used.",
            ),
            "kv_blocks_shared": ("num_shared_blocks", "KV blocks with more than one owner."),
            "kv_blocks_logical": ("num_logical_blocks", "KV blocks that would be used if no sequence shared any."),
            "kv_slots_stored": ("num_stored_tokens", "Slots of used KV blocks that hold a token."),
            "kv_slots_reserved": ("num_reserved_slots", "Slots of used KV blocks that steps in flight fill."),
            "kv_slots_wasted": ("num_wasted_slots", "Slots of used KV blocks that hold no token."),
            "offload_blocks": ("num_offloaded_blocks", "KV blocks on disk that this engine can use."),
            "offload_bytes": (
                "offload_bytes",
                "Bytes in kv_offload_dir, those of other models and engines included.",
            ),
            "host_blocks": ("num_host_blocks", "Blocks of the host pool."),
            "encoder_cache_tokens": ("num_encoder_tokens", "Tokens of images whose features the workers keep."),
            "encoder_cache_tokens_max": ("max_encoder_tokens", "Those that they keep at most."),
            "adapter_slots": ("num_adapter_slots", "Adapters that the workers may hold."),
            "adapters_loaded": ("num_loaded_adapters", "Adapters that the workers hold."),
            "host_blocks_used": ("num_used_host_blocks", "Blocks of the host pool that a swapped request holds."),
        },
        is_vllm=False,
    ),
    *(
        MetricFamily(name, help, (Row((), _share(key)),), is_vllm=False)
        for name, key, help in (
            ("kv_cache_stored_perc", "kv_cache_stored", "Share of used blocks' slots that hold a token, 0 to 1."),
            ("kv_cache_waste_perc", "kv_cache_waste", "Share of used blocks' slots that hold no token, 0 to 1."),
            (
                "kv_cache_sharing_perc",
                "kv_cache_sharing",
                "KV blocks saved by sharing, as a share of those used without, 0 to 1.",
            ),
        )
    ),
)

TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCIES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
TOKENS_OF_A_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PARAMS_N = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


def one_two_five(max_value: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to `max_value`: vLLM's buckets for token counts."""
    bounds: list[int] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > max_value:
                return tuple(bounds)
            bounds.append(digit * power)
        power *= 10


def histograms(max_model_len: int) -> dict[str, tuple[str, tuple[float, ...]]]:
    """Name -> (help, buckets) of the histograms, all vLLM's, which requests and outputs feed."""
    lengths = one_two_five(max_model_len)
    return {
        "request_prompt_tokens": ("Prompt tokens of a request.", lengths),
        "request_generation_tokens": ("Tokens generated for a request.", lengths),
        "iteration_tokens_total": ("Tokens of prompts computed in one step, and tokens generated.", TOKENS_OF_A_STEP),
        "request_max_num_generation_tokens": ("Tokens of the longest sequence of a request.", lengths),
        "request_params_n": ("Parameter n of a request.", PARAMS_N),
        "request_params_max_tokens": ("Parameter max_tokens of a request, resolved.", lengths),
        "time_to_first_token_seconds": ("Arrival to first token.", TO_FIRST_TOKEN),
        "inter_token_latency_seconds": ("Time between two tokens of a sequence.", PER_TOKEN),
        "request_time_per_output_token_seconds": ("Mean time per token after the first, by request.", PER_TOKEN),
        "e2e_request_latency_seconds": ("Arrival to last token.", LATENCIES),
        "request_queue_time_seconds": ("Arrival to first step.", LATENCIES),
        "request_inference_time_seconds": ("First step to last token.", LATENCIES),
        "request_prefill_time_seconds": ("First step to first token.", LATENCIES),
        "request_decode_time_seconds": ("First to last token.", LATENCIES),
        "request_num_preemptions": ("Times that a request gave up its KV blocks to others.", PREEMPTIONS),
        "request_prefill_kv_computed_tokens": ("Prompt tokens that were computed, without cached ones.", lengths),
    }
