from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire import envs
from quire.attention.dealt import DealtTokens
from quire.attention.encoder_backend import EncoderAttention
from quire.attention.interface import AttentionBackend
from quire.attention.states import StateBackend
from quire.attention.torch_backend import TorchAttention
from quire.config.engine import EngineConfig
from quire.config.load import draft_load
from quire.errors import ConfigError
from quire.kv_cache.deal import Deal
from quire.kv_cache.layout import KVCacheLayout
from quire.layers.adapters import TorchAdapterStorage
from quire.layers.expert_balance import ExpertBalancer
from quire.layers.experts import ExpertCounters
from quire.models.adapters import ModelAdapters
from quire.models.claims import check_dummy
from quire.models.draft_head import first_guess
from quire.models.interface import CausalLM
from quire.models.loader import TORCH_DTYPES, Extras, load_head, load_model, load_vision
from quire.models.vision import VisionEncoder
from quire.models.weight_files import Progress
from quire.multimodal.inputs import NoImages, image_inputs
from quire.parallel.interface import ExpertExchange, ProcessGroup
from quire.parallel.single import SINGLE_RANK
from quire.parallel.stage import WHOLE_MODEL, Stage
from quire.sampling.kernels import SamplingKernels
from quire.sampling.parameters import SamplingRows
from quire.sampling.plain_kernels import PlainKernels
from quire.sampling.sampler import Sampler
from quire.worker.block_tables import BlockTables
from quire.worker.columns import ColumnValues
from quire.worker.drafts import HostDrafts
from quire.worker.finders import NO_FINDER
from quire.worker.head_drafts import HeadDrafts
from quire.worker.images import ImageOverlays
from quire.worker.kv_connector.cache_identity import native_code, torch_code
from quire.worker.kv_tensors import (
    STORED_DTYPES,
    allocate_host_pages,
    allocate_pages,
    layer_pages,
    prefault,
    state_pages,
)
from quire.worker.kv_transfer import BlockTransfers
from quire.worker.model_drafts import ModelDrafts, layers_of
from quire.worker.oracle import Oracle
from quire.worker.platform.cpu_blocks import HostPages, ThreadTransfers, block_copier, block_mover
from quire.worker.platform.cpu_inputs import CacheBackends, CpuColumns, PlainInputs, StepInputs
from quire.worker.platform.cpu_meter import CpuMeter
from quire.worker.platform.cpu_step import CpuCompute
from quire.worker.platform.host_finder import make_finder
from quire.worker.platform.host_memory import available_memory
from quire.worker.platform.interface import DraftModel, HeadInputs, HostBlockTensors, Mode

if TYPE_CHECKING:
    from quire.worker.platform.shared_inputs import SharedInputs


class CpuPlatform:
    """Platform of a worker on a CPU: work has run when a call returns."""

    def __init__(
        self,
        config: EngineConfig,
        group: ProcessGroup = SINGLE_RANK,
        stage: Stage = WHOLE_MODEL,
        sharing: ProcessGroup = SINGLE_RANK,
    ) -> None:
        """group: ranks that share each layer of a stage. sharing: ranks that share prompts. Raises ConfigError for
        kernels that this CPU lacks."""
        device = config.device
        self.stage = stage
        self._sharing = sharing
        self._group = group
        self._config = config
        self._runtime = None
        sizes = config.parallel
        self.deal = Deal(sizes.dcp, group.rank % sizes.dcp, sizes.interleave)
        self._dealt = DealtTokens(self.deal, group) if sizes.dcp > 1 else None
        self.adapters: ModelAdapters | None = None
        self.draft_model: DraftModel | None = None
        self.expert_counts = ExpertCounters() if config.load.counts_experts else None
        self.balancer: ExpertBalancer | None = None
        self.exchange: ExpertExchange | None = None
        if device.attention_backend == "native":
            from quire.kernels.cpu.runtime import NativeRuntime  # the native module may not be built

            count = group.size * stage.count * sharing.size
            if count > 1 and device.num_threads > 1:
                number = (stage.number * sharing.size + sharing.rank) * group.size + group.rank
                keep_to_own_cores(number, count)
            self._runtime = NativeRuntime(device.cpu_isa, device.num_threads, device.matmul_precision)
            stored = (config.model.dtype, config.model.kv_cache_dtype)
            if device.matmul_precision == "bfloat16" not in stored and not self._runtime.rounds_for_quantised:
                raise ConfigError(
                    f"matmul_precision='bfloat16' would change nothing: {self._runtime.isa} leaves activations of "
                    "quantised weights in float32, and nothing is stored in bfloat16",
                    param="matmul_precision",
                )
        # Native kernels have their own threads, which torch's would slow down.
        self._num_threads = device.num_threads if self._runtime is None else 1

    def mode(self, queue_depth: int) -> Mode:
        return "thread" if queue_depth > 1 else "inline"  # torch releases the interpreter while it computes

    def computing(self) -> AbstractContextManager[object]:
        """Inference mode, with the right number of torch's threads, which is per calling thread; another engine may
        have changed it."""
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        return torch.inference_mode()

    def is_computing(self) -> bool:
        return torch.is_inference_mode_enabled() and torch.get_num_threads() == self._num_threads

    def synchronize(self) -> None:
        """Does nothing."""

    def describe(self) -> str:
        model, device, runtime = self._config.model, self._config.device, self._runtime
        kernels = "plain torch operators" if runtime is None else f"native kernels for {runtime.isa}"
        threads = "1 thread" if device.num_threads == 1 else f"{device.num_threads} threads"
        precision = device.matmul_precision if runtime is None else runtime.matmul_precision
        reason = f" ({runtime.precision_reason})" if runtime is not None and runtime.precision_reason else ""
        formats = f"{model.weight_format} weights, {model.cache_format}, {precision} products{reason}"
        if model.activation_bits:
            formats += f", {model.activation_bits} bits of activations that meet quantised weights"
        expanded = ", prompts of latent attention expanded: bits depend on chunks" if model.expands_prompts else ""
        return f"{kernels}, {threads}, {formats}{expanded}"

    def code_identity(self) -> dict[str, str]:
        if self._runtime is None:
            code = torch_code(self._config.device.num_threads)
        else:
            code = native_code(self._runtime.isa, self._runtime.matmul_precision, self._runtime.binary)
        for what, number, count in (
            ("rank", self._group.rank, self._group.size),
            ("stage", self.stage.number, self.stage.count),
            ("prompts", self._sharing.rank, self._sharing.size),
        ):
            if count > 1:
                code[what] = f"{number} of {count}"
        if self.stage.count > 1:
            code["layers"] = f"{self.stage.layers.start} to {self.stage.layers.stop}"
        if self._config.load.expert_placement is not None:  # placement changes the order of a layer's sums
            is_apart = self._config.load.balance is not None or self._config.replicas is not None
            code["experts"] = "apart" if is_apart else self._config.load.expert_placement
        if self._dealt is not None:
            code["tokens"] = f"runs of {self._dealt.deal.run} in turns to {self._dealt.deal.num_ranks}"
        return code

    def load_model(self, progress: Progress) -> CausalLM:
        config = self._config
        if config.load.load_format == "dummy":
            check_dummy(config.model, available_memory())
        shown = progress if self._group.rank == self._sharing.rank == 0 and self.stage.is_first else None
        self.adapters = self._make_adapters()
        self.balancer = None if config.load.balance is None else ExpertBalancer(config.load.balance)
        self.exchange = self._make_exchange()
        model = load_model(
            config.model,
            config.load,
            self._group,
            shown,
            self._runtime,
            extras=Extras(self.expert_counts, self.adapters, self.balancer, self.exchange),
            stage=self.stage,
        )
        self.draft_model = self._load_draft_model(model) if self.stage.is_last else None
        return model

    def _make_exchange(self) -> ExpertExchange | None:
        config = self._config
        if config.replicas is None:
            return None
        from quire.parallel.expert_exchange import SharedMemoryExchange  # the native module may not be built

        assert self._runtime is not None, "replicas that share experts run native kernels"
        place, max_rows = (self.stage.number, self._group.rank), config.scheduler.max_num_batched_tokens
        return SharedMemoryExchange(
            config.replicas, config.parallel, place, config.model.shape, max_rows, self._runtime
        )

    def _load_draft_model(self, model: CausalLM) -> DraftModel | None:
        config = self._config.speculation.draft
        if self._config.speculation.method == "mtp":
            return DraftModel(self._config.model, first_guess(model), None, HeadInputs())
        chosen, load = self._config.speculation.draft_model, draft_load(self._config.load)
        if chosen is None or config is None:
            return None
        if chosen.head is not None:
            head, token_ids = load_head(config, chosen.head, load, self._draft_group, model, self._runtime)
            tokens = None if token_ids is None else token_ids.numpy()
            return DraftModel(config, head, None, HeadInputs(chosen.head.taps, tokens, is_apart=True))
        model = load_model(config, load, self._draft_group, None, self._runtime)
        return DraftModel(config, model, CpuMeter(self._make_draft_backends, self._make_sampling_kernels))

    @property
    def _draft_group(self) -> ProcessGroup:
        chosen = self._config.speculation.draft_model
        return self._group if chosen is not None and chosen.num_ranks == self._group.size else SINGLE_RANK

    def _make_adapters(self) -> ModelAdapters | None:
        adapters = self._config.adapters
        if not adapters.is_on:
            return None
        dtype = TORCH_DTYPES[adapters.dtype]
        if self._runtime is None:
            device = torch.device(self._config.device.device)
            return ModelAdapters(adapters, TorchAdapterStorage(adapters.num_slots, adapters.max_rank, dtype, device))
        from quire.layers.native_adapters import NativeAdapterStorage  # the native module may not be built

        return ModelAdapters(adapters, NativeAdapterStorage(adapters.num_slots, adapters.max_rank, dtype))

    def load_images(self) -> ImageOverlays | None:
        found = image_inputs(self._config)
        if isinstance(found, NoImages) or not self.stage.is_first:
            return None
        encoder = load_vision(self._config.model, self._config.load, self._group, self._runtime)
        return ImageOverlays(encoder, found.processor, found.largest_tokens, self._group)

    def meter(self) -> CpuMeter:
        samples_tokens = self._config.model.pooling is None and self.stage.is_last
        kernels = self._make_sampling_kernels
        return CpuMeter(self.make_backends, kernels, samples_tokens=samples_tokens, deal=self.deal)

    def _make_draft_backends(self, layout: KVCacheLayout, pages: Sequence[torch.Tensor]) -> CacheBackends:
        draft = self._config.speculation.draft
        assert draft is not None, "a model makes drafts"
        config, num_heads = replace(self._config, model=draft), draft.num_heads // self._draft_group.size
        is_native = self._runtime is not None
        attention = make_attention(config, layout, pages, num_heads, is_native=is_native, dealt=self._dealt)
        return CacheBackends(attention, StateBackend(layout, {}))

    def make_backends(self, layout: KVCacheLayout, pages: Sequence[torch.Tensor]) -> CacheBackends:
        num_heads, is_native = self._config.model.num_heads // self._group.size, self._runtime is not None
        attention = make_attention(self._config, layout, pages, num_heads, is_native=is_native, dealt=self._dealt)
        return CacheBackends(attention, StateBackend(layout, state_pages(pages, layout)))

    def allocate_pages(self, layout: KVCacheLayout) -> list[torch.Tensor]:
        pages = allocate_pages(layout)
        if self._config.cache.prefault:
            prefault(pages, self._config.device.num_threads)
        return pages

    def allocate_host_pool(self, layout: KVCacheLayout) -> HostPages:
        return HostPages(allocate_host_pages(layout))

    def make_transfers(self, pages: Sequence[torch.Tensor], host_pool: HostBlockTensors) -> BlockTransfers:
        return ThreadTransfers(pages, host_pool.pages, block_mover(self._runtime))

    def make_compute(
        self,
        model: CausalLM,
        layout: KVCacheLayout,
        pages: Sequence[torch.Tensor],
        tables: BlockTables,
        sampling: SamplingRows,
        values: ColumnValues,
    ) -> CpuCompute:
        drafts = self._make_drafts(model, layout, pages, tables)
        if self.draft_model is not None and self.draft_model.is_apart:
            layout = layers_of(layout, range(len(model.cache_specs())))
        backends = self.make_backends(layout, pages)
        columns, inputs = self._make_inputs(tables, values, drafts, backends)
        shared = self._share(inputs, columns, tables, backends)
        return CpuCompute(
            model,
            block_copier(pages, self._runtime),
            columns,
            shared or inputs,
            Sampler(sampling, self._make_sampling_kernels(sampling), self._config.logprobs_mode),
            has_head=self._config.model.has_pooling_head,
            pipeline=self.stage,
            shared=shared,
        )

    def _share(
        self, inputs: StepInputs, columns: CpuColumns, tables: BlockTables, backends: CacheBackends
    ) -> SharedInputs | None:
        """Inputs of this rank's part of steps whose prompts ranks share; None: one rank."""
        if self._sharing.size == 1:
            return None
        from quire.worker.platform.shared_inputs import SharedInputs  # the native module may not be built

        assert self._runtime is not None, "ranks that share prompts run native kernels"
        return SharedInputs(inputs, columns, tables, backends, self._sharing, self._runtime)

    def _make_inputs(
        self, tables: BlockTables, values: ColumnValues, drafts: HostDrafts | None, backends: CacheBackends
    ) -> tuple[CpuColumns, StepInputs]:
        size = self._config.scheduler.max_num_seqs, self._config.model.max_model_len, values, drafts
        if self._runtime is not None and not self._config.model.is_encoder:
            from quire.worker.platform.native_columns import NativeColumns  # the native module may not be built

            native = NativeColumns(*size, tables, backends, self._runtime)
            return native, native
        columns = CpuColumns(*size)
        return columns, PlainInputs(columns, tables, backends)

    def _make_drafts(
        self, model: CausalLM, layout: KVCacheLayout, pages: Sequence[torch.Tensor], tables: BlockTables
    ) -> HostDrafts | None:
        num_rows, speculation = self._config.scheduler.max_num_seqs, self._config.speculation
        if not speculation.max_drafts:
            return None
        if not self.stage.is_last:  # the last one makes them, and plans bring them
            has_states = bool(layout.state_groups)
            return HostDrafts(num_rows, speculation.max_drafts, NO_FINDER, has_states=has_states)
        drafts = self._drafts_of_method(model, layout, pages, tables)
        if speculation.oracle is not None:
            size = self._config.model.vocab_size
            drafts.follow_oracle(Oracle(num_rows, speculation.oracle, self._config.seed, size))
        return drafts

    def _drafts_of_method(
        self, model: CausalLM, layout: KVCacheLayout, pages: Sequence[torch.Tensor], tables: BlockTables
    ) -> HostDrafts:
        speculation = self._config.speculation
        has_states = bool(layout.state_groups)
        own = self.draft_model
        if own is not None:
            if own.is_apart:
                first = len(model.cache_specs())
                layers = range(first, first + len(own.model.cache_specs()))
                backends = self._make_draft_backends(layers_of(layout, layers), pages)
            else:
                backends = self.make_backends(layout, pages)._replace(states=StateBackend(layout, {}))
            if own.head is not None:
                longest = own.config.max_model_len
                return HeadDrafts(speculation, own.model, own.head, tables, backends, longest, has_states=has_states)
            size = self._config.model.vocab_size
            return ModelDrafts(speculation, own, tables, backends, size, has_states=has_states)
        finder = make_finder(self._config, speculation.max_drafts, is_native=self._runtime is not None)
        return HostDrafts(self._config.scheduler.max_num_seqs, speculation.max_drafts, finder, has_states=has_states)

    def offload_weights(self, model: CausalLM, encoder: VisionEncoder | None) -> None:
        """Does nothing: weights are in host memory."""

    def release_reserve(self) -> None:
        """Does nothing."""

    def _make_sampling_kernels(self, rows: SamplingRows) -> SamplingKernels[np.ndarray]:
        if self._runtime is None:
            return PlainKernels(rows)
        from quire.sampling.native_kernels import NativeKernels

        return NativeKernels(rows, self._runtime)


def keep_to_own_cores(rank: int, size: int) -> None:
    """Pin this thread and its children to this rank's share of the cores; no effect with fewer cores than ranks."""
    cores = envs.affinity_numbers()
    count = len(cores) // size
    if count and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores[rank * count : (rank + 1) * count])


def make_attention(
    config: EngineConfig,
    layout: KVCacheLayout,
    pages: Sequence[torch.Tensor],
    num_heads: int,
    *,
    is_native: bool,
    dealt: DealtTokens | None = None,
) -> AttentionBackend:
    """Attention back end of a CPU. num_heads: this rank's query heads per layer. is_native: native kernels, else torch
    operators. dealt: see NativeAttention. An encoder has no pool."""
    model = config.model
    if not is_native:
        if model.is_encoder:
            return EncoderAttention()
        return TorchAttention(layout, layer_pages(pages, layout, STORED_DTYPES[model.kv_cache_dtype]))
    if model.is_encoder:
        from quire.attention.native_encoder import NativeEncoder  # the native module may not be built

        return NativeEncoder(model.dtype == "bfloat16")
    from quire.attention.native_backend import NativeAttention

    return NativeAttention(layout, pages, model.kv_cache_dtype, num_heads, config.device.num_threads, dealt)
