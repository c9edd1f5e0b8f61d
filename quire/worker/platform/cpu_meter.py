"""Memory measurement on a CPU, where everything is memory of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.attention.interface import AttentionBatch
from quire.kv_cache.deal import ALL_TOKENS, Deal
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.sizing import DeviceShare
from quire.models.interface import CausalLM
from quire.sampling.batch import SampleBatch
from quire.sampling.kernels import SamplingKernels
from quire.sampling.parameters import SamplingRows
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from quire.step import SequenceSampling
from quire.worker.block_tables import BlockTables, table_shapes
from quire.worker.input_batch import InputBatch
from quire.worker.kv_tensors import allocate_pages
from quire.worker.memory_profile import dummy_columns
from quire.worker.platform.cpu_inputs import CacheBackends, prepare_inputs
from quire.worker.platform.host_memory import available_memory, measure_peak
from quire.worker.platform.interface import StepLimits

PROFILED_TOKENS, PROFILED_ROWS = 64, 16
"""Tokens and sampled rows of the profiling step: enough to stand out from allocator noise."""

BackendFactory = Callable[[KVCacheLayout, Sequence[torch.Tensor]], CacheBackends]


class CpuMeter:
    """Measures a CPU's memory in bytes, to size the pools (MemoryMeter)."""

    def __init__(
        self,
        make_backends: BackendFactory,
        make_sampling_kernels: Callable[[SamplingRows], SamplingKernels[np.ndarray]],
        *,
        samples_tokens: bool = True,
        deal: Deal = ALL_TOKENS,
    ) -> None:
        """samples_tokens: True if the largest step samples for every sequence; False for pooling models. deal: share of
        the tokens that this rank keeps (None: all)."""
        self._make_backends = make_backends
        self._make_sampling_kernels = make_sampling_kernels
        self._samples_tokens = samples_tokens
        self._deal = deal

    def free(self) -> int:
        return available_memory()

    def step_bytes(self, model: CausalLM, limits: StepLimits, estimate: int) -> int | None:
        """Rise of resident memory in a forward pass over the token budget in the fewest sequences, then logits and
        sampling for the most. Measured with PROFILED_TOKENS and PROFILED_ROWS at most, and scaled up. None: not
        measurable."""
        num_tokens = min(limits.max_num_tokens, PROFILED_TOKENS)
        num_rows = min(limits.max_num_rows, PROFILED_ROWS)
        prompt = InputBatch.dummy_prompts(num_tokens, min(num_tokens, limits.longest))
        forward_pass = self.dummy_pass(model, limits, prompt)
        hidden = torch.zeros(0)

        def forward() -> None:
            nonlocal hidden
            hidden = forward_pass()

        def sample() -> None:
            if self._samples_tokens:
                self._sample(model.compute_logits(hidden[:1].repeat(num_rows, 1)))

        forward_peak, sample_peak = measure_peak(forward), measure_peak(sample)
        if forward_peak is None or sample_peak is None:
            return None
        passes = forward_peak * -(-limits.max_num_tokens // num_tokens)
        return passes + sample_peak * -(-limits.max_num_rows // num_rows)

    def device_share(self, model: CausalLM, limits: StepLimits, available: int, activations: int) -> DeviceShare | None:
        return None

    def dummy_pass(self, model: CausalLM, limits: StepLimits, batch: InputBatch) -> Callable[[], torch.Tensor]:
        groups, layers_per_group = group_layers(model.cache_specs(), limits.block_size)
        num_blocks = 1 + max([-(-batch.max_seq_len // group.block_size) for group in groups])
        layout = KVCacheLayout(limits.block_size, num_blocks, groups, layers_per_group)
        pages = allocate_pages(layout)
        for page in pages:
            page.zero_()  # touched now, so that the scratch pool is not counted as activations
        backends = self._make_backends(layout, pages)
        token_ids, attention = dummy_inputs(batch, layout, self._deal)
        columns = dummy_columns(model.columns, token_ids)
        return lambda: model.forward(backends.forward_batch(token_ids, attention, columns=columns)).hidden

    def _sample(self, logits: torch.Tensor) -> None:
        num_seqs = len(logits)
        rows = SamplingRows(num_seqs)
        sampling = SequenceSampling(SamplingParams(top_p=0.9), seed=0, stop_token_ids=[], bad_token_sequences=[])
        for row in range(num_seqs):
            rows.set(row, sampling)
        index, ones = np.arange(num_seqs), np.ones(num_seqs, np.int64)
        batch: SampleBatch[np.ndarray] = SampleBatch(index, index, ones, ones, np.zeros((num_seqs, 2), np.int32))
        Sampler(rows, self._make_sampling_kernels(rows)).sample(logits, batch)


def dummy_inputs(
    batch: InputBatch, layout: KVCacheLayout, deal: Deal = ALL_TOKENS
) -> tuple[torch.Tensor, AttentionBatch]:
    """Token ids and attention batch of sequences that all use the blocks 1, 2, ..."""
    num_seqs, longest = len(batch.rows), batch.max_seq_len
    tables = BlockTables(table_shapes(layout, deal), num_seqs, longest)
    blocks = [range(1, min(layout.num_blocks, 1 - (-longest // group.block_size))) for group in layout.groups]
    for row in range(num_seqs):
        tables.append(row, blocks)
    return prepare_inputs(batch, np.zeros((num_seqs, longest), np.int32), tables)
