"""One worker: a device's share of the model and of the KV cache, driven by an executor.

Life: load, profile (unless the size of the pool is given), allocate, execute ... All calls come one after the other,
from one thread.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch

from quire.attention.interface import AttentionBackend
from quire.attention.torch_backend import TorchAttention
from quire.config.device import DeviceConfig
from quire.config.engine import EngineConfig
from quire.errors import QuireError
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import MemoryProfile
from quire.kv_cache.spec import LayerSpec
from quire.models.claims import check_dummy
from quire.models.interface import CausalLM
from quire.models.loader import load_model
from quire.sampling.backend import make_sampler_backend
from quire.scheduler.preemption import PreemptionCosts
from quire.step import StepPlan, StepResult
from quire.worker.block_tables import BlockTables
from quire.worker.kv_connector.block_file import BlockLayout
from quire.worker.kv_connector.cache_directory import require_writable
from quire.worker.kv_connector.cache_identity import cache_namespace, native_code, torch_code
from quire.worker.kv_connector.disk_store import DiskStore
from quire.worker.kv_connector.interface import NoWorkerConnector, WorkerConnector, begin_plan, end_plan
from quire.worker.kv_connector.offload import HostBlocks, OffloadWorker
from quire.worker.kv_copy import block_copier
from quire.worker.kv_tensors import allocate_host_pages, allocate_pages, typed_pages
from quire.worker.kv_transfer import BlockTransfers, NoTransfers, ThreadTransfers, block_mover
from quire.worker.load_progress import LoadProgress
from quire.worker.memory import available_memory
from quire.worker.model_runner import ModelRunner
from quire.worker.preemption_costs import time_copies, time_prompt
from quire.worker.profile import measure_activations
from quire.worker.request_state import RequestState

if TYPE_CHECKING:
    from quire.kernels.cpu.runtime import NativeRuntime

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _computes(
    method: Callable[Concatenate[Worker, Arguments], Result],
) -> Callable[Concatenate[Worker, Arguments], Result]:
    """Run a method of the worker in inference mode, with the worker's number of compute threads.

    torch keeps that number per calling thread, and another engine of this process may have set another one.
    """

    def call(self: Worker, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        with torch.inference_mode():
            return method(self, *args, **kwargs)

    return call


class Worker:
    """The worker of a CPU: owns the model, the pools' tensors and the request state."""

    def __init__(self, config: EngineConfig) -> None:
        # Native kernels have threads of their own, which torch's would only slow down.
        native = config.device.attention_backend == "native"
        self.num_threads = 1 if native else config.device.num_threads
        self._model_config = config.model
        self._cache_config = config.cache
        self._load_config = config.load
        self._device_config = config.device
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._max_num_batched_tokens = config.scheduler.max_num_batched_tokens
        self._runtime = _native_runtime(config.device)
        self._model: CausalLM | None = None
        self._runner: ModelRunner | None = None
        self._layout: KVCacheLayout | None = None
        self._transfers: BlockTransfers = NoTransfers()
        self._connector: WorkerConnector = NoWorkerConnector()
        self._failed = False

    @_computes
    def load_model(self) -> list[LayerSpec]:
        """Load the model; return what each layer keeps in the KV cache. Raises ModelLoadError, or
        InsufficientMemoryError for random weights that do not fit.

        A bar on standard error shows the progress when it takes longer than a second.
        """
        if self._cache_config.offload_dir is not None:
            require_writable(self._cache_config.offload_dir)  # fails before minutes of loading
        if self._load_config.load_format == "dummy":
            check_dummy(self._model_config, available_memory())
        with LoadProgress() as progress:
            self._model = load_model(
                self._model_config, self._load_config, self._device_config.device, progress, self._runtime
            )
        return self._model.kv_specs()

    @_computes
    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        """Measure what is available and what one step at the full budget takes, by running a shorter one."""
        assert self._model is not None, "load comes before profile"
        available = available_memory()
        activations = measure_activations(
            self._model,
            self._make_backend,
            self._model_config,
            self._cache_config.block_size,
            max_num_batched_tokens,
            max_num_seqs,
            self._runtime,
        )
        return MemoryProfile(available=available, activations=activations, weights=self._model.weight_bytes())

    @_computes
    def allocate(self, layout: KVCacheLayout) -> None:
        """Create the pools' tensors and an empty request state. Raises InsufficientMemoryError."""
        assert self._model is not None, "load comes before allocate"
        pages = allocate_pages(layout)
        self._layout = layout
        if layout.num_host_blocks:
            host_pages = allocate_host_pages(layout)
            self._transfers = ThreadTransfers(pages, host_pages, block_mover(self._runtime))
            if self._cache_config.offload_dir is not None:
                store = self._open_store(self._cache_config.offload_dir, layout, HostBlocks(host_pages))
                self._connector = OffloadWorker(store, self._transfers)
        max_model_len = self._model_config.max_model_len
        requests = RequestState(self._max_num_seqs, max_model_len)
        self._runner = ModelRunner(
            model=self._model,
            backend=self._make_backend(layout, pages),
            copy_blocks=block_copier(pages, self._runtime),
            transfers=self._transfers,
            requests=requests,
            tables=BlockTables(len(layout.groups), self._max_num_seqs, max_model_len, layout.block_size),
            sampler_backend=make_sampler_backend(requests.sampling, self._runtime),
            vocab_size=self._model_config.vocab_size,
        )

    @_computes
    def measure_preemption_costs(self) -> PreemptionCosts:
        """Time copies between the pools and the computation of a prompt. Overwrites the pools: call it before any
        plan."""
        assert self._model is not None, "load_model comes first"
        assert self._layout is not None, "allocate comes first"
        longest, block_size = self._model_config.max_model_len, self._cache_config.block_size
        return PreemptionCosts(
            seconds_per_block=time_copies(self._transfers, self._layout),
            seconds_per_token=time_prompt(
                self._model, self._make_backend, block_size, self._max_num_batched_tokens, longest
            ),
        )

    def describe_backend(self) -> str:
        """One line for users: kernels, number of threads, formats of weights, KV cache and products."""
        model, device = self._model_config, self._device_config
        computes = "plain torch operators" if self._runtime is None else f"native kernels for {self._runtime.isa}"
        threads = "1 thread" if device.num_threads == 1 else f"{device.num_threads} threads"
        weights = model.dtype if model.quantization is None else model.quantization.method
        formats = f"{weights} weights, {model.kv_cache_dtype} KV cache"
        precision = device.matmul_precision if self._runtime is None else self._runtime.matmul_precision
        return f"{computes}, {threads}, {formats}, {precision} products"

    @_computes
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan. After an error the request state is undefined, so every later plan fails as well."""
        assert self._runner is not None, "allocate comes before execute"
        if self._failed:
            raise QuireError(f"step {plan.step_id} was not run, because an earlier step failed")
        try:
            self._transfers.wait()
            begin_plan(self._connector, plan)
            result = self._runner.execute(plan)
            end_plan(self._connector, plan, result)
            return result
        except BaseException:
            self._failed = True
            raise

    @_computes
    def sleep(self, level: int) -> None:
        """Free the pools; at level 2 the weights as well. Blocks on disk stay."""
        assert self._model is not None, "load comes before sleep"
        self._connector.close()
        self._runner, self._transfers, self._connector = None, NoTransfers(), NoWorkerConnector()
        self._model.release_workspaces()
        if level == 2:
            self._model = None
        gc.collect()  # objects in reference cycles would keep their memory mapped

    @_computes
    def wake_up(self) -> None:
        """Load the weights, if they were freed, and allocate the pools again. Raises ModelLoadError or
        InsufficientMemoryError."""
        assert self._layout is not None, "allocate comes before sleep"
        if self._model is None:
            self.load_model()
        self.allocate(self._layout)

    def close(self) -> None:
        """Wait for the stores to disk. No plan may be executed afterwards. Idempotent."""
        self._connector.close()

    def _open_store(self, directory: Path, layout: KVCacheLayout, host_blocks: HostBlocks) -> DiskStore:
        if self._runtime is None:
            code = torch_code(self._device_config.num_threads)
        else:
            code = native_code(self._runtime.isa, self._runtime.binary)
        namespace = cache_namespace(self._model_config, self._load_config, self._device_config, layout, code)
        page_bytes = layout.block_bytes // layout.layers_per_group
        files = BlockLayout(namespace, layout.layers_per_group, page_bytes)
        return DiskStore(directory, self._cache_config.offload_size, files, host_blocks)

    def _make_backend(self, layout: KVCacheLayout, pages: Sequence[torch.Tensor]) -> AttentionBackend:
        cache_dtype = self._model_config.kv_cache_dtype
        if self._runtime is None:
            return TorchAttention(layout, typed_pages(pages, layout, getattr(torch, cache_dtype)))
        from quire.attention.native_backend import NativeAttention

        num_heads, num_threads = self._model_config.num_heads, self._device_config.num_threads
        return NativeAttention(layout, pages, cache_dtype, num_heads, num_threads)


def _native_runtime(device: DeviceConfig) -> NativeRuntime | None:
    if device.attention_backend != "native":
        return None
    from quire.kernels.cpu.runtime import NativeRuntime

    return NativeRuntime(device.cpu_isa, device.num_threads, device.matmul_precision)
