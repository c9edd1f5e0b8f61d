"""Compilation of the kernels before the first request: each takes a second, once per machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from quire.kv_cache.layout import KVCacheLayout
from quire.models.interface import CausalLM
from quire.sampling.warm_up import warm_up as warm_up_sampler
from quire.sampling_params import SamplingParams
from quire.step import NewSequence, SequenceFork, SequenceSampling, StepPlan
from quire.worker.cuda_graphs import DeviceBackends
from quire.worker.platform.device_inputs import DeviceInputs
from quire.worker.platform.device_step import DeviceCompute

PROMPT_TOKENS = 40
GREEDY = SequenceSampling(SamplingParams(temperature=0.0), 0, [], [])


def pooling_plans(layout: KVCacheLayout, max_num_seqs: int, longest: int, budget: int) -> list[StepPlan]:
    """`warm_up_plans` for a pooling model: prompts of up to two sequences."""
    num_seqs = min(2, max_num_seqs)
    length = min(PROMPT_TOKENS, longest - 2, budget // num_seqs)
    if length < 1:
        return []
    tables, seq_ids = [[1] * -(-(length + 2) // group.block_size) for group in layout.groups], list(range(num_seqs))
    new = [NewSequence(seq_id, [0] * length, length, tables, GREEDY) for seq_id in seq_ids]
    lengths = [length] * num_seqs
    prompts = StepPlan(
        -1, seq_ids, [0] * num_seqs, lengths, seq_ids, seq_ids, new_sequences=new, pooled=list(range(num_seqs))
    )
    return [prompts, StepPlan(0, [], [], [], [], [], released=seq_ids)]


def warm_up_plans(layout: KVCacheLayout, max_num_seqs: int, longest: int, budget: int) -> list[StepPlan]:
    """Plans of every kind over two sequences and a fork: prompts, chunks beside single tokens, decoding. They leave the
    request state empty, as they need it; all tables name block 1. longest: maximum tokens of a sequence. budget: tokens
    of a step."""
    num_seqs = min(2, max_num_seqs)
    length = min(PROMPT_TOKENS, longest - 2, budget // num_seqs)
    if length < 1:
        return []
    tables = [[1] * -(-(length + 2) // group.block_size) for group in layout.groups]
    seq_ids = list(range(num_seqs))
    new = [NewSequence(seq_id, [0] * length, length, tables, GREEDY) for seq_id in seq_ids]
    forks = [SequenceFork(0, num_seqs, GREEDY)] if max_num_seqs > num_seqs else []
    copies = [(1, 2)] if layout.num_usable_blocks > 1 else []
    rows = [*seq_ids, *(fork.child for fork in forks)]
    lengths, places = [length] * num_seqs, [*seq_ids, *(0 for _ in forks)]
    prompts = StepPlan(
        -3, seq_ids, [0] * num_seqs, lengths, rows, places, new_sequences=new, forks=forks, block_copies=copies
    )
    if num_seqs == 1:
        return [prompts, StepPlan(-2, [0], [length], [1], [0], [0]), StepPlan(-1, [], [], [], [], [], released=rows)]
    # Recomputing known tokens serves as well as new ones.
    mixed = StepPlan(-2, seq_ids, [0, length], [length, 1], [1], [1])
    decoding = StepPlan(-1, seq_ids, [length, length + 1], [1, 1], seq_ids, seq_ids)
    return [prompts, mixed, decoding, StepPlan(0, [], [], [], [], [], released=rows)]


def warm_up_attention(
    model: CausalLM, backends: DeviceBackends, inputs: DeviceInputs, longest: int, max_tokens: int
) -> None:
    """Run padding-only passes of two sequences for each set of tiles that attention may need. longest: maximum tokens
    of a sequence. max_tokens: limit of a step."""
    for query_len, seq_len in backends.attention.lengths_to_compile(longest):
        num_tokens = 2 * query_len + 1
        if num_tokens <= max_tokens:
            batch, columns = inputs.padding(2, num_tokens)
            batch = replace(batch, max_query_len=query_len, max_seq_len=seq_len)
            model.forward(backends.forward_batch(columns, batch))


def warm_up(
    launch: Callable[[StepPlan], object], compute: DeviceCompute, plans: list[StepPlan], logits: torch.Tensor
) -> None:
    """Run the plans, then all variants of the sampler. logits: [2, vocab_size] from the model; overwritten."""
    for plan in plans:
        launch(plan)
    columns = compute.columns
    warm_up_sampler(compute.sampler, columns.sampling, columns.arena.parameters, compute.token_table, logits)
    compute.streams.synchronize()
