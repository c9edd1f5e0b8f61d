"""The engine's metrics for Prometheus: vLLM's names behind the prefix `quire:`, one registry per server.

Counters and gauges are read from the engine's last snapshot at each scrape, so they cost a step nothing;
histograms are fed from the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.clock import Clock, SystemClock
from quire.metrics.histogram import Histogram, one_two_five
from quire.outputs import CompletionOutput, RequestOutput
from quire.request import FinishReason
from quire.stats import EngineStats, shares

PREFIX = "quire:"
FINISH_REASONS = tuple(reason.value for reason in FinishReason)

LATENCIES = one_two_five(0.001, 2000)
STEP_LATENCIES = one_two_five(0.0001, 100)

COUNTERS: dict[str, tuple[str, str]] = {
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens computed."),
    "generation_tokens": ("generation_tokens_total", "Tokens generated."),
    "num_preemptions": ("preemptions_total", "Times that a request gave up its KV blocks to others."),
    "prefix_cache_queries": ("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    "prefix_cache_waits": (
        "prefix_cache_waits_total",
        "Times that a request waited for a running one to compute the prefix they share.",
    ),
    "prefix_cache_evictions": ("evictions_total", "Cached blocks given up for a new owner."),
    "host_cache_hit_blocks": ("host_cache_hit_blocks_total", "KV blocks of prefix hits that came from host memory."),
    "disk_cache_hit_blocks": ("disk_cache_hit_blocks_total", "KV blocks of prefix hits that came from disk."),
    "offload_stored_blocks": ("offload_stored_blocks_total", "KV blocks written to disk."),
    "offload_stored_bytes": ("offload_stored_bytes_total", "Bytes of KV blocks written to disk."),
    "offload_store_failures": ("offload_store_failures_total", "KV blocks that could not be written to disk."),
    "offload_loaded_blocks": ("offload_loaded_blocks_total", "KV blocks read from disk."),
    "offload_loaded_bytes": ("offload_loaded_bytes_total", "Bytes of KV blocks read from disk."),
    "offload_load_failures": ("offload_load_failures_total", "KV blocks gone from disk, damaged or unreadable."),
    "engine_steps": ("steps_total", "Steps of the engine."),
    "recomputed_tokens": ("recomputed_tokens_total", "Tokens computed again after a preemption."),
    "swap_preemptions": ("swap_preemptions_total", "Preemptions that swapped the KV blocks to the host."),
    "swapped_out_blocks": ("swapped_out_blocks_total", "Blocks copied to the host pool."),
    "swapped_in_blocks": ("swapped_in_blocks_total", "Blocks copied back from the host pool."),
    "swapped_bytes": ("swapped_bytes_total", "Bytes copied to the host pool and back."),
    "copied_blocks": ("copied_blocks_total", "Blocks copied on write."),
}
"""Metric -> (field of EngineStats, help)."""

SHARES: dict[str, tuple[str, str]] = {
    "kv_cache_usage_perc": ("kv_cache_usage", "Share of the KV blocks in use, 0 to 1."),
    "kv_cache_stored_perc": ("kv_cache_stored", "Share of the used blocks' slots that hold a token, 0 to 1."),
    "kv_cache_waste_perc": ("kv_cache_waste", "Share of the used blocks' slots that hold no token, 0 to 1."),
    "kv_cache_sharing_perc": (
        "kv_cache_sharing",
        "KV blocks saved by sharing, as a share of those used without, 0 to 1.",
    ),
}
"""Metric -> (key of `quire.stats.shares`, help). `_perc` is vLLM's name for such a share."""

GAUGES: dict[str, tuple[str, str]] = {
    "num_requests_running": ("num_running", "Requests that are being computed."),
    "num_requests_waiting": ("num_waiting", "Requests that wait for a place, preempted ones included."),
    "num_requests_preempted": ("num_preempted", "Requests that wait after a preemption."),
    "num_requests_swapped": ("num_swapped", "Preempted requests whose KV blocks are in the host pool."),
    "kv_blocks_used": ("num_used_blocks", "KV blocks that a running sequence refers to."),
    "kv_blocks_cached": ("num_cached_blocks", "Free KV blocks whose content a prefix can still hit."),
    "kv_blocks_pinned": ("num_registered_blocks", "KV blocks of registered prefixes; they count as used."),
    "offload_blocks": ("num_offloaded_blocks", "KV blocks on disk that this engine can use."),
    "offload_bytes": ("offload_bytes", "Bytes in kv_offload_dir, those of other models and engines included."),
    "kv_blocks_shared": ("num_shared_blocks", "KV blocks with more than one owner."),
    "host_blocks": ("num_host_blocks", "Blocks of the host pool."),
    "host_blocks_used": ("num_used_host_blocks", "Blocks of the host pool that a swapped request holds."),
    "kv_blocks_logical": ("num_logical_blocks", "KV blocks that would be used if no sequence shared any."),
    "kv_slots_stored": ("num_stored_tokens", "Slots of used KV blocks that hold a token."),
    "kv_slots_reserved": ("num_reserved_slots", "Slots of used KV blocks that steps in flight fill."),
    "kv_slots_wasted": ("num_wasted_slots", "Slots of used KV blocks that hold no token."),
}


class _Progress:
    """One request between its first output and its last. Times are of the front end's clock."""

    __slots__ = ("_last_times", "first_token_time", "num_tokens")

    def __init__(self, now: float) -> None:
        self.first_token_time = now
        self.num_tokens: dict[int, int] = {}
        """Sequence -> tokens so far."""
        self._last_times: dict[int, float] = {}

    def observe_tokens(self, completion: CompletionOutput, now: float) -> float | None:
        """Count a delta; the mean time between its tokens, or None where there is no token before them."""
        count, index = len(completion.token_ids), completion.index
        if not count:
            return None
        last = self._last_times.get(index)
        self._last_times[index] = now
        self.num_tokens[index] = self.num_tokens.get(index, 0) + count
        return None if last is None else (now - last) / count


class EngineMetrics(Collector):
    """What one engine did, as metrics: a StatsListener of AsyncLLM whose requests all ask for deltas.

    Fed and scraped by one thread.
    """

    def __init__(
        self,
        model_name: str,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._requests: dict[str, _Progress] = {}
        self.stats = EngineStats(block_size=block_size, num_blocks=num_blocks)
        """The last snapshot."""
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        lengths = one_two_five(1, max_model_len)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, help, buckets)

        self.time_to_first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", LATENCIES)
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Time between two tokens of a sequence.", STEP_LATENCIES
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, by request.", STEP_LATENCIES
        )
        self.e2e_latency = histogram("e2e_request_latency_seconds", "Arrival to last token.", LATENCIES)
        self.queue_time = histogram("request_queue_time_seconds", "Arrival to first step.", LATENCIES)
        self.prefill_time = histogram("request_prefill_time_seconds", "First step to first token.", LATENCIES)
        self.decode_time = histogram("request_decode_time_seconds", "First to last token.", LATENCIES)
        self.inference_time = histogram("request_inference_time_seconds", "First step to last token.", LATENCIES)
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self.generation_length = histogram("request_generation_tokens", "Tokens generated for a request.", lengths)
        self.iteration_tokens = histogram(
            "iteration_tokens_total", "Tokens computed in one step.", one_two_five(1, 16384)
        )
        self._histograms = [value for value in vars(self).values() if isinstance(value, Histogram)]
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    @property
    def num_running(self) -> int:
        """Requests being computed, as of the last snapshot."""
        return self.stats.num_running

    def record_stats(self, stats: EngineStats) -> None:
        """Take a new snapshot; it replaces the one before."""
        num_steps = stats.steps_total - self.stats.steps_total
        if num_steps > 0:
            num_tokens = stats.scheduled_tokens_total - self.stats.scheduled_tokens_total
            self.iteration_tokens.observe(num_tokens / num_steps, num_steps)
        self.stats = stats

    def record_outputs(self, outputs: list[RequestOutput]) -> None:
        """Take what a step brought: one delta for each request."""
        now = self._clock.now()
        for output in outputs:
            progress = self._requests.get(output.request_id)
            if progress is None:
                progress = self._requests[output.request_id] = _Progress(now)
                if output.metrics.time_to_first_token:
                    self.time_to_first_token.observe(output.metrics.time_to_first_token)
            for completion in output.outputs:
                gap = progress.observe_tokens(completion, now)
                if gap is not None:
                    self.inter_token_latency.observe(gap, len(completion.token_ids))
                if completion.finish_reason is not None:
                    self._finished[completion.finish_reason] += 1
            if output.finished:
                del self._requests[output.request_id]
                self._record_finished(output, progress, now)

    def _record_finished(self, output: RequestOutput, progress: _Progress, now: float) -> None:
        """Times are the engine's up to the first token, then ours: the engine does not see a stop string's end."""
        self.prompt_length.observe(len(output.prompt_token_ids))
        self.generation_length.observe(sum(progress.num_tokens.values()))
        queued, first = output.metrics.queue_time, output.metrics.time_to_first_token
        if not first or any(completion.finish_reason == "abort" for completion in output.outputs):
            return
        decoding = now - progress.first_token_time
        self.queue_time.observe(queued)
        self.prefill_time.observe(first - queued)
        self.decode_time.observe(decoding)
        self.inference_time.observe(first - queued + decoding)
        self.e2e_latency.observe(first + decoding)
        longest = max(progress.num_tokens.values(), default=0)
        if longest > 1:
            self.time_per_output_token.observe(decoding / (longest - 1))

    def collect(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        for name, (field, help) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, help, labels=names)
            counter.add_metric(values, getattr(self.stats, field))
            yield counter
        for name, (field, help) in GAUGES.items():
            yield self._gauge(name, help, getattr(self.stats, field))
        derived = shares(self.stats)
        for name, (key, help) in SHARES.items():
            yield self._gauge(name, help, derived[key])
        success = CounterMetricFamily(
            PREFIX + "request_success", "Finished requests.", labels=[*names, "finished_reason"]
        )
        for reason, count in self._finished.items():
            success.add_metric([*values, reason], count)
        yield success
        info = GaugeMetricFamily(
            PREFIX + "cache_config_info", "Shape of the KV cache.", labels=[*names, "block_size", "num_gpu_blocks"]
        )
        info.add_metric([*values, str(self.stats.block_size), str(self.stats.num_blocks)], 1)
        yield info
        for histogram in self._histograms:
            yield histogram.family(self._labels)

    def _gauge(self, name: str, help: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(PREFIX + name, help, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge
