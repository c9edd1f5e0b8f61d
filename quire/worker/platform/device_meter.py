from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.attention.device_batch import DeviceBatch, HostColumns, TokenColumns
from quire.config.model import ModelConfig
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.sizing import DeviceShare
from quire.models.interface import CausalLM
from quire.sampling.parameters import NUM_WORDS
from quire.worker.cuda_graphs import DeviceBackends
from quire.worker.graph_dispatch import ExecutionSettings
from quire.worker.input_batch import InputBatch
from quire.worker.memory_profile import dummy_columns
from quire.worker.platform.device_memory import DeviceMemory, arithmetic
from quire.worker.platform.host_memory import available_memory
from quire.worker.platform.interface import StepLimits
from quire.worker.platform.upload import NUM_DEVICE_BUFFERS, buffer_capacity

BackendFactory = Callable[[KVCacheLayout, Sequence[torch.Tensor]], DeviceBackends]

SAMPLER_COPIES = 3
"""float32 copies of the logits that the sampler keeps at once."""
CONTEXT_BYTES = 640 << 20
"""Maximum bytes of memory in use before measuring that count as this process's CUDA context."""
GRAPH_BYTES_PER_LAYER = 256 * 2**10
"""Estimated bytes that the driver keeps per layer and graph."""
COLUMNS_PER_SEQUENCE = 8
"""Upload words per sequence: four columns of the batch, four of its samples."""


class DeviceMeter:
    """Measures a GPU's memory in bytes (MemoryMeter); nothing in Triton's interpreter."""

    def __init__(
        self,
        make_backends: BackendFactory,
        config: ModelConfig,
        settings: ExecutionSettings,
        memory: DeviceMemory,
        free_at_start: int,
        device: torch.device,
        num_ranks: int = 1,
    ) -> None:
        """free_at_start: bytes before the weights were loaded. num_ranks: ranks that share each layer."""
        self._make_backends = make_backends
        self._config = config
        self._settings = settings
        self._memory = memory
        self._free_at_start = free_at_start
        self._device = device
        self._num_ranks = num_ranks

    def free(self) -> int:
        return self._memory.free()

    def step_bytes(self, model: CausalLM, limits: StepLimits, estimate: int) -> int | None:
        """Peak bytes of the largest dummy steps (the whole token budget; most sequences, with logits); None: not
        measurable. estimate: approximate result, for errors."""
        memory = self._memory
        if not memory.is_measured:
            return None
        purpose = f"a step of {limits.max_num_tokens} tokens (max_num_batched_tokens; about)"
        with arithmetic(memory, purpose, estimate):
            before = memory.free()
            longest = min(limits.max_num_tokens, limits.longest)
            prompt = self.dummy_pass(model, limits, InputBatch.dummy_prompts(limits.max_num_tokens, longest))
            decode = self.dummy_pass(model, limits, InputBatch.dummy_decodes(limits.max_num_seqs, limits.longest))
            for work in (prompt, decode):
                work()  # first run: compiles kernels, and allocates workspaces of libraries and attention
            kept = before - memory.free()

            def sample() -> None:
                hidden = decode()
                if self._config.pooling is not None:
                    return
                copies.append(model.compute_logits(hidden[:1].repeat(limits.max_num_rows, 1)))
                for _ in range(SAMPLER_COPIES):
                    copies.append(torch.empty(limits.max_num_rows, self._config.vocab_size, device=self._device))

            copies: list[torch.Tensor] = []
            return kept + max([memory.measure_peak(work) for work in (prompt, sample)])

    def device_share(self, model: CausalLM, limits: StepLimits, available: int, activations: int) -> DeviceShare:
        memory, free_at_start = self._memory, self._free_at_start
        total = memory.total()
        context = min(CONTEXT_BYTES, max(0, total - free_at_start)) if memory.is_measured else 0
        return DeviceShare(
            total=total,
            used=context + max(0, free_at_start - available),
            graphs=graph_bytes(self._config, self._settings, activations, limits.max_num_tokens, self._num_ranks),
            tables=table_bytes(
                limits, len(group_layers(model.cache_specs(), limits.block_size)[0]), len(model.columns)
            ),
            host_available=available_memory(),
        )

    def dummy_pass(self, model: CausalLM, limits: StepLimits, batch: InputBatch) -> Callable[[], torch.Tensor]:
        groups, layers_per_group = group_layers(model.cache_specs(), limits.block_size)
        layout = KVCacheLayout(limits.block_size, 2, groups, layers_per_group)
        shape = (layout.num_blocks, layout.page_bytes)
        pages = [torch.zeros(shape, dtype=torch.uint8, device=self._device) for _ in range(layers_per_group)]
        backends = self._make_backends(layout, pages)
        dummy = dummy_batch(layout, batch, self._device)
        token_ids = torch.zeros(dummy.num_tokens, dtype=torch.int64, device=self._device)
        columns = TokenColumns(token_ids, dummy_columns(model.columns, token_ids))
        return lambda: model.forward(backends.forward_batch(columns, dummy)).hidden


def graph_bytes(
    config: ModelConfig, settings: ExecutionSettings, activations: int, max_num_tokens: int, num_ranks: int = 1
) -> int:
    """Bytes for CUDA graphs: the driver's estimated share of each, the largest one's memory, and static results."""
    sizes = [each.num_tokens for each in settings.executions()]
    if not sizes:
        return 0
    largest = max(sizes)
    attended = config.num_heads // num_ranks * config.shape.attention.attended_dim
    results = largest * (config.hidden_size + attended) * config.dtype_bytes
    shared = activations * largest // max_num_tokens
    return len(sizes) * config.num_layers * GRAPH_BYTES_PER_LAYER + shared + results


def table_bytes(limits: StepLimits, num_groups: int, num_columns: int = 0) -> int:
    """Bytes of token ids, block tables, column values, a step's inputs, and the upload buffers."""
    row = num_columns + limits.longest + 1 + num_groups * -(-(limits.longest + 1) // limits.block_size)
    inputs = limits.max_num_tokens * (3 + num_groups + num_columns)
    return 4 * limits.max_num_seqs * row + 8 * inputs + upload_bytes(limits, num_groups)


def upload_bytes(limits: StepLimits, num_groups: int) -> int:
    """Bytes of the device's upload buffers, for a step that spends its budget on new prompts and starts one more of
    maximum length."""
    num_tokens = min(limits.max_num_tokens + limits.longest, limits.max_num_seqs * (limits.longest + 1))
    entries = num_groups * (num_tokens // limits.block_size + limits.max_num_seqs)
    written = num_tokens + entries + limits.max_num_seqs * NUM_WORDS
    num_words = 2 * written + COLUMNS_PER_SEQUENCE * limits.max_num_seqs
    return NUM_DEVICE_BUFFERS * 4 * buffer_capacity(num_words)


def dummy_batch(layout: KVCacheLayout, batch: InputBatch, device: torch.device) -> DeviceBatch:
    """Sequences that share one block. Token slots are padding; states are written."""

    def column(values: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.from_numpy(values).to(device, dtype)

    num_seqs, num_tokens = len(batch.rows), batch.num_tokens
    entries = [
        -(-batch.max_seq_len // size) for size in (layout.block_size, *(g.block_size for g in layout.state_groups))
    ]
    table, *state_tables = [torch.ones(num_seqs, count, dtype=torch.int32, device=device) for count in entries]
    slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    return DeviceBatch(
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        rows=column(batch.rows),
        query_start=column(batch.query_start),
        seq_lens=column(batch.ends),
        slot_positions=column(batch.positions, torch.int64),
        slot_mapping=(slots,) * len(layout.token_groups),
        block_tables=(table,) * len(layout.token_groups),
        state_tables=tuple(state_tables),
        host=HostColumns(batch.query_start, batch.starts),
    )
