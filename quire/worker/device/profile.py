"""The profiling pass on a device: what weights, a step at the full budget, graphs and tables take of its memory; and
the time of a prompt's tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.attention.device_batch import DeviceBatch
from quire.config.model import ModelConfig
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.sizing import DeviceShare, MemoryProfile
from quire.models.interface import CausalLM
from quire.sampling.device.parameters import DeviceSamplingRows
from quire.utils.sizes import format_bytes
from quire.worker.device.cuda_graphs import DeviceBackend
from quire.worker.device.graph_dispatch import ExecutionSettings
from quire.worker.device.memory import DeviceMemory, arithmetic
from quire.worker.device.upload import NUM_DEVICE_BUFFERS, buffer_capacity
from quire.worker.memory import available_memory
from quire.worker.preemption_costs import fastest
from quire.worker.profile import PROFILED_TOKENS, estimate_activations

BackendFactory = Callable[[KVCacheLayout, Sequence[torch.Tensor]], DeviceBackend]

SAMPLER_COPIES = 3
"""Of the logits, in float32: what the sampler's kernels keep at once, beside the logits themselves."""
CONTEXT_BYTES = 640 << 20
"""Most that the CUDA context of this process has taken before anything could be measured: of what was in use then, so
much counts as this engine's; the rest is others'."""
GRAPH_BYTES_PER_LAYER = 256 * 2**10
"""An estimate of what the driver keeps for one layer's kernels in one graph."""
COLUMNS_PER_SEQUENCE = 7
"""Words of an upload: three columns of the batch, four of its samples."""


@dataclass(frozen=True)
class StepLimits:
    """Of the largest step: tokens and sequences. longest: tokens of one sequence."""

    block_size: int
    max_num_tokens: int
    max_num_seqs: int
    longest: int


def profile_device(
    model: CausalLM,
    make_backend: BackendFactory,
    config: ModelConfig,
    limits: StepLimits,
    settings: ExecutionSettings,
    memory: DeviceMemory,
    free_at_start: int,
    device: torch.device,
) -> MemoryProfile:
    """Run the largest steps there can be: a prompt's, over the whole token budget; a decode, of the most sequences; and
    their logits. free_at_start: bytes, before the weights were loaded.

    In Triton's interpreter, where the device is the host, activations are estimated instead. Raises
    InsufficientMemoryError when the pass itself does not fit.
    """
    available, total = memory.free(), memory.total()
    context = min(CONTEXT_BYTES, max(0, total - free_at_start)) if memory.is_measured else 0
    activations = estimate_activations(config, limits.max_num_tokens, limits.max_num_seqs)
    if memory.is_measured:
        purpose = f"a step of {limits.max_num_tokens} tokens (max_num_batched_tokens; about)"
        with arithmetic(memory, purpose, activations):
            activations = _measure(model, make_backend, limits, memory, device, config.vocab_size)
    return MemoryProfile(
        available=available,
        activations=activations,
        weights=model.weight_bytes(),
        device=DeviceShare(
            total=total,
            used=context + max(0, free_at_start - available),
            graphs=graph_bytes(config, settings, activations, limits.max_num_tokens),
            tables=table_bytes(limits, len(group_layers(model.kv_specs(), limits.block_size)[0])),
            host_available=available_memory(),
        ),
    )


def graph_bytes(config: ModelConfig, settings: ExecutionSettings, activations: int, max_num_tokens: int) -> int:
    """What is kept for CUDA graphs: the driver's share of each, which is estimated; the memory of the largest, which
    all share; and their static results."""
    sizes = (*settings.full_sizes, *settings.piecewise_sizes)
    if not sizes:
        return 0
    largest = max(sizes)
    results = largest * (config.hidden_size + config.num_heads * config.head_dim) * config.dtype_bytes
    shared = activations * largest // max_num_tokens
    return len(sizes) * config.num_layers * GRAPH_BYTES_PER_LAYER + shared + results


def table_bytes(limits: StepLimits, num_groups: int) -> int:
    """Rows of token ids and of block tables, and the inputs of a step: words of 4 and of 8 bytes; and the buffers that
    the inputs are copied to."""
    row = limits.longest + 1 + num_groups * -(-(limits.longest + 1) // limits.block_size)
    inputs = limits.max_num_tokens * (3 + num_groups)
    return 4 * limits.max_num_seqs * row + 8 * inputs + upload_bytes(limits, num_groups)


def upload_bytes(limits: StepLimits, num_groups: int) -> int:
    """The device buffers of uploads, for a step that spends its budget on new prompts and begins one more that is as
    long as may be. Many long prompts that the prefix cache holds can come in one step and need more: a copy of all rows
    as pairs, at most, which comes out of what gpu_memory_utilization leaves."""
    num_tokens = min(limits.max_num_tokens + limits.longest, limits.max_num_seqs * (limits.longest + 1))
    entries = num_groups * (num_tokens // limits.block_size + limits.max_num_seqs)
    written = num_tokens + entries + limits.max_num_seqs * DeviceSamplingRows.WIDTH
    num_words = 2 * written + COLUMNS_PER_SEQUENCE * limits.max_num_seqs
    return NUM_DEVICE_BUFFERS * 4 * buffer_capacity(num_words)


def _measure(
    model: CausalLM,
    make_backend: BackendFactory,
    limits: StepLimits,
    memory: DeviceMemory,
    device: torch.device,
    vocab_size: int,
) -> int:
    before = memory.free()
    prompt = dummy_pass(model, make_backend, limits, device, limits.max_num_tokens)
    decode = dummy_pass(model, make_backend, limits, device, limits.max_num_seqs, is_decode=True)
    for work in (prompt, decode):
        work()  # compiles kernels; libraries and the attention back end take workspaces
    kept = before - memory.free()

    def sample() -> None:
        copies.append(model.compute_logits(decode()))
        for _ in range(SAMPLER_COPIES):
            copies.append(torch.empty(limits.max_num_seqs, vocab_size, device=device))

    copies: list[torch.Tensor] = []
    peaks = [memory.measure_peak(work) for work in (prompt, sample)]
    return kept + max(peaks)


def dummy_pass(
    model: CausalLM,
    make_backend: BackendFactory,
    limits: StepLimits,
    device: torch.device,
    num_tokens: int,
    *,
    is_decode: bool = False,
) -> Callable[[], torch.Tensor]:
    """A forward pass over `num_tokens`, over a small pool of its own: in sequences as long as may be, or is_decode: one
    token each of sequences that are that long. Returns the hidden states."""
    groups, layers_per_group = group_layers(model.kv_specs(), limits.block_size)
    longest = limits.longest if is_decode else min(num_tokens, limits.longest)
    layout = KVCacheLayout(limits.block_size, 2, groups, layers_per_group)
    page_bytes = layout.block_bytes // layers_per_group
    pages = [
        torch.zeros(layout.num_blocks, page_bytes, dtype=torch.uint8, device=device) for _ in range(layers_per_group)
    ]
    backend = make_backend(layout, pages)
    batch = dummy_batch(layout, num_tokens, longest, device, is_decode=is_decode)
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    return lambda: model.forward(token_ids, batch.positions, backend.plan(batch))


def dummy_batch(
    layout: KVCacheLayout, num_tokens: int, longest: int, device: torch.device, *, is_decode: bool
) -> DeviceBatch:
    """Sequences that share one block, over and over: what they compute means nothing, what it takes is what a real step
    takes. Nothing is written: every slot is padding's."""
    if is_decode:
        starts = list(range(num_tokens + 1))
        positions = torch.full((num_tokens,), longest - 1)
    else:
        starts = [*range(0, num_tokens, longest), num_tokens]
        positions = torch.arange(num_tokens) % longest
    counts = [end - start for start, end in itertools.pairwise(starts)]
    lengths = [longest] * num_tokens if is_decode else counts
    slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    num_blocks = -(-longest // layout.block_size)
    table = torch.ones(len(counts), num_blocks, dtype=torch.int32, device=device)
    return DeviceBatch(
        num_seqs=len(counts),
        num_tokens=num_tokens,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        rows=torch.arange(len(counts), dtype=torch.int32, device=device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        positions=positions.to(device),
        slot_mapping=(slots,) * len(layout.groups),
        block_tables=(table,) * len(layout.groups),
    )


def time_device_prompt(
    model: CausalLM,
    make_backend: BackendFactory,
    limits: StepLimits,
    device: torch.device,
    synchronize: Callable[[], None],
) -> float:
    """Seconds for one token of a prompt that is computed many tokens at a time. synchronize: waits for the device."""
    num_tokens = min(limits.max_num_tokens, PROFILED_TOKENS)
    forward = dummy_pass(model, make_backend, limits, device, num_tokens)

    def work() -> None:
        forward()
        synchronize()

    return fastest(work) / num_tokens


def describe_memory(profile: MemoryProfile, utilization: float) -> str:
    """One line for people: what goes where."""
    budget, rule = profile.budget(utilization, 0)
    return f"{format_bytes(max(budget, 0))} for the KV cache = {rule}"
