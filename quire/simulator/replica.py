from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

from quire.clock import Clock, VirtualClock
from quire.config.adapters import NO_ADAPTERS, AdaptersConfig
from quire.config.cache import SNAPSHOT_INTERVAL, CacheConfig
from quire.config.device import DeviceConfig
from quire.config.engine import EngineConfig
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.config.model_shape import ModelShape
from quire.config.scheduler import SchedulerConfig
from quire.config.speculation import SpeculationConfig
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest
from quire.errors import ConfigError, UserError
from quire.executors.interface import Executor
from quire.outputs import SequenceUpdate
from quire.prompt_image import PromptImage
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.scheduler.interface import paged_scheduler
from quire.simulator.adapters import AdapterWork, adapter_ref, reserved_bytes
from quire.simulator.cost import CostModel
from quire.simulator.drafts import NO_DRAFTS, DraftWork, SimulatedDrafts
from quire.simulator.executor import SimulatedExecutor
from quire.simulator.memory import check_pool, kv_cache_bytes, most_useful_bytes, pool_bytes
from quire.simulator.metrics import Metrics, Moments
from quire.simulator.tokens import prompt_tokens
from quire.simulator.tower import placed, with_images
from quire.simulator.trace import TraceRequest

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 8192
GPU_MEMORY_UTILIZATION = 0.9
SWAP_SPACE = 4 * 2**30

SIMULATED = "simulated"
"""Architecture of models of which only the shape is known."""

MakeCore = Callable[[EngineConfig, Executor, Clock], EngineCore]
MakeExecutor = Callable[[CostModel, VirtualClock, int], Executor]


@dataclass(frozen=True)
class Record:
    """Ended request, for metrics; times in seconds of the virtual clock. num_tokens: tokens of the longest sequence.
    num_generated: tokens of all sequences. num_cached: prompt tokens found in the prefix cache."""

    request: TraceRequest
    number: int
    first_token: float
    finish: float
    num_tokens: int
    num_generated: int
    num_cached: int
    num_preemptions: int
    is_loaded: bool = True
    """False if its adapter was in no slot when it arrived."""

    @property
    def ttft(self) -> float:
        return self.first_token - self.request.arrival

    @property
    def loading_ttft(self) -> float | None:
        return None if self.is_loaded else self.ttft

    @property
    def latency(self) -> float:
        return self.finish - self.request.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first. None for a single token, and for a beam search."""
        if self.num_tokens < 2 or self.request.beam_width:
            return None
        return (self.finish - self.first_token) / (self.num_tokens - 1)

    @property
    def normalized_latency(self) -> float:
        return self.latency / max(1, self.num_tokens)


@dataclass(frozen=True)
class EngineSettings:
    """EngineOptions that affect scheduling, with a GPU's defaults. kv_cache_memory: bytes on each device; None:
    gpu_memory_utilization of its memory, less weights and activations. swap_space: host bytes for each device. seed:
    of the device's jitter. adapter_load_seconds: None: over PCIe."""

    max_model_len: int | None = None
    block_size: int = 16
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    max_prefill_chunk: int | None = None
    queue_depth: int = 2
    scheduling_policy: str = "fcfs"
    priority_seconds: float = 10.0
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    num_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    state_snapshot_interval: int = SNAPSHOT_INTERVAL
    preemption_mode: str = "recompute"
    swap_space: int = SWAP_SPACE
    seed: int = 0
    adapters: AdaptersConfig = NO_ADAPTERS
    adapter_load_seconds: float | None = None
    drafts: SimulatedDrafts = NO_DRAFTS

    def config(self, cost: CostModel) -> EngineConfig:
        """Engine's configuration for a model's shape. Raises InsufficientMemoryError when it does not fit,
        ConfigError for a max_model_len above the model's."""
        shape = cost.shape
        longest = self.max_model_len or shape.max_model_len
        if longest > shape.max_model_len:
            raise ConfigError(
                f"max_model_len ({longest}) exceeds the {shape.max_model_len} positions of {shape.name}",
                param="max_model_len",
            )
        return EngineConfig(
            model=_model_config(shape, longest, cost),
            cache=CacheConfig(
                block_size=self.block_size,
                memory=self._kv_memory(cost, longest),
                memory_utilization=self.gpu_memory_utilization,
                num_blocks_override=self.num_blocks_override,
                enable_prefix_caching=self.enable_prefix_caching,
                state_snapshot_interval=self.state_snapshot_interval,
                swap_space=0 if self.preemption_mode == "recompute" else self.swap_space,
            ),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=max(self.max_num_batched_tokens, self.max_num_seqs),
                max_num_seqs=self.max_num_seqs,
                max_prefill_chunk=self.max_prefill_chunk,
                queue_depth=self.queue_depth,
                scheduling_policy=self.scheduling_policy,
                priority_seconds=self.priority_seconds,
                preemption_mode=self.preemption_mode,
            ),
            load=LoadConfig(load_format="dummy", seed=0),
            device=DeviceConfig(device="simulated", num_threads=1, attention_backend="torch"),
            seed=0,
            adapters=self.adapters_of(cost),
            speculation=SpeculationConfig(self.drafts.max_drafts, adapts=self.drafts.adapts),
        )

    def adapters_of(self, cost: CostModel) -> AdaptersConfig:
        return replace(self.adapters, dtype=cost.precision.activations)

    def _kv_memory(self, cost: CostModel, longest: int) -> int | None:
        given = self.kv_cache_memory
        if self.num_blocks_override is not None:
            check_pool(cost, pool_bytes(cost, self.num_blocks_override, self.block_size))
            return given
        if given is not None:
            check_pool(cost, given)
            return given
        left = kv_cache_bytes(
            cost,
            utilization=self.gpu_memory_utilization,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            adapters=reserved_bytes(cost, self.adapters_of(cost)),
        )
        return min(
            left, most_useful_bytes(cost, self.max_num_seqs, longest, self.block_size, self.state_snapshot_interval)
        )


def _model_config(shape: ModelShape, max_model_len: int, cost: CostModel) -> ModelConfig:
    return ModelConfig(
        name=shape.name,
        path=Path(shape.name),
        architecture=SIMULATED,
        shape=shape,
        dtype=cost.precision.activations,
        kv_cache_dtype=cost.precision.kv,
        max_model_len=max_model_len,
        eos_token_ids=(),
        hf=MappingProxyType({}),
    )


@dataclass(slots=True)
class _Live:
    request: TraceRequest
    number: int
    first_token: float = -1.0
    is_loaded: bool = True
    num_left: int = 1
    """Sequences that have not ended."""


@dataclass(frozen=True)
class Observer:
    on_record: Callable[[Record], None] | None = None
    on_refusal: Callable[[TraceRequest, str], None] | None = None
    """Called for a refused request, with the reason."""
    on_step: Callable[[EngineCore, float], None] | None = None
    """Called after every step with the core and the step's seconds. Slows a run."""


class Replica:
    """Engine core that gets requests in the order of arrival and runs up to a given moment."""

    def __init__(
        self,
        cost: CostModel,
        settings: EngineSettings,
        *,
        make_core: MakeCore = EngineCore,
        make_executor: MakeExecutor | None = None,
        objectives: Mapping[str, float] = MappingProxyType({}),
        observer: Observer | None = None,
    ) -> None:
        """Replica of `quire simulate`. make_core: makes the engine core (baselines have another scheduler). objectives:
        names of LATENCIES -> seconds, for `num_slo_met`. Raises InsufficientMemoryError when the model does not fit."""
        self.clock = VirtualClock()
        self._adapters: AdapterWork | None = None
        if settings.adapters.is_on:
            self._adapters = AdapterWork(cost, settings.adapters_of(cost), settings.adapter_load_seconds)
        if make_executor is None:
            drafts = DraftWork(settings.drafts, settings.seed) if settings.drafts.max_drafts else None
            self.executor: Executor = SimulatedExecutor(
                cost,
                self.clock,
                queue_depth=settings.queue_depth,
                seed=settings.seed,
                adapters=self._adapters,
                drafts=drafts,
            )
        else:
            self.executor = make_executor(cost, self.clock, settings.queue_depth)
        self._tower = cost.tower if make_core is EngineCore else None
        if self._tower is not None:
            make_core = partial(EngineCore, make_scheduler=partial(paged_scheduler, encoder=self._tower.costs))
        config = settings.config(cost)
        self._max_num_tokens = config.scheduler.max_num_batched_tokens - config.scheduler.max_num_seqs
        self.core = make_core(config, self.executor, self.clock)
        self.metrics = Metrics(num_blocks=self.core.ready.num_blocks)
        self._max_model_len = self.core.ready.max_model_len
        self._takes_priorities = settings.scheduling_policy == "priority"
        self._objectives = dict(objectives)
        self._observer = observer or Observer()
        self._live: dict[str, _Live] = {}
        self._num_offered = 0
        self._load = self.core.scheduler.current_load()

    # -- running ----------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self._live)

    def serve_trace(self, requests: Iterable[TraceRequest]) -> Metrics:
        for request in requests:
            self.advance(request.arrival)
            self.offer(request)
        self.advance(float("inf"))
        return self.finish_run()

    def advance(self, until: float) -> None:
        """Make steps until the clock reaches `until` (the last step may pass it) or no work is left; then set a clock
        that is behind to it."""
        clock, core = self.clock, self.core
        while clock.now() < until and core.has_work:
            self.step()
        if clock.now() < until < float("inf"):
            clock.advance(until - clock.now())

    def offer(self, request: TraceRequest) -> None:
        """Add an arriving request. The clock may be past its arrival by a step's rest."""
        number = self._num_offered
        self._num_offered = number + 1
        self.metrics.num_requests += 1
        name = str(number)
        self._live[name] = live = _Live(request, number, num_left=request.num_sequences)
        max_tokens = min(request.output_tokens, self._max_model_len - request.input_tokens)
        if max_tokens < 1:
            self._refuse(name, f"{request.input_tokens} tokens exceed the longest sequence, {self._max_model_len}")
            return
        tokens = prompt_tokens(number, request.input_tokens, request.prefix_group, request.prefix_tokens)
        adapter = None if request.adapter is None else adapter_ref(request.adapter)
        if adapter is not None:
            if self._adapters is None:
                raise UserError("adapters need --enable-lora", param="enable_lora")
            self.metrics.num_adapted += 1
            live.is_loaded = self._adapters.holds(adapter)
        self.core.handle(
            AddRequest(
                EngineRequest(
                    request_id=name,
                    prompt_token_ids=with_images(number, tokens, request),
                    images=self._images(number, request),
                    params=_params(request.n, request.beam_width),
                    max_tokens=max_tokens,
                    seed=number,
                    priority=self._priority(request),
                    adapter=adapter,
                )
            )
        )

    def _images(self, number: int, request: TraceRequest) -> list[PromptImage]:
        if not request.images:
            return []
        if self._tower is None:
            raise UserError("images need a model with a vision tower and Quire's scheduler", param="trace")
        found = placed(number, request, self._tower)
        if found[0].is_whole and found[0].num_tokens >= self._max_num_tokens:
            raise UserError(f"images of {found[0].num_tokens} tokens exceed max_num_batched_tokens", param="trace")
        return found

    def _priority(self, request: TraceRequest) -> int:
        if self._takes_priorities or not request.priority:
            return request.priority
        self.metrics.num_priorities_ignored += 1
        return 0

    def finish_run(self) -> Metrics:
        """Metrics, after a check that no request and no block is left."""
        stats = self.core.stats()
        assert not self._live, f"{len(self._live)} requests never ended"
        assert stats.num_used_blocks == stats.num_registered_blocks == 0, "blocks are in use, and no request is here"
        self.core.scheduler.check()
        self.core.shutdown()
        metrics = self.metrics
        metrics.stats = stats
        metrics.num_steps = stats.steps_total
        if isinstance(self.executor, SimulatedExecutor):
            metrics.busy_seconds = self.executor.busy_seconds
        return metrics

    # -- parts ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Do one engine-core step; record outputs and state."""
        started = self.clock.now()
        outputs = self.core.step()
        now = self.clock.now()
        num_tokens = self._take(outputs.updates, now)
        for rejected in outputs.rejections:
            self._refuse(rejected.request_id, rejected.message)
        load, last = self.core.scheduler.current_load(), self._load
        seconds, metrics = now - started, self.metrics
        if seconds:
            running, used_blocks = seconds * load.num_running, seconds * load.num_used_blocks
            metrics.step_seconds += seconds
            metrics.running_seconds += running
            metrics.kv_seconds += used_blocks / metrics.num_blocks
            metrics.series.add_span(
                started,
                Moments(
                    seconds,
                    running,
                    seconds * load.num_waiting,
                    used_blocks,
                    load.preemptions_total - last.preemptions_total,
                    num_tokens,
                ),
            )
        self._load = load
        if self._observer.on_step is not None:
            self._observer.on_step(self.core, seconds)

    def _take(self, updates: list[SequenceUpdate], now: float) -> int:
        num_tokens = len(updates)
        for update in updates:
            num_tokens += len(update.new_token_ids) - 1
            if update.timing is None:
                continue
            live = self._live[update.request_id]
            if live.first_token < 0:
                live.first_token = now
            if update.finish_reason is not None:
                live.num_left -= 1
                if not live.num_left:
                    self._end(live, update, now)
        return num_tokens

    def _end(self, live: _Live, update: SequenceUpdate, now: float) -> None:
        request, metrics = live.request, self.metrics
        del self._live[update.request_id]
        num_tokens = min(request.output_tokens, self._max_model_len - request.input_tokens)
        timing = update.timing
        record = Record(
            request=request,
            number=live.number,
            first_token=live.first_token,
            finish=now,
            num_tokens=num_tokens,
            num_generated=num_tokens * request.num_sequences,
            num_cached=update.num_cached_tokens,
            num_preemptions=0 if timing is None else timing.num_preemptions,
            is_loaded=live.is_loaded,
        )
        metrics.num_finished += 1
        metrics.num_input_tokens += request.input_tokens
        metrics.num_output_tokens += record.num_generated
        metrics.end = now
        is_good = True
        for name, distribution in metrics.latencies.items():
            value = getattr(record, name)
            if value is not None:
                distribution.add_value(value)
                is_good = is_good and value <= self._objectives.get(name, value)
        metrics.num_slo_met += is_good
        if self._observer.on_record is not None:
            self._observer.on_record(record)

    def _refuse(self, name: str, message: str) -> None:
        live = self._live.pop(name)
        self.metrics.num_refused += 1
        if self._observer.on_refusal is not None:
            self._observer.on_refusal(live.request, message)


def simulate(
    requests: Iterable[TraceRequest],
    cost: CostModel,
    settings: EngineSettings | None = None,
    *,
    make_core: MakeCore = EngineCore,
    objectives: Mapping[str, float] = MappingProxyType({}),
    observer: Observer | None = None,
) -> Metrics:
    """Serve a trace by one replica. Raises InsufficientMemoryError when the model does not fit."""
    replica = Replica(cost, settings or EngineSettings(), make_core=make_core, objectives=objectives, observer=observer)
    return replica.serve_trace(requests)


@cache
def _params(n: int, beam_width: int) -> SamplingParams:
    if beam_width:
        return SamplingParams(n=beam_width, use_beam_search=True, temperature=0.0, ignore_eos=True, detokenize=False)
    return SamplingParams(n=n, temperature=1.0, ignore_eos=True, detokenize=False)
