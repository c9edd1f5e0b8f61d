"""Engine's metrics for Prometheus, one registry per server (names: quire/metrics/families.py).

Counters and gauges come from the engine's last snapshot; requests and outputs feed histograms.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from operator import add
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.clock import Clock, SystemClock
from quire.engine.messages import EngineReady
from quire.engine.output_stream import StatsListener
from quire.kv_cache.stats import EngineStats
from quire.metrics.families import (
    COUNTERS,
    GAUGES,
    MetricFamily,
    MetricNames,
    Read,
    Row,
    ToolReading,
    histograms,
    local_compute,
)
from quire.metrics.progress import RequestProgress
from quire.outputs import RequestOutput
from quire.request import EngineRequest, FinishReason
from quire.utils.shared_numbers import Numbers

Name = TypeVar("Name", bound=Hashable)
FINISH_REASONS = tuple(reason.value for reason in FinishReason)
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens", "rate_limit")
"""Reasons for refusing a request before the engine: two queue limits, and rate limits of a key."""
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
STEP_TOKENS = "iteration_tokens_total"
ENGINE = "0"
"""Label `engine`: index among several engines of a server."""


class EngineMetrics(Collector, StatsListener):
    """Metrics of one engine: a listener of AsyncLLM, whose requests must all ask for deltas. One thread feeds and
    scrapes."""

    def __init__(
        self,
        model_name: str,
        ready: EngineReady,
        *,
        names: MetricNames = MetricNames.VLLM,
        cache_config: Mapping[str, str] | None = None,
        sleep_level: Callable[[], int] = lambda: 0,
        numbers: Numbers | None = None,
        clock: Clock | None = None,
    ) -> None:
        """cache_config: labels of cache_config_info besides the sizes. sleep_level: returns the engine's level, 0 when
        awake. numbers: counters that a server's processes share, while their parent counts steps."""
        self._counts_steps = numbers is None
        numbers = numbers or Numbers.alone()
        self._clock = clock or SystemClock()
        self._requests: dict[str, RequestProgress] = {}
        self.on_finished: list[Callable[[RequestOutput, RequestProgress, float], None]] = []
        """Calls at each request's end, with its last output, progress and the time."""
        self.stats = EngineStats(block_size=ready.block_size, num_blocks=ready.num_blocks)
        self.names = names
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self._cache_config = {**(cache_config or {}), "kv_cache_max_concurrency": f"{ready.max_concurrency:.2f}"}
        self._sleep_level = sleep_level
        self._steps = StepTokens(numbers)  # first, as in the parent
        self._finished = Counts(FINISH_REASONS, numbers)
        self._rejections = Counts(REJECTIONS, numbers)
        self._tool_readings = Counts(tuple(ToolReading.all()), numbers)
        self._histograms = {
            name: self._steps.histogram if name == STEP_TOKENS else Histogram(*row, numbers)
            for name, row in histograms(ready.max_model_len).items()
        }
        found = self._histograms
        self.time_to_first_token = found["time_to_first_token_seconds"]
        self.inter_token_latency = found["inter_token_latency_seconds"]
        self.time_per_output_token = found["request_time_per_output_token_seconds"]
        self.e2e_latency = found["e2e_request_latency_seconds"]
        self.queue_time = found["request_queue_time_seconds"]
        self.prefill_time = found["request_prefill_time_seconds"]
        self.decode_time = found["request_decode_time_seconds"]
        self.inference_time = found["request_inference_time_seconds"]
        self.prompt_length = found["request_prompt_tokens"]
        self.computed_length = found["request_prefill_kv_computed_tokens"]
        self.generation_length = found["request_generation_tokens"]
        self.longest_generation = found["request_max_num_generation_tokens"]
        self.num_preemptions = found["request_num_preemptions"]
        self.params_n = found["request_params_n"]
        self.params_max_tokens = found["request_params_max_tokens"]
        self.registry.register(self)

    def record_request(self, request_id: str, request: EngineRequest, text: str | None) -> None:
        """Count the parameters of a generating request; each part of a split one counts."""
        if not request.pooling and not request.register_prefix:
            self.params_n.observe(request.params.n)
            self.params_max_tokens.observe(request.max_tokens)

    def record_rejection(self, reason: str) -> None:
        self._rejections.count(reason)

    def outcomes(self) -> dict[str, int]:
        """Finished sequences by finish reason and refused requests by reason; without zeros. Shown on the dashboard."""
        found = {**self._finished.totals(), **self._rejections.totals()}
        return {reason: int(count) for reason, count in found.items() if count}

    def record_tool_reading(self, reading: ToolReading) -> None:
        self._tool_readings.count(reading)

    def record_stats(self, stats: EngineStats) -> None:
        if self._counts_steps:
            self._steps.record(stats)
        self.stats = stats

    def record_outputs(self, outputs: list[RequestOutput]) -> None:
        """Take a step's outputs: one delta per request."""
        now = self._clock.now()
        for output in outputs:
            progress = self._requests.get(output.request_id)
            if progress is None:
                progress = self._requests[output.request_id] = RequestProgress(now)
                if output.metrics.time_to_first_token:
                    self.time_to_first_token.observe(output.metrics.time_to_first_token)
            for completion in output.outputs:
                gap = progress.observe_tokens(completion, now)
                if gap is not None:
                    self.inter_token_latency.observe(gap, len(completion.token_ids))
                if completion.finish_reason is not None:
                    self._finished.count(completion.finish_reason)
            if output.finished:
                del self._requests[output.request_id]
                self._record_finished(output, progress, now)
                for call in self.on_finished:
                    call(output, progress, now)

    def _record_finished(self, output: RequestOutput, progress: RequestProgress, now: float) -> None:
        num_prompt, longest = len(output.prompt_token_ids), progress.longest
        self.prompt_length.observe(num_prompt)
        self.computed_length.observe(num_prompt - output.num_cached_tokens)
        self.generation_length.observe(progress.num_generated)
        self.longest_generation.observe(longest)
        self.num_preemptions.observe(output.metrics.num_preemptions)
        times = progress.phases(output, now)
        if times is None or any(completion.finish_reason == "abort" for completion in output.outputs):
            return
        self.queue_time.observe(times.queue)
        self.prefill_time.observe(times.prefill)
        self.decode_time.observe(times.decode)
        self.inference_time.observe(times.inference)
        self.e2e_latency.observe(times.total)
        if longest > 1:
            self.time_per_output_token.observe(times.decode / (longest - 1))

    def collect(self) -> Iterator[Metric]:
        for family in COUNTERS:
            yield from self._families(CounterMetricFamily, family)
        for family in GAUGES:
            yield from self._families(GaugeMetricFamily, family)
        yield from self._counted("request_success", "Finished requests.", "finished_reason", self._finished.totals())
        yield from self._counted(
            "admission_rejections", "Requests refused before the engine saw them.", "reason", self._rejections.totals()
        )
        positions = {str(place): float(count) for place, count in enumerate(self.stats.accepted_drafts_by_position)}
        yield from self._counted(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were the sequences' own tokens, by place behind the known token.",
            "position",
            positions,
        )
        yield from self._families(CounterMetricFamily, _tool_readings(self._tool_readings.totals()))
        asleep = self._sleep_level()
        states = {state: float(level == asleep) for level, state in enumerate(SLEEP_STATES)}
        yield from self._gauges("engine_sleep_state", "1 for the state that the engine is in.", "sleep_state", states)
        yield from self._info()
        if self.stats.num_adapter_slots:
            yield from self._adapters()
        for name, histogram in self._histograms.items():
            for prefix in self.names.prefixes(is_vllm=True):
                yield histogram.family(prefix + name, self._labels)

    def _families(
        self, kind: type[CounterMetricFamily] | type[GaugeMetricFamily], family: MetricFamily
    ) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        labels, values = [*self._labels, *family.labels], list(self._labels.values())
        rows = [([*values, *row.labels], row.read(self.stats)) for row in family.rows]
        for prefix in self.names.prefixes(is_vllm=family.is_vllm):
            metric = kind(prefix + family.name, family.help, labels=labels)
            for row, value in rows:
                metric.add_metric(row, value)
            yield metric

    def _counted(self, name: str, help: str, label: str, counts: Mapping[str, float]) -> Iterator[Metric]:
        yield from self._families(CounterMetricFamily, _family(name, help, label, counts))

    def _gauges(self, name: str, help: str, label: str, values: Mapping[str, float]) -> Iterator[Metric]:
        yield from self._families(GaugeMetricFamily, _family(name, help, label, values))

    def _adapters(self) -> Iterator[Metric]:
        stats = self.stats
        labels = {
            "max_lora": str(stats.max_running_adapters),
            "waiting_lora_adapters": ",".join(stats.waiting_adapters),
            "running_lora_adapters": ",".join(stats.running_adapters),
        }
        row = Row(tuple(labels.values()), _constant(time.time()))
        help = "Adapters of running and of waiting requests; the value is the time."
        yield from self._families(
            GaugeMetricFamily, MetricFamily("lora_requests_info", help, (row,), is_vllm=True, labels=tuple(labels))
        )

    def _info(self) -> Iterator[Metric]:
        stats = self.stats
        sizes = {
            "block_size": stats.block_size,
            "num_gpu_blocks": stats.num_blocks,
            "kv_cache_size_tokens": stats.block_size * stats.num_blocks,
        }
        labels = {**self._cache_config, **{name: str(size) for name, size in sizes.items()}}
        row = Row(tuple(labels.values()), _constant(1.0))
        family = MetricFamily("cache_config_info", "Shape of the KV cache.", (row,), is_vllm=True, labels=tuple(labels))
        yield from self._families(GaugeMetricFamily, family)


def _family(name: str, help: str, label: str, values: Mapping[str, float]) -> MetricFamily:
    rows = tuple(Row((key,), _constant(value)) for key, value in values.items())
    return MetricFamily(name, help, rows, is_vllm=True, labels=(label,))


def _tool_readings(counts: Mapping[ToolReading, float]) -> MetricFamily:
    help = "Looks of the tool parser at answers: one for a choice, of a stream one for a piece."
    rows = tuple(Row(reading, _constant(count)) for reading, count in counts.items())
    return MetricFamily("tool_call_parser_invocations", help, rows, is_vllm=True, labels=ToolReading._fields)


def _constant(value: float) -> Read:
    return lambda stats: value


class Histogram:
    """Histogram with one binary search per observation of equal values. Not synchronized: one thread of a process
    observes.

    help: description. buckets: ascending upper bounds, without infinity. numbers: see EngineMetrics.
    """

    def __init__(self, help: str, buckets: Sequence[float], numbers: Numbers | None = None) -> None:
        self.help = help
        self.buckets = tuple(buckets)
        self._cells = (numbers or Numbers.alone()).allocate(len(self.buckets) + 2)
        """Counts of all buckets and infinity, then the sum."""
        self._own = self._cells.own

    @property
    def count(self) -> int:
        return int(sum(self._cells.totals()[:-1]))

    @property
    def sum(self) -> float:
        return self._cells.total(-1)

    def observe(self, value: float, times: int = 1) -> None:
        self._own[bisect_left(self.buckets, value)] += times
        self._own[-1] += value * times

    def add_to_sum(self, value: float) -> None:
        """Add a late part of an earlier observation to the sum."""
        self._own[-1] += value

    def family(self, name: str, labels: dict[str, str]) -> HistogramMetricFamily:
        """Exposition as `name` for a scrape, with cumulative counts."""
        family = HistogramMetricFamily(name, self.help, labels=list(labels))
        *counts, sum_value = self._cells.totals()
        cumulative, rows = 0.0, []
        for bound, count in zip((*map(_bound, self.buckets), "+Inf"), counts, strict=True):
            cumulative += count
            rows.append((bound, cumulative))
        family.add_metric(list(labels.values()), buckets=rows, sum_value=sum_value)
        return family


class StepTokens:
    """Histogram of tokens per step, from snapshots. As in vLLM, it counts computed prompt tokens when their requests
    start, and generated tokens."""

    def __init__(self, numbers: Numbers) -> None:
        self.histogram = Histogram(*histograms(1)[STEP_TOKENS], numbers)
        self._before = EngineStats()

    def record(self, stats: EngineStats) -> None:
        """Take a snapshot. Several steps since the last one count as their mean."""
        num_steps = stats.steps_total - self._before.steps_total
        num_tokens = _num_iteration_tokens(stats) - _num_iteration_tokens(self._before)
        if num_steps > 0:
            self.histogram.observe(num_tokens / num_steps, num_steps)
        else:
            self.histogram.add_to_sum(num_tokens)
        self._before = stats


def _num_iteration_tokens(stats: EngineStats) -> float:
    return local_compute(stats) + stats.generation_tokens_total


class Counts(Generic[Name]):
    def __init__(self, names: Sequence[Name], numbers: Numbers) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._cells = numbers.allocate(len(names))

    def count(self, name: Name) -> None:
        self._cells.own[self._places[name]] += 1

    def totals(self) -> dict[Name, float]:
        return dict(zip(self._places, self._cells.totals(), strict=True))


class ProcessMetrics(Collector):
    """System metrics of several processes (processor time, memory, open files), summed; the start time is the
    earliest."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._pids = pids

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for pid in self._pids():
            for metric in ProcessCollector(pid=partial(int, pid), registry=None).collect():
                if (total := found.setdefault(metric.name, metric)) is metric:
                    continue
                merge = min if metric.name == "process_start_time_seconds" else add
                pairs = zip(total.samples, metric.samples, strict=True)
                total.samples = [one._replace(value=merge(one.value, other.value)) for one, other in pairs]
        yield from found.values()


def _bound(value: float) -> str:
    return repr(float(value))
