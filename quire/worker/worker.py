"""One worker: a device's share of the model and of the KV cache, driven by an executor. Life cycle: load, profile
(unless the pool's size is given), allocate, launch ..., sleep, wake up, close."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from quire.config.engine import EngineConfig
from quire.errors import QuireError, is_interrupt
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import MemoryProfile
from quire.kv_cache.spec import LayerSpec, layer_specs
from quire.kv_cache.stage_layout import layout_of_stage
from quire.models.interface import CausalLM
from quire.sampling.parameters import SamplingRows
from quire.sampling.processors import make_processors
from quire.scheduler.preemption import PreemptionCosts
from quire.step import SamplingInputs, StepPlan, StepResult
from quire.utils.sizes import format_bytes
from quire.worker.adapters import AdapterLoads, NoAdapterLoads, adapter_loads
from quire.worker.block_tables import BlockTables, table_shapes
from quire.worker.columns import STEP_COLUMNS, Column, ColumnValues
from quire.worker.images import ImageOverlays
from quire.worker.kv_connector.cache_directory import require_writable
from quire.worker.kv_connector.interface import NoWorkerConnector, WorkerConnector
from quire.worker.kv_connector.offload import offload_worker
from quire.worker.kv_transfer import BlockTransfers, NoTransfers
from quire.worker.load_progress import LoadProgress
from quire.worker.memory_profile import draft_memory, measure_memory
from quire.worker.model_drafts import MOST_BEHIND
from quire.worker.model_runner import Launched, ModelRunner
from quire.worker.overlays import OverlaySource
from quire.worker.pending_step import PendingStep
from quire.worker.platform.interface import HostBlockTensors, Platform, StepLimits
from quire.worker.platform.weight_offload import DeviceWeights
from quire.worker.preemption_costs import time_copies, time_prompt
from quire.worker.request_state import RequestState

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _computes(
    method: Callable[Concatenate[Worker, Arguments], Result],
) -> Callable[Concatenate[Worker, Arguments], Result]:
    """Run a method in the platform's context, for any calling thread."""

    def call(self: Worker, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if self.platform.is_computing():
            return method(self, *args, **kwargs)
        with self.platform.computing():
            return method(self, *args, **kwargs)

    return call


class Worker:
    """One rank's worker, called by its executor: owns the model, the pools and the request state."""

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        columns: Sequence[Column] = STEP_COLUMNS,
        overlays: OverlaySource | None = None,
    ) -> None:
        """columns: known step columns. overlays: source of rows over tokens' embeddings (None: none)."""
        self.platform = platform
        self._overlays = overlays
        self._images: ImageOverlays | None = None
        self._columns = columns
        self._config = config
        self._model: CausalLM | None = None
        self._offloaded: DeviceWeights | None = None
        self._host_pool: HostBlockTensors | None = None
        self._runner: ModelRunner | None = None
        self._layout: KVCacheLayout | None = None
        self._transfers: BlockTransfers = NoTransfers()
        self._connector: WorkerConnector = NoWorkerConnector()
        self._last: PendingStep | None = None
        self._adapters: AdapterLoads | NoAdapterLoads = NoAdapterLoads()

    @_computes
    def load_model(self) -> list[LayerSpec]:
        """Load the model, with a progress bar; returns the KV-cache spec of each layer. Raises ModelLoadError or
        InsufficientMemoryError."""
        if self._config.cache.offload_dir is not None:
            require_writable(self._config.cache.offload_dir)  # fail before loading, which takes minutes
        if self.platform.expert_counts is not None:
            self.platform.expert_counts.by_layer.clear()  # of a model that was dropped
        with LoadProgress() as progress:
            model = self.platform.load_model(progress)
        self._adapters = adapter_loads(self.platform.adapters)
        images = self.platform.load_images()
        if images is not None:
            self._overlays = self._images = images
        self._model = model  # last: a call that failed is made anew
        draft, chosen = self.platform.draft_model, self._config.speculation.draft_model
        if draft is not None:
            return [*model.cache_specs(), *draft.model.cache_specs()]
        if chosen is None or chosen.model is None:
            return model.cache_specs()
        return [*model.cache_specs(), *layer_specs(chosen.model, chosen.num_ranks or 1)]  # the last stage has it

    @_computes
    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        """Measure available memory and the largest step. Raises InsufficientMemoryError."""
        assert self._model is not None, "load comes before profile"
        longest = self._config.model.max_model_len
        limits = StepLimits(
            self._config.cache.block_size,
            max_num_batched_tokens,
            max_num_seqs,
            longest,
            self._config.speculation.max_drafts,
        )
        profile = measure_memory(self._model, self._config.model, limits, self.platform.meter())
        profile = replace(profile, weights=profile.weights + self._adapters.reserved_bytes())
        draft = self.platform.draft_model
        if draft is not None:
            num_tokens = max_num_batched_tokens + max_num_seqs * MOST_BEHIND
            limits = StepLimits(limits.block_size, num_tokens, max_num_seqs, draft.config.max_model_len)
            more = draft_memory(draft, limits)
            activations, weights = profile.activations + more.activations, profile.weights + more.weights
            profile = replace(profile, activations=activations, weights=weights)
            if profile.device is not None and more.device is not None:
                graphs = profile.device.graphs + more.device.graphs
                profile = replace(profile, device=replace(profile.device, graphs=graphs))
        if self._images is None:
            return profile
        kept, weights = self._images.working_bytes(longest), self._images.weight_bytes()
        return replace(profile, activations=profile.activations + kept, weights=profile.weights + weights)

    @_computes
    def allocate(self, layout: KVCacheLayout) -> None:
        """Allocate the pools and an empty request state. Raises InsufficientMemoryError."""
        assert self._model is not None, "load comes before allocate"
        config, model, num_rows = self._config, self._config.model, self._config.scheduler.max_num_seqs
        stage = self.platform.stage
        if stage.count > 1:
            layout = layout_of_stage(layout, stage.layers, is_last=stage.is_last)
        pages = self.platform.allocate_pages(layout)
        if layout.num_host_blocks:
            self._host_pool = self.platform.allocate_host_pool(layout)
            self._transfers = self.platform.make_transfers(pages, self._host_pool)
            if config.cache.offload_dir is not None:
                code, host_pages = self.platform.code_identity(), self._host_pool.pages
                self._connector = offload_worker(config, layout, code, host_pages, self._transfers)
        tables = BlockTables(table_shapes(layout, self.platform.deal), num_rows, model.max_model_len)
        sampling = SamplingRows(num_rows, make_processors(config))
        values = ColumnValues(self._columns, self._model.columns, num_rows)
        compute = self.platform.make_compute(self._model, layout, pages, tables, sampling, values)
        requests = RequestState(tables, sampling, compute.columns)
        self._layout = layout
        self._runner = ModelRunner(compute, requests, self._transfers, model.vocab_size, model.pooling, self._overlays)
        self._runner.warm_up()
        self.platform.synchronize()
        self._forget_expert_counts()
        if self.platform.balancer is not None:
            self.platform.balancer.begin()

    @_computes
    def measure_preemption_costs(self) -> PreemptionCosts:
        """Time block copies and prompt computation. Overwrites the pools, so call it before any plan."""
        assert self._model is not None, "load_model comes first"
        assert self._layout is not None, "allocate comes first"
        scheduler = self._config.scheduler
        longest = self._config.model.max_model_len
        limits = StepLimits(self._layout.block_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs, longest)
        seconds_per_token = time_prompt(self._model, limits, self.platform.meter(), self.platform.synchronize)
        self._forget_expert_counts()
        seconds_per_token /= self._config.parallel.pcp  # the pass is a whole one, and ranks share prompts
        return PreemptionCosts(time_copies(self._transfers, self._layout), seconds_per_token)

    @_computes
    def expert_counts(self) -> list[list[int]]:
        """Rows computed per layer and expert; see `Executor.expert_counts`."""
        self.platform.synchronize()
        counters = self.platform.expert_counts
        return [] if counters is None else [counts.tolist() for counts in counters.by_layer]

    @_computes
    def expert_ranks(self) -> list[list[list[int]]]:
        """Experts on each rank, per layer; see `Executor.expert_ranks`."""
        balancer = self.platform.balancer
        return [] if balancer is None else [[sorted(rank) for rank in each.placement] for each in balancer.layers]

    def _forget_expert_counts(self) -> None:
        counters = self.platform.expert_counts
        for counts in () if counters is None else counters.by_layer:
            counts.zero_()

    def describe_backend(self) -> str:
        """One line for users: kernels, device, formats and, once loaded, the bytes of weights."""
        described, draft = self.platform.describe(), self.platform.draft_model
        if self._model is not None:
            described += f", {format_bytes(self._model.weight_bytes())} of weights"
        if draft is not None and draft.is_apart:
            described += f", {format_bytes(draft.model.weight_bytes())} of a draft model's"
        return described

    @_computes
    def idle(self) -> bool:
        """Capture one more CUDA graph while no plan is outstanding; returns whether one was left."""
        return self._runner is not None and self._runner.capture_next()

    @_computes
    def launch(self, plan: StepPlan) -> PendingStep:
        """Start one plan. After an error the request state is undefined, and every later plan fails. Raises
        interrupts."""
        previous = self._last
        if previous is not None and previous.has_failed:
            refusal = QuireError(f"step {plan.step_id} was not run, because an earlier step failed")
            return PendingStep(plan.step_id, None, None, refusal)
        try:
            if plan.is_dummy:
                return self._join_step(plan.step_id)
            self._connector.begin_plan(plan)
            self._adapters.begin_plan(plan)
            if self.platform.balancer is not None and plan.seq_ids:
                self.platform.balancer.before_step(self._adapters.end_loads)
            assert self._runner is not None, "allocate comes before launch"
            if self.platform.exchange is not None and plan.seq_ids:
                self.platform.exchange.begin_step()
            launched = self._runner.launch(plan)
        except BaseException as error:
            self._last = PendingStep(plan.step_id, None, None, error)
            if is_interrupt(error):
                raise
        else:
            self._last = PendingStep(plan.step_id, partial(self._collect, launched), previous)
        return self._last

    def _join_step(self, step_id: int) -> PendingStep:
        assert self.platform.exchange is not None, "replicas share experts"
        self.platform.exchange.join_step()
        self._last = PendingStep(step_id, partial(StepResult, step_id, []), self._last)
        return self._last

    @_computes
    def send_sampling_inputs(self, inputs: SamplingInputs) -> None:
        """Sample the last launched step, which awaits these masks. Errors go to the step; interrupts are raised."""
        assert self._runner is not None, "allocate comes before launch"
        if self._last is not None and not self._last.has_failed:
            self._runner.sample(inputs)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @_computes
    def sleep(self, level: int) -> None:
        """Free the pools, captured graphs, and device memory of the weights: level 1 moves them to the host, level 2
        drops them. Blocks on disk stay. Raises InsufficientMemoryError with nothing changed if the host lacks
        memory."""
        assert self._model is not None, "load comes before sleep"
        self.platform.synchronize()
        if level == 1 and self._offloaded is None:
            encoder = None if self._images is None else self._images.encoder
            self._offloaded = self.platform.offload_weights(self._model, encoder)  # first: the host may lack memory
        self._connector.close()
        self._last = None
        self._release_pools()
        self._model.release_workspaces()
        if self.platform.exchange is not None:
            self.platform.exchange.release_workspaces()
        if self.platform.draft_model is not None:
            self.platform.draft_model.model.release_workspaces()
        if self._images is not None:
            self._images.release_workspaces()
        if level == 2:
            if self._images is not None:
                self._images = self._overlays = None
            self._model = self.platform.draft_model = None
            self._drop_offloaded()
            self._adapters.close()
            self._adapters = NoAdapterLoads()
        gc.collect()  # objects in reference cycles would keep their memory mapped
        self.platform.release_reserve()

    @_computes
    def wake_weights(self) -> None:
        """Copy or load the weights back. Raises ModelLoadError or InsufficientMemoryError."""
        self._wake_weights()

    def _wake_weights(self) -> None:
        if self._model is None:
            self.load_model()
        elif self._offloaded is not None:
            self._offloaded.restore()
            self._drop_offloaded()

    @_computes
    def wake_up(self) -> None:
        """Restore the weights if needed, and allocate the pools. Raises ModelLoadError or InsufficientMemoryError."""
        assert self._layout is not None, "allocate comes before sleep"
        self._wake_weights()
        try:
            self.allocate(self._layout)
        except BaseException:
            self._release_pools()  # the next call allocates everything again
            raise

    def close(self) -> None:
        """Wait for started plans and the KV connector's stores; no plan may follow. Idempotent."""
        self.platform.synchronize()
        self._connector.close()
        self._adapters.close()
        self._last = None
        self._release_pools()
        self._drop_offloaded()

    def _collect(self, launched: Launched) -> StepResult:
        result = launched.collect()
        result.transfers = self._connector.end_plan(launched.plan)
        result.adapters = self._adapters.end_plan(launched.plan)
        if self._images is not None and launched.plan.images is not None:
            result.encoder_seconds = self._images.take_seconds()
        return result

    def _drop_offloaded(self) -> None:
        if self._offloaded is not None:
            self._offloaded.close()
            self._offloaded = None

    def _release_pools(self) -> None:
        self._runner = None
        self._transfers, self._connector = NoTransfers(), NoWorkerConnector()
        if self._host_pool is not None:
            self._host_pool.close()
            self._host_pool = None
