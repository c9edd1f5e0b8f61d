"""GPU platform: model, KV cache and request state are on the device; plans are enqueued and results awaited
later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import triton

from quire import envs
from quire.attention.states import StateBackend
from quire.attention.triton_backend import TritonAttention, TritonEncoder
from quire.config.device import has_native_kernels
from quire.config.engine import EngineConfig
from quire.config.load import LoadConfig, draft_load
from quire.config.model import ModelConfig
from quire.config.resolve_device import FLOAT8_CAPABILITY
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.kernels.triton.block_copy import PageTable
from quire.kv_cache.deal import ALL_TOKENS
from quire.kv_cache.layout import FOREIGN_LAYER, KVCacheLayout
from quire.layers.device import DeviceLayers
from quire.layers.device_adapters import DeviceAdapterStorage
from quire.layers.expert_balance import ExpertBalancer
from quire.layers.experts import ExpertCounters
from quire.models.adapters import ModelAdapters
from quire.models.draft_head import first_guess
from quire.models.interface import CausalLM
from quire.models.loader import NO_EXTRAS, TORCH_DTYPES, Extras, load_head, load_model, load_vision
from quire.models.vision import VisionEncoder
from quire.models.weight_files import Progress
from quire.multimodal.inputs import NoImages, image_inputs
from quire.parallel.interface import ExpertExchange, ProcessGroup
from quire.parallel.single import SINGLE_RANK
from quire.parallel.stage import WHOLE_MODEL
from quire.sampling.parameters import NUM_WORDS, SamplingRows
from quire.sampling.sampler import Sampler
from quire.sampling.triton_kernels import TritonKernels
from quire.step import StepPlan
from quire.worker.block_tables import BlockTables, table_shapes
from quire.worker.columns import STEP_COLUMNS, ColumnValues
from quire.worker.cuda_graphs import CudaGraphRunner, DeviceBackends, PassShape
from quire.worker.graph_dispatch import ExecutionSettings, execution_settings
from quire.worker.images import ImageOverlays
from quire.worker.kv_connector.cache_identity import device_code
from quire.worker.kv_tensors import STORED_DTYPES, layer_pages, state_pages
from quire.worker.kv_transfer import BlockTransfers
from quire.worker.model_drafts import MOST_BEHIND, layers_of
from quire.worker.oracle import Oracle
from quire.worker.platform.device_drafts import DeviceDrafts
from quire.worker.platform.device_head_drafts import DeviceHeadDrafts
from quire.worker.platform.device_inputs import DeviceInputs
from quire.worker.platform.device_memory import PinnedPool, allocate_device_pages, arithmetic, make_memory
from quire.worker.platform.device_meter import DeviceMeter
from quire.worker.platform.device_model_drafts import MOST_ROWS, DeviceModelDrafts, DraftPasses
from quire.worker.platform.device_step import DeviceCompute, StagedColumns
from quire.worker.platform.device_text_drafts import DeviceTextDrafts, HostTexts, path_length
from quire.worker.platform.graph_capture import CudaGraphCapture, GraphCapture
from quire.worker.platform.host_finder import make_finder
from quire.worker.platform.interface import DraftModel, HeadInputs, HostBlockTensors, Mode
from quire.worker.platform.state_arena import DraftRoom, StateArena
from quire.worker.platform.stream_transfers import StreamTransfers
from quire.worker.platform.streams import make_streams
from quire.worker.platform.upload import Upload
from quire.worker.platform.weight_offload import DeviceWeights
from quire.worker.warm_up import pooling_plans, warm_up, warm_up_attention, warm_up_plans

INTERPRETED_MULTIPROCESSORS = 8


class CudaPlatform:
    """Platform of a worker on a CUDA device. compiles: True if kernels are compiled and need a warm-up; False in the
    interpreter."""

    draft_model: DraftModel | None = None
    balancer: ExpertBalancer | None = None
    exchange: ExpertExchange | None = None
    """Ranks on devices are not supported yet."""
    stage = WHOLE_MODEL
    deal = ALL_TOKENS

    def __init__(self, config: EngineConfig, group: ProcessGroup = SINGLE_RANK) -> None:
        """group: ranks that share each layer."""
        self._config = config
        self._group = group
        self.streams = make_streams(torch.device(config.device.device))
        self._device = self.streams.device
        self.expert_counts: ExpertCounters | None = None
        self.adapters: ModelAdapters | None = None
        if config.load.counts_experts:
            self.expert_counts = ExpertCounters(num_rows=torch.zeros(1, dtype=torch.int32, device=self._device))
        self._memory = make_memory(self._device)
        self.compiles = self._device.type == "cuda"
        self._converts_e4m3 = self.compiles and device_limits(self._device).capability >= FLOAT8_CAPABILITY
        if self.compiles:
            envs.keep_triton_cache()
        self._free_at_start = self._memory.free()
        self._settings = execution_settings(
            config.device, config.scheduler.max_num_seqs, config.speculation.max_drafts, adapts=config.adapters.is_on
        )

    def mode(self, queue_depth: int) -> Mode:
        return "queued"

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.inference_mode(), self.streams.computing():
            yield

    def is_computing(self) -> bool:
        """Always False: every call enters the stream again."""
        return False

    def synchronize(self) -> None:
        self.streams.synchronize()

    def describe(self) -> str:
        model, device = self._config.model, self._config.device
        mode = "batch-invariant" if device.batch_invariant else "fastest"
        graphs = "no CUDA graphs" if device.cuda_graphs == "none" else f"CUDA graphs: {device.cuda_graphs}"
        formats = f"{model.weight_format} weights, {model.cache_format}, {device.matmul_precision} products"
        expanded = ", prompts of latent attention expanded" if model.expands_prompts else ""
        return f"Triton kernels on {device_name(self._device)}, {formats}, {mode} kernels, {graphs}{expanded}"

    def code_identity(self) -> dict[str, str]:
        return device_code(device_name(self._device), device_limits(self._device).capability, triton.__version__)

    def load_model(self, progress: Progress) -> CausalLM:
        config, shown = self._config, progress if self._group.rank == 0 else None
        adapters = config.adapters
        if adapters.is_on:
            sizes = adapters.num_slots, adapters.max_rank, TORCH_DTYPES[adapters.dtype]
            self.adapters = ModelAdapters(adapters, DeviceAdapterStorage(*sizes, self.streams))
        with arithmetic(self._memory, f"the weights of {config.model.name}"):
            extras = Extras(self.expert_counts, self.adapters)
            model = self.load(config.model, config.load, self._group, shown, extras)
        self.draft_model = self._load_draft_model(model)
        self.streams.synchronize()
        return model

    def load(
        self,
        model: ModelConfig,
        load: LoadConfig,
        group: ProcessGroup,
        progress: Progress | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> CausalLM:
        """Model on this device; see `load_model` of the loader."""
        return load_model(model, load, group, progress=progress, device_layers=self._layers, extras=extras)

    @property
    def head_layers(self) -> DeviceLayers | None:
        """Options of heads for drafts on this device (None: plain operators compute them)."""
        return self._layers

    @property
    def _layers(self) -> DeviceLayers:
        device = self._config.device
        return DeviceLayers(
            self._device,
            device.batch_invariant,
            converts_e4m3=self._converts_e4m3,
            rounds_activations=device.matmul_precision == "fp8",
        )

    def _load_draft_model(self, model: CausalLM) -> DraftModel | None:
        config, chosen = self._config.speculation.draft, self._config.speculation.draft_model
        if self._config.speculation.method == "mtp":
            return DraftModel(self._config.model, first_guess(model), None, HeadInputs())
        if config is None or chosen is None:
            return None
        group, load = self._draft_group, draft_load(self._config.load)
        with arithmetic(self._memory, f"the weights of {config.name}"):
            if chosen.head is not None:
                head, token_ids = load_head(config, chosen.head, load, group, model, device_layers=self.head_layers)
                tokens = None if token_ids is None else token_ids.cpu().numpy()
                return DraftModel(config, head, None, HeadInputs(chosen.head.taps, tokens, is_apart=True))
            own = self.load(config, load, group)
        return DraftModel(config, own, self._meter(config, self._draft_settings, group))

    @property
    def _draft_settings(self) -> ExecutionSettings:
        chosen, rows = self._config.speculation.draft_model, MOST_ROWS
        if chosen is not None and chosen.mask_token is not None:
            rows = 2 * self._config.speculation.max_drafts  # accepted drafts, the last token, masks
        return replace(self._settings, piecewise_sizes=(), draft_rows=rows, adapts=False)

    @property
    def _draft_group(self) -> ProcessGroup:
        chosen = self._config.speculation.draft_model
        return self._group if chosen is not None and chosen.num_ranks == self._group.size else SINGLE_RANK

    def load_images(self) -> ImageOverlays | None:
        config = self._config
        found = image_inputs(config)
        if isinstance(found, NoImages):
            return None
        with arithmetic(self._memory, f"the vision tower of {config.model.name}"):
            encoder = load_vision(config.model, config.load, self._group, device_layers=self._layers)
        self.streams.synchronize()
        return ImageOverlays(encoder, found.processor, found.largest_tokens, self._group)

    def meter(self) -> DeviceMeter:
        return self._meter(self._config.model, self._settings, self._group)

    def _meter(self, model: ModelConfig, settings: ExecutionSettings, group: ProcessGroup) -> DeviceMeter:
        return DeviceMeter(
            partial(self.make_backends, model=model, group=group),
            model,
            settings,
            self._memory,
            self._free_at_start,
            self._device,
            group.size,
        )

    def make_backends(
        self,
        layout: KVCacheLayout,
        pages: Sequence[torch.Tensor],
        model: ModelConfig | None = None,
        group: ProcessGroup | None = None,
    ) -> DeviceBackends:
        """Make back ends over a pool's pages. model, group: configuration of the layers, and the ranks that share them
        (None: the model's own)."""
        model, group = self._config.model if model is None else model, self._group if group is None else group
        states = {layer: page for layer, page in state_pages(pages, layout).items() if layer != FOREIGN_LAYER}
        return DeviceBackends(self.make_attention(layout, pages, model, group), self.make_states(layout, states))

    def make_states(self, layout: KVCacheLayout, pages: Mapping[int, torch.Tensor]) -> StateBackend:
        return StateBackend(layout, pages, batch_invariant=self._config.device.batch_invariant)

    def make_attention(
        self, layout: KVCacheLayout, pages: Sequence[torch.Tensor], model: ModelConfig, group: ProcessGroup
    ) -> TritonAttention | TritonEncoder:
        config = self._config
        if model.is_encoder:
            return TritonEncoder()
        return TritonAttention(
            layout,
            layer_pages(pages, layout, self._cache_elements),
            device_limits(self._device),
            num_heads=model.num_heads // group.size,
            dtype=getattr(torch, model.dtype),
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=model.max_model_len + 1,
            batch_invariant=config.device.batch_invariant,
        )

    @property
    def _cache_elements(self) -> torch.dtype:
        name = self._config.model.kv_cache_dtype
        # Kernels read the bits where the hardware converts no e4m3 numbers.
        return torch.uint8 if name == "fp8" and not self._converts_e4m3 else STORED_DTYPES[name]

    def allocate_pages(self, layout: KVCacheLayout) -> list[torch.Tensor]:
        return allocate_device_pages(layout, self._memory, self._device)

    def allocate_host_pool(self, layout: KVCacheLayout) -> PinnedPool:
        return PinnedPool(layout, self._memory)

    def make_transfers(self, pages: Sequence[torch.Tensor], host_pool: HostBlockTensors) -> BlockTransfers:
        assert isinstance(host_pool, PinnedPool), "the host pool is this platform's"
        return StreamTransfers(self.streams, pages, host_pool.blocks)

    def make_compute(
        self,
        model: CausalLM,
        layout: KVCacheLayout,
        pages: Sequence[torch.Tensor],
        tables: BlockTables,
        sampling: SamplingRows,
        values: ColumnValues,
    ) -> DeviceCompute:
        config, settings, block_size = self._config, self._settings, layout.block_size
        num_rows, longest, draft = config.scheduler.max_num_seqs, config.model.max_model_len, self.draft_model
        of_draft = ColumnValues(STEP_COLUMNS, () if draft is None else draft.model.columns, num_rows)
        arena = StateArena(
            num_rows,
            longest,
            table_shapes(layout),
            NUM_WORDS,
            self._device,
            values.rules,
            DraftRoom(config.speculation.max_drafts, of_draft.rules, config.speculation.oracle is not None),
        )
        padded_seqs, padded_tokens = self._padded(settings, config.scheduler.max_num_batched_tokens)
        capture = self.make_capture() if settings.executions() else None
        drafts = self._make_drafts(model, layout, pages, arena, of_draft.names, capture)
        if drafts is not None and config.speculation.oracle is not None:
            drafts.oracle = Oracle(num_rows, config.speculation.oracle, config.seed, config.model.vocab_size)
        if draft is not None and draft.is_apart:
            layout = layers_of(layout, range(len(model.cache_specs())))
        backends = self.make_backends(layout, pages)
        compute = DeviceCompute(
            passes=self._make_passes(
                model, config.model, backends, settings, capture, self._group, () if drafts is None else drafts.taps
            ),
            columns=StagedColumns(arena, sampling, values, drafts),
            inputs=DeviceInputs(arena, block_size, padded_seqs, padded_tokens, values.names),
            upload=Upload(self.streams, config.scheduler.queue_depth + 1),
            pages=PageTable.of_pages(pages) if pages else None,
            streams=self.streams,
            sampler=Sampler(
                sampling, TritonKernels(sampling, arena.parameters, self.streams.pinned), config.logprobs_mode
            ),
            has_head=config.model.has_pooling_head,
        )
        if self.compiles:
            compute.prepare = lambda launch: self._warm_up(compute, backends, layout, launch)
        return compute

    def _padded(self, settings: ExecutionSettings, max_num_tokens: int) -> tuple[int, int]:
        padded_seqs = max((self._config.scheduler.max_num_seqs, *settings.full_sizes))
        sizes = [execution.num_tokens for execution in settings.executions()]
        return padded_seqs, max((max_num_tokens, padded_seqs, *sizes))

    def _make_drafts(
        self,
        model: CausalLM,
        layout: KVCacheLayout,
        pages: Sequence[torch.Tensor],
        arena: StateArena,
        names: Sequence[str],
        capture: GraphCapture | None,
    ) -> DeviceDrafts | None:
        """Drafter of the configured method; None without speculation. names: the draft model's step columns."""
        speculation, scheduler, draft = self._config.speculation, self._config.scheduler, self.draft_model
        if not speculation.max_drafts:
            return None
        depth, has_states = scheduler.queue_depth, bool(layout.state_groups)
        if draft is None and speculation.oracle is not None:
            return DeviceDrafts(arena, speculation, depth, has_states=has_states)
        if draft is None:
            most = path_length(speculation.max_drafts, depth)
            texts = HostTexts(
                scheduler.max_num_seqs,
                self._config.model.max_model_len + 1,
                make_finder(self._config, most, is_native=has_native_kernels()),
                depth - 1,
                follows_all=speculation.method != "ngram",
            )
            return DeviceTextDrafts(arena, speculation, depth, texts, has_states=has_states)
        own, group, num_rows, head = draft.config, self._draft_group, scheduler.max_num_seqs, draft.head
        settings = self._draft_settings if head is None else ExecutionSettings()
        own_layout, tables, own_size = layout, arena.draft_tables, own.vocab_size
        if draft.is_apart:
            first = len(model.cache_specs())
            own_layout = layers_of(layout, range(first, first + len(draft.model.cache_specs())))
        if head is not None:
            tables, own_size = replace(tables, token_shift=1), self._config.model.vocab_size
        backends = self.make_backends(own_layout, pages, own, group)
        backends = backends._replace(states=StateBackend(own_layout, {}))
        most_behind = MOST_BEHIND + 2 * speculation.max_drafts
        sizes = self._padded(settings, scheduler.max_num_batched_tokens + num_rows * most_behind)
        passes = DraftPasses(
            self._make_passes(draft.model, own, backends, settings, capture, group),
            DeviceInputs(arena, layout.block_size, *sizes, names, tables),
            backends,
            own_size,
            self._config.model.vocab_size,
            own.max_model_len,
            min((window for window in own.sliding_windows if window is not None), default=None),
        )
        if head is not None:
            return DeviceHeadDrafts(arena, speculation, depth, passes, num_rows, head, has_states=has_states)
        return DeviceModelDrafts(arena, speculation, depth, passes, num_rows, has_states=has_states)

    def offload_weights(self, model: CausalLM, encoder: VisionEncoder | None) -> DeviceWeights:
        draft = self.draft_model
        others = (draft.model if draft is not None and draft.is_apart else None, encoder)
        parts = [model, *(each for each in others if each is not None)]
        weights = DeviceWeights(parts, self._device, sum([each.weight_bytes() for each in parts]), self._memory)
        weights.release()
        return weights

    def release_reserve(self) -> None:
        self._memory.free()

    def _warm_up(
        self,
        compute: DeviceCompute,
        backends: DeviceBackends,
        layout: KVCacheLayout,
        launch: Callable[[StepPlan], object],
    ) -> None:
        model, scheduler = self._config.model, self._config.scheduler
        longest, max_num_tokens = model.max_model_len, scheduler.max_num_batched_tokens
        if scheduler.max_num_seqs > 1:
            warm_up_attention(compute.model, backends, compute.inputs, longest, max_num_tokens)
        if model.pooling is not None:
            for plan in pooling_plans(layout, scheduler.max_num_seqs, longest, max_num_tokens):
                launch(plan)
            compute.streams.synchronize()
            compute.passes.capture_at_start(compute.padding)
            return
        plans = warm_up_plans(layout, scheduler.max_num_seqs, longest, max_num_tokens)
        hidden = torch.zeros(2, compute.model.output_size, dtype=getattr(torch, model.dtype), device=self._device)
        warm_up(launch, compute, plans, compute.model.compute_logits(hidden))
        if self.adapters is not None:  # compiles their kernels of the head
            compute.model.compute_logits(hidden, torch.zeros(2, dtype=torch.int64, device=self._device))
        compute.passes.capture_at_start(compute.padding)
        if compute.columns.drafts is not None:
            compute.columns.drafts.prepare(max_num_tokens)

    def _make_passes(
        self,
        model: CausalLM,
        config: ModelConfig,
        backends: DeviceBackends,
        settings: ExecutionSettings,
        capture: GraphCapture | None,
        group: ProcessGroup,
        taps: tuple[int, ...] = (),
    ) -> CudaGraphRunner:
        attention = config.shape.attention
        counted = self.expert_counts if config is self._config.model else None
        shape = PassShape(
            attention_size=config.num_heads // group.size * max(attention.attended_dim, attention.value_dim),
            longest=config.max_model_len + 1,
            dtype=getattr(torch, config.dtype),
            device=self._device,
            num_rows=None if counted is None else counted.num_rows,
            taps=taps,
        )
        return CudaGraphRunner(model, backends, shape, settings, capture if settings.executions() else None)

    def make_capture(self) -> GraphCapture:
        return CudaGraphCapture()


def device_limits(device: torch.device) -> DeviceLimits:
    """Properties of a GPU (processors, shared memory) that determine kernels' tile shapes."""
    if device.type != "cuda":
        return DeviceLimits(num_multiprocessors=INTERPRETED_MULTIPROCESSORS)
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits((properties.major, properties.minor), properties.multi_processor_count)


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return "the host, interpreted"
    name: str = torch.cuda.get_device_name(device)
    return name
