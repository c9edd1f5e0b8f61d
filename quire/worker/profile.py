"""The profiling pass: one step with dummy data, before the KV cache exists, for its memory or for its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.attention.interface import AttentionBackend, AttentionBatch
from quire.config.model import ModelConfig
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.models.interface import CausalLM
from quire.sampling.backend import make_sampler_backend
from quire.sampling.batch import SampleBatch
from quire.sampling.parameters import SamplingRows
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from quire.step import SequenceSampling
from quire.worker.input_batch import build_attention_batch
from quire.worker.kv_tensors import allocate_pages
from quire.worker.memory import measure_peak

if TYPE_CHECKING:
    from quire.kernels.cpu.runtime import NativeRuntime

PROFILED_TOKENS = 512
"""Tokens of the profiling step: enough for the growth to stand out from the allocator's noise."""

BackendFactory = Callable[[KVCacheLayout, Sequence[torch.Tensor]], AttentionBackend]


def measure_activations(
    model: CausalLM,
    make_backend: BackendFactory,
    config: ModelConfig,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    runtime: NativeRuntime | None,
) -> int:
    """Bytes that one step takes at its peak: a forward pass over the whole token budget in as few sequences as the
    context allows, then logits and random sampling for the most sequences.

    Measured as the growth of the resident memory; estimated where the system does not let a process measure that.
    What a forward pass takes grows with its tokens (at most: the attention's working memory is bounded), so it is
    measured on PROFILED_TOKENS and scaled: a pass over the whole budget would be most of a start's time.
    """
    num_tokens = min(max_num_batched_tokens, PROFILED_TOKENS)
    longest = min(num_tokens, config.max_model_len)
    forward_pass = dummy_pass(model, make_backend, block_size, num_tokens, longest)
    hidden = torch.zeros(0)

    def forward() -> None:
        nonlocal hidden
        hidden = forward_pass()

    def sample() -> None:
        _sample_dummy(model.compute_logits(hidden[:1].repeat(max_num_seqs, 1)), runtime)

    forward_peak, sample_peak = measure_peak(forward), measure_peak(sample)
    if forward_peak is None or sample_peak is None:
        return estimate_activations(config, max_num_batched_tokens, max_num_seqs)
    return forward_peak * -(-max_num_batched_tokens // num_tokens) + sample_peak


def dummy_pass(
    model: CausalLM, make_backend: BackendFactory, block_size: int, num_tokens: int, longest: int
) -> Callable[[], torch.Tensor]:
    """A forward pass over `num_tokens` in sequences of `longest`, with a small pool of its own; returns the hidden
    states."""
    groups, layers_per_group = group_layers(model.kv_specs(), block_size)
    layout = KVCacheLayout(block_size, 1 + -(-longest // block_size), groups, layers_per_group)
    pages = allocate_pages(layout)
    for page in pages:
        page.zero_()  # touched now, so that the scratch pool is not counted as activations
    backend = make_backend(layout, pages)
    batch = dummy_attention_batch(layout, num_tokens, longest)
    token_ids = torch.zeros(num_tokens, dtype=torch.int64)
    return lambda: model.forward(token_ids, batch.positions, backend.plan(batch))


def dummy_attention_batch(layout: KVCacheLayout, num_tokens: int, longest: int) -> AttentionBatch:
    """`num_tokens` new tokens in sequences of `longest` (the last may be shorter) that all use the blocks 1, 2, ...:
    the results are meaningless, the memory is that of a real step."""
    query_start = np.append(np.arange(0, num_tokens, longest), num_tokens)
    num_seqs = len(query_start) - 1
    sequence_index = np.repeat(np.arange(num_seqs), np.diff(query_start))
    positions = np.arange(num_tokens) - query_start[sequence_index]
    table = np.tile(np.arange(1, layout.num_blocks, dtype=np.int32), (num_seqs, 1))
    return build_attention_batch(
        query_start,
        np.zeros(num_seqs, np.int64),
        positions,
        sequence_index,
        (table,) * len(layout.groups),
        [group.block_size for group in layout.groups],
    )


def estimate_activations(config: ModelConfig, num_tokens: int, num_seqs: int) -> int:
    """A generous estimate of the peak in bytes, everything in float32: per token three copies of the widest
    intermediate, six of the hidden state and three of query, key and value; per sampled row five of the logits."""
    named = (config.hf.get(name) for name in ("intermediate_size", "ffn_dim", "n_inner"))
    intermediate = next((int(size) for size in named if size), 4 * config.hidden_size)
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = 6 * config.hidden_size + 3 * intermediate + 3 * heads
    return 4 * (num_tokens * per_token + 5 * num_seqs * config.vocab_size)


def _sample_dummy(logits: torch.Tensor, runtime: NativeRuntime | None) -> None:
    num_seqs = len(logits)
    rows = SamplingRows(num_seqs)
    sampling = SequenceSampling(SamplingParams(top_p=0.9), seed=0, stop_token_ids=[], bad_token_sequences=[])
    for row in range(num_seqs):
        rows.set(row, sampling)
    ones = np.ones(num_seqs, np.int64)
    batch = SampleBatch(np.arange(num_seqs), ones, ones, np.zeros((num_seqs, 1), np.int32))
    Sampler(rows, make_sampler_backend(rows, runtime)).sample(lambda: logits, batch)
