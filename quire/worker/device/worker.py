"""The worker of a device: the model and the KV cache lie there, plans are enqueued, results are waited for later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import torch

from quire.attention.triton_backend import TritonAttention
from quire.config.engine import EngineConfig
from quire.errors import QuireError
from quire.kernels.triton.block_copy import PageTable
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.spec import LayerSpec
from quire.layers.device import DeviceLayers
from quire.models.interface import CausalLM
from quire.models.loader import load_model
from quire.sampling.device.sampler import DeviceSampler
from quire.step import StepPlan, StepResult
from quire.worker.device.execution_choice import ExecutionSettings, execution_settings
from quire.worker.device.facts import device_limits, device_name
from quire.worker.device.graph_capture import CudaGraphCapture
from quire.worker.device.graphs import ForwardPasses, PassShape
from quire.worker.device.pending import PendingStep, failed_step
from quire.worker.device.pool import allocate_device_pages
from quire.worker.device.runner import Collect, DeviceModelRunner
from quire.worker.device.state import make_state
from quire.worker.device.streams import make_streams
from quire.worker.disk_tier import DiskTier, NoDiskTier
from quire.worker.kv_tensors import typed_pages
from quire.worker.kv_transfer import BlockTransfers, NoTransfers
from quire.worker.load_progress import LoadProgress

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _enqueues(
    method: Callable[Concatenate[DeviceWorker, Arguments], Result],
) -> Callable[Concatenate[DeviceWorker, Arguments], Result]:
    """Run a method of the worker in inference mode, on the compute stream of its device, whichever thread calls."""

    def call(self: DeviceWorker, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.inference_mode(), self.streams.computing():
            return method(self, *args, **kwargs)

    return call


class DeviceWorker:
    """Owns the model, the pool's tensors and the rows. Life as the CPU's worker; plans are launched."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.streams = make_streams(torch.device(config.device.device))
        self._model: CausalLM | None = None
        self._runner: DeviceModelRunner | None = None
        self._layout: KVCacheLayout | None = None
        self._transfers: BlockTransfers = NoTransfers()
        self._disk: DiskTier = NoDiskTier()
        self._last: PendingStep | None = None

    @_enqueues
    def load(self) -> list[LayerSpec]:
        """Load the model; return what each layer keeps in the KV cache. Raises ModelLoadError."""
        config = self._config
        layers = DeviceLayers(self.streams.device, config.device.batch_invariant)
        with LoadProgress() as progress:
            self._model = load_model(config.model, config.load, progress=progress, device_layers=layers)
        self.streams.synchronize()
        return self._model.kv_specs()

    @_enqueues
    def allocate(self, layout: KVCacheLayout) -> None:
        """Create the pools' tensors and empty rows. Raises InsufficientMemoryError."""
        assert self._model is not None, "load comes before allocate"
        config = self._config
        model, scheduler = config.model, config.scheduler
        pages = allocate_device_pages(layout, self.streams.device)
        settings = execution_settings(config.device, scheduler.max_num_seqs)
        state = make_state(config, layout, settings, self.streams)
        self._layout = layout
        self._runner = DeviceModelRunner(
            model=self._model,
            passes=self._make_passes(self._make_backend(layout, pages), settings),
            settings=settings,
            sampler=DeviceSampler(state.requests.sampling),
            state=state,
            pages=PageTable.of_pages(pages),
            transfers=self._transfers,
            vocab_size=model.vocab_size,
        )
        self.streams.synchronize()

    def describe(self) -> str:
        """What computes, in which formats."""
        model, device = self._config.model, self._config.device
        mode = "batch-invariant" if device.batch_invariant else "fastest"
        graphs = "no CUDA graphs" if device.cuda_graphs == "none" else f"CUDA graphs: {device.cuda_graphs}"
        where = device_name(self.streams.device)
        return f"Triton kernels on {where}, {model.dtype} weights, {model.kv_cache_dtype} KV cache, {mode} kernels, {graphs}"

    @_enqueues
    def launch(self, plan: StepPlan) -> PendingStep:
        """Enqueue one plan; its result is asked of what is returned. After an error the rows are in an unknown state,
        so every later plan fails as well."""
        assert self._runner is not None, "allocate comes before launch"
        previous = self._last
        if previous is not None and previous.has_failed:
            return failed_step(
                plan.step_id, QuireError(f"step {plan.step_id} was not run, because an earlier step failed")
            )
        try:
            self._disk.begin(plan)
            collect = self._runner.launch(plan)
        except BaseException as error:
            self._last = failed_step(plan.step_id, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._last = PendingStep(plan.step_id, self._collecting(plan, collect), previous)
        return self._last

    def close(self) -> None:
        """Wait for what was enqueued, and finish what is being stored on disk. Idempotent."""
        self.streams.synchronize()
        self._disk.close()
        self._last = None

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

    def _make_passes(self, backend: TritonAttention, settings: ExecutionSettings) -> ForwardPasses:
        assert self._model is not None, "load comes before allocate"
        model = self._config.model
        shape = PassShape(
            hidden_size=model.hidden_size,
            attention_size=model.num_heads * model.head_dim,
            longest=model.max_model_len + 1,
            dtype=getattr(torch, model.dtype),
            device=self.streams.device,
        )
        has_graphs = bool(settings.full_sizes or settings.piecewise_sizes)
        return ForwardPasses(self._model, backend, shape, settings, CudaGraphCapture() if has_graphs else None)

    def _collecting(self, plan: StepPlan, collect: Collect) -> Collect:
        def wait() -> StepResult:
            result = collect()
            result.disk = self._disk.end(plan)
            return result

        return wait

