"""The worker of a GPU: the model and the KV cache are on the device, plans are enqueued, results are waited for
later."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import torch
import triton

from quire import envs
from quire.attention.triton_backend import TritonAttention
from quire.config.engine import EngineConfig
from quire.errors import QuireError
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.kernels.triton.block_copy import PageTable
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import MemoryProfile
from quire.kv_cache.spec import LayerSpec
from quire.layers.device import DeviceLayers
from quire.models.interface import CausalLM
from quire.models.loader import load_model
from quire.sampling.device.sampler import DeviceSampler
from quire.scheduler.preemption import PreemptionCosts
from quire.step import StepPlan, StepResult
from quire.worker.device.cuda_graphs import CudaGraphRunner, PassShape
from quire.worker.device.graph_capture import CudaGraphCapture, GraphCapture
from quire.worker.device.graph_dispatch import ExecutionSettings, execution_settings
from quire.worker.device.memory import HostPool, allocate_device_pages, arithmetic, make_memory
from quire.worker.device.pending import PendingStep, failed_step
from quire.worker.device.profile import StepLimits, profile_device, time_device_prompt
from quire.worker.device.runner import Collect, DeviceModelRunner
from quire.worker.device.state import StepState, make_state
from quire.worker.device.streams import make_streams
from quire.worker.device.transfers import StreamTransfers
from quire.worker.device.warm_up import warm_up, warm_up_attention, warm_up_plans
from quire.worker.device.weight_offload import OffloadedWeights
from quire.worker.kv_connector.block_file import BlockLayout
from quire.worker.kv_connector.cache_directory import require_writable
from quire.worker.kv_connector.cache_identity import cache_namespace, device_code
from quire.worker.kv_connector.disk_store import DiskStore
from quire.worker.kv_connector.interface import NoWorkerConnector, WorkerConnector, begin_plan, end_plan
from quire.worker.kv_connector.offload import HostBlocks, OffloadWorker
from quire.worker.kv_tensors import typed_pages
from quire.worker.kv_transfer import BlockTransfers, NoTransfers
from quire.worker.load_progress import LoadProgress
from quire.worker.preemption_costs import time_copies

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

INTERPRETED_MULTIPROCESSORS = 8


def _enqueues(
    method: Callable[Concatenate[DeviceWorker, Arguments], Result],
) -> Callable[Concatenate[DeviceWorker, Arguments], Result]:
    """Run a method of the worker in inference mode, on the compute stream of its device, whichever thread calls."""

    def call(self: DeviceWorker, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.inference_mode(), self.streams.computing():
            return method(self, *args, **kwargs)

    return call


class DeviceWorker:
    """Owns the model, the pools' tensors and the request state of a device. Life as the CPU's worker; `launch` takes
    the place of `execute`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.streams = make_streams(torch.device(config.device.device))
        self._memory = make_memory(self.streams.device)
        self._compiles = self.streams.device.type == "cuda"  # the interpreter does not
        if self._compiles:
            envs.keep_triton_cache()
        self._free_at_start = self._memory.free()
        self._model: CausalLM | None = None
        self._offloaded: OffloadedWeights | None = None
        self._host_pool: HostPool | None = None
        self._runner: DeviceModelRunner | None = None
        self._layout: KVCacheLayout | None = None
        self._transfers: BlockTransfers = NoTransfers()
        self._connector: WorkerConnector = NoWorkerConnector()
        self._last: PendingStep | None = None

    @_enqueues
    def load_model(self) -> list[LayerSpec]:
        """Load the model; return what each layer keeps in the KV cache. Raises ModelLoadError."""
        config = self._config
        if config.cache.offload_dir is not None:
            require_writable(config.cache.offload_dir)  # fails before minutes of loading
        layers = DeviceLayers(self.streams.device, config.device.batch_invariant)
        with LoadProgress() as progress, arithmetic(self._memory, f"the weights of {config.model.name}"):
            self._model = load_model(config.model, config.load, progress=progress, device_layers=layers)
        self.streams.synchronize()
        return self._model.kv_specs()

    @_enqueues
    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        """Measure what is free, and what the largest steps take. Raises InsufficientMemoryError."""
        assert self._model is not None, "load comes before profile"
        config = self._config
        return profile_device(
            self._model,
            self._make_backend,
            config.model,
            StepLimits(config.cache.block_size, max_num_batched_tokens, max_num_seqs, config.model.max_model_len),
            execution_settings(config.device, max_num_seqs),
            self._memory,
            self._free_at_start,
            self.streams.device,
        )

    @_enqueues
    def allocate(self, layout: KVCacheLayout) -> None:
        """Create the pools' tensors and an empty request state. Raises InsufficientMemoryError."""
        assert self._model is not None, "load comes before allocate"
        config = self._config
        model, scheduler = config.model, config.scheduler
        pages = allocate_device_pages(layout, self._memory, self.streams.device)
        if layout.num_host_blocks:
            self._host_pool = HostPool(layout, self._memory)
            self._transfers = StreamTransfers(self.streams, pages, self._host_pool.blocks)
            if config.cache.offload_dir is not None:
                self._connector = OffloadWorker(self._open_store(self._host_pool, layout), self._transfers)
        settings = execution_settings(config.device, scheduler.max_num_seqs)
        state = make_state(config, layout, settings, self.streams)
        sampler = DeviceSampler(state.requests.sampling)
        backend = self._make_backend(layout, pages)
        self._layout = layout
        self._runner = DeviceModelRunner(
            model=self._model,
            passes=self._make_passes(backend, settings),
            settings=settings,
            sampler=sampler,
            state=state,
            pages=PageTable.of_pages(pages),
            transfers=self._transfers,
            vocab_size=model.vocab_size,
        )
        if self._compiles:
            self._warm_up(self._runner, backend, sampler, state, layout)
            self._runner.capture_at_start()
        self.streams.synchronize()

    @_enqueues
    def measure_preemption_costs(self) -> PreemptionCosts:
        """Time copies between the pools and the computation of a prompt. Overwrites the pools: call it before any
        plan."""
        assert self._model is not None, "load_model comes first"
        assert self._layout is not None, "allocate comes first"
        scheduler, longest = self._config.scheduler, self._config.model.max_model_len
        limits = StepLimits(self._layout.block_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs, longest)
        seconds_per_token = time_device_prompt(
            self._model, self._make_backend, limits, self.streams.device, self.streams.synchronize
        )
        return PreemptionCosts(time_copies(self._transfers, self._layout), seconds_per_token)

    def describe_backend(self) -> str:
        """One line for users: kernels, device, formats of weights and KV cache, CUDA graphs."""
        model, device = self._config.model, self._config.device
        mode = "batch-invariant" if device.batch_invariant else "fastest"
        graphs = "no CUDA graphs" if device.cuda_graphs == "none" else f"CUDA graphs: {device.cuda_graphs}"
        where = device_name(self.streams.device)
        formats = f"{model.dtype} weights, {model.kv_cache_dtype} KV cache"
        return f"Triton kernels on {where}, {formats}, {mode} kernels, {graphs}"

    @_enqueues
    def idle(self) -> bool:
        """Capture one more CUDA graph, while no plan is outstanding; returns whether there was one left."""
        assert self._runner is not None, "allocate comes before idle"
        return self._runner.capture_next()

    @_enqueues
    def sleep(self, level: int) -> None:
        """Free the pools and the graphs captured over them, and the weights: level 1 moves them to the host, level 2
        drops them. Blocks on disk stay. Raises InsufficientMemoryError, without any change, when the host lacks the
        memory for the weights."""
        self.streams.synchronize()
        if level == 1 and self._offloaded is None:  # first, because it fails when the host lacks memory
            assert self._model is not None, "load comes before sleep"
            self._offloaded = OffloadedWeights(
                self._model, self.streams.device, self._model.weight_bytes(), self._memory
            )
            self._offloaded.release()
        self._connector.close()
        self._last = None
        self._release_pools()
        if level == 2:
            self._model = None
            self._drop_offloaded()
        gc.collect()
        self._memory.free()  # frees what torch keeps in reserve as well

    @_enqueues
    def wake_up(self) -> None:
        """Copy the weights back, or load them, and allocate the pools again. Raises ModelLoadError or
        InsufficientMemoryError."""
        assert self._layout is not None, "allocate comes before sleep"
        if self._model is None:
            self.load_model()
        elif self._offloaded is not None:
            with arithmetic(self._memory, "the weights of a sleeping model", self._offloaded.num_bytes):
                self._offloaded.restore()
            self._drop_offloaded()
        try:
            self.allocate(self._layout)
        except BaseException:
            self._release_pools()  # the next call makes all of it again
            raise

    @_enqueues
    def launch(self, plan: StepPlan) -> PendingStep:
        """Enqueue one plan; return the future of its result. After an error the request state is undefined, so every
        later plan fails as well."""
        assert self._runner is not None, "allocate comes before launch"
        previous = self._last
        if previous is not None and previous.has_failed:
            return failed_step(
                plan.step_id, QuireError(f"step {plan.step_id} was not run, because an earlier step failed")
            )
        try:
            begin_plan(self._connector, plan)
            collect = self._runner.launch(plan)
        except BaseException as error:
            self._last = failed_step(plan.step_id, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._last = PendingStep(plan.step_id, self._collecting(plan, collect), previous)
        return self._last

    def close(self) -> None:
        """Wait for the enqueued plans and the stores to disk. Idempotent."""
        self.streams.synchronize()
        self._connector.close()
        self._last = None
        self._release_pools()
        self._drop_offloaded()

    def _drop_offloaded(self) -> None:
        if self._offloaded is not None:
            self._offloaded.close()
            self._offloaded = None

    def _release_pools(self) -> None:
        """Free everything that holds keys and values."""
        self._runner = None
        self._transfers, self._connector = NoTransfers(), NoWorkerConnector()
        if self._host_pool is not None:
            self._host_pool.close()
            self._host_pool = None

    def _open_store(self, host: HostPool, layout: KVCacheLayout) -> DiskStore:
        config, device = self._config, self.streams.device
        assert config.cache.offload_dir is not None
        code = device_code(device_name(device), device_limits(device).capability, triton.__version__)
        namespace = cache_namespace(config.model, config.load, config.device, layout, code)
        files = BlockLayout(namespace, layout.layers_per_group, layout.block_bytes // layout.layers_per_group)
        return DiskStore(config.cache.offload_dir, config.cache.offload_size, files, HostBlocks(host.pages))

    def _warm_up(
        self,
        runner: DeviceModelRunner,
        backend: TritonAttention,
        sampler: DeviceSampler,
        state: StepState,
        layout: KVCacheLayout,
    ) -> None:
        assert self._model is not None, "load comes before allocate"
        model, scheduler = self._config.model, self._config.scheduler
        longest, max_num_tokens = model.max_model_len, scheduler.max_num_batched_tokens
        if scheduler.max_num_seqs > 1:
            warm_up_attention(self._model, backend, state.inputs, longest, max_num_tokens)
        plans = warm_up_plans(layout, scheduler.max_num_seqs, longest, max_num_tokens)
        hidden = torch.zeros(2, self._model.output_size, dtype=getattr(torch, model.dtype), device=self.streams.device)
        warm_up(runner, sampler, state, plans, self._model.compute_logits(hidden))

    def _make_backend(self, layout: KVCacheLayout, pages: Sequence[torch.Tensor]) -> TritonAttention:
        config = self._config
        model = config.model
        return TritonAttention(
            layout,
            typed_pages(pages, layout, getattr(torch, model.kv_cache_dtype)),
            device_limits(self.streams.device),
            num_heads=model.num_heads,
            dtype=getattr(torch, model.dtype),
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=model.max_model_len + 1,
            batch_invariant=config.device.batch_invariant,
        )

    def _make_passes(self, backend: TritonAttention, settings: ExecutionSettings) -> CudaGraphRunner:
        assert self._model is not None, "load comes before allocate"
        model = self._config.model
        shape = PassShape(
            attention_size=model.num_heads * model.head_dim,
            longest=model.max_model_len + 1,
            dtype=getattr(torch, model.dtype),
            device=self.streams.device,
        )
        has_graphs = bool(settings.full_sizes or settings.piecewise_sizes)
        return CudaGraphRunner(self._model, backend, shape, settings, self._make_capture() if has_graphs else None)

    def _make_capture(self) -> GraphCapture:
        return CudaGraphCapture()

    def _collecting(self, plan: StepPlan, collect: Collect) -> Collect:
        def wait() -> StepResult:
            with self.streams.computing():
                result = collect()
                end_plan(self._connector, plan, result)
            return result

        return wait


def device_limits(device: torch.device) -> DeviceLimits:
    """The properties that decide the shapes of kernels. For the interpreter, which runs one program at a time, work is
    cut into few programs."""
    if device.type != "cuda":
        return DeviceLimits(num_multiprocessors=INTERPRETED_MULTIPROCESSORS)
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits((properties.major, properties.minor), properties.multi_processor_count)


def device_name(device: torch.device) -> str:
    """The name of the device for logs and `describe_backend`."""
    if device.type != "cuda":
        return "the host, interpreted"
    name: str = torch.cuda.get_device_name(device)
    return name
