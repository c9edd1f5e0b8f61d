"""Prompt attention in Gluon with a warp group that copies and two that multiply: an experiment of `attention_sweep`.

One warp group copies tiles of keys and values from pages into shared memory. Each of the other two has 64 rows of
queries: it issues the products of a tile's keys and of the values of the tile before, then makes the softmax while the
other group's products run. They take turns at issuing. For Hopper, heads of 64 or 128, groups that divide 64, no
window, no soft cap, no sinks, pages of the queries' type.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from benchmarks.gpu.timing import Call
from quire.kernels.triton.attention_core import score_constants
from quire.kernels.triton.paged_attention import PagedAttention
from quire.kernels.triton.runtime import launch


@gluon.jit
def _find_sequence(query_start, tile, num_seqs, TOKENS: gl.constexpr):
    """As `paged_attention.find_sequence`."""
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if gl.load(query_start + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@gluon.jit
def _weights(scores, maximum, total, scale):
    """Weights relative to the new maximum, that maximum, the new total, and the factor of what was summed before."""
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale)
    nothing = gl.full(scores.shape, 0.0, gl.float32, scores.type.layout)
    weights = gl.exp2(gl.fma(scores, nothing + scale, nothing - gl.expand_dims(new_maximum, 1)))
    factor = gl.exp2(maximum - new_maximum)
    return weights, new_maximum, total * factor + gl.sum(weights, 1), factor


@gluon.jit
def _masked(scores, first_position, first_key, GROUP: gl.constexpr, SCORES: gl.constexpr):
    """Scores without those of keys behind a row's own position."""
    position = first_position + gl.arange(0, scores.shape[0], gl.SliceLayout(1, SCORES)) // GROUP
    key = first_key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, SCORES))
    return gl.where(gl.expand_dims(key, 0) <= gl.expand_dims(position, 1), scores, float("-inf"))


@gluon.jit
def _places(first_token, num_tokens, stride, kv_head, GROUP: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr,
            LAYOUT: gl.constexpr):  # fmt: skip
    """[ROWS, DIM] int64: where the elements of rows are; rows past the last token have its place."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    token = first_token + gl.minimum(row // GROUP, num_tokens - 1)
    at = token.to(gl.int64) * stride + (kv_head * GROUP + row % GROUP) * DIM
    return gl.expand_dims(at, 1) + gl.expand_dims(dims, 0)


@gluon.jit
def _produce(pages, table, kv_head, end_key, num_tiles, keys, values, full_keys, full_values, empty_keys, empty_values,
             NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr,
             STAGES: gl.constexpr, COPIED: gl.constexpr):  # fmt: skip
    """Copies keys and values, from the last tile to the first."""
    TOKEN: gl.constexpr = NUM_KV_HEADS * DIM
    keys_from = pages + kv_head * DIM
    dims = gl.arange(0, DIM, gl.SliceLayout(0, COPIED))
    offset = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPIED))
    key = gl.minimum((num_tiles - 1) * BLOCK_N + offset, end_key - 1)
    blocks = gl.load(table + key // BLOCK_SIZE)
    for step in range(num_tiles):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        at = blocks.to(gl.int64) * (2 * BLOCK_SIZE * TOKEN) + key % BLOCK_SIZE * TOKEN
        pointers = gl.expand_dims(keys_from + at, 1) + gl.expand_dims(dims, 0)
        key = gl.maximum((num_tiles - 2 - step), 0) * BLOCK_N + offset
        blocks = gl.load(table + key // BLOCK_SIZE)
        mbarrier.wait(empty_keys.index(stage), phase ^ 1)
        async_copy.async_copy_global_to_shared(keys.index(stage), pointers)
        async_copy.mbarrier_arrive(full_keys.index(stage), increment_count=False)
        mbarrier.wait(empty_values.index(stage), phase ^ 1)
        async_copy.async_copy_global_to_shared(values.index(stage), pointers + BLOCK_SIZE * TOKEN)
        async_copy.mbarrier_arrive(full_values.index(stage), increment_count=False)


@gluon.jit
def _turn(turns, step, GROUP_NUMBER: gl.constexpr):
    """Waits until this warp group may issue its products of a step."""
    mbarrier.wait(turns.index(GROUP_NUMBER), (step & 1) ^ (1 - GROUP_NUMBER))


@gluon.jit
def _step(step, operand, sums, maximum, total, first_position, first_key, scale, queries, keys, values, full_keys,
          full_values, empty_keys, empty_values, turns, NUMBER: gl.constexpr, GROUP: gl.constexpr,
          BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
          num_warps: gl.constexpr):  # fmt: skip
    """Scores of this step's keys, and sums over the values of the step before."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    stage = step % STAGES
    before = (step - 1) % STAGES
    no_scores = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    mbarrier.wait(full_keys.index(stage), (step // STAGES) & 1)
    mbarrier.wait(full_values.index(before), ((step - 1) // STAGES) & 1)
    fence_async_shared()
    _turn(turns, step, NUMBER)
    pending = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    sums_pending = warpgroup_mma(operand, values.index(before), sums, is_async=True)
    mbarrier.arrive(turns.index(1 - NUMBER))
    scores = warpgroup_mma_wait(1, [pending])
    mbarrier.arrive(empty_keys.index(stage))
    if MASKED:
        scores = _masked(scores, first_position, first_key, GROUP, SCORES)
    weights, maximum, total, factor = _weights(scores, maximum, total, scale)
    # The wait takes the total along, so that no compiler puts the softmax behind it.
    sums, total = warpgroup_mma_wait(0, [sums_pending, total])
    mbarrier.arrive(empty_values.index(before))
    sums = sums * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, VALUES)), 1)
    operand = gl.convert_layout(weights.to(keys.dtype), OPERAND)
    return operand, sums, maximum, total


@gluon.jit
def _multiply(query, out, begin, first, num_rows_tokens, kv_head, first_position, num_tiles, query_stride, out_stride,
              scale, queries, keys, values, full_keys, full_values, empty_keys, empty_values, turns,
              NUMBER: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr,
              STAGES: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """One warp group's 64 rows."""
    ROWS: gl.constexpr = 64
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    own = queries.index(NUMBER)
    token = first + NUMBER * (ROWS // GROUP)
    num_tokens = num_rows_tokens - NUMBER * (ROWS // GROUP)
    first_position = first_position + NUMBER * (ROWS // GROUP)
    places = _places(begin + token, num_tokens, query_stride, kv_head, GROUP, ROWS, DIM, COPIED)
    async_copy.async_copy_global_to_shared(own, query + places)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()

    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    mbarrier.wait(full_keys.index(0), 0)
    fence_async_shared()
    _turn(turns, 0, NUMBER)
    pending = warpgroup_mma(own, keys.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - NUMBER))
    scores = warpgroup_mma_wait(0, [pending])
    mbarrier.arrive(empty_keys.index(0))
    scores = _masked(scores, first_position, (num_tiles - 1) * BLOCK_N, GROUP, SCORES)
    maximum = gl.full([ROWS], -1.0e30, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    weights, maximum, total, _ = _weights(scores, maximum, total, scale)
    operand = gl.convert_layout(weights.to(keys.dtype), OPERAND)
    sums = gl.zeros([ROWS, DIM], gl.float32, VALUES)
    if num_tiles > 1:
        operand, sums, maximum, total = _step(
            1, operand, sums, maximum, total, first_position, (num_tiles - 2) * BLOCK_N, scale, own, keys, values,
            full_keys, full_values, empty_keys, empty_values, turns, NUMBER, GROUP, BLOCK_N, DIM, STAGES, True,
            num_warps,
        )  # fmt: skip
    for step in range(2, num_tiles):
        operand, sums, maximum, total = _step(
            step, operand, sums, maximum, total, first_position, 0, scale, own, keys, values, full_keys, full_values,
            empty_keys, empty_values, turns, NUMBER, GROUP, BLOCK_N, DIM, STAGES, False, num_warps,
        )  # fmt: skip
    last = num_tiles - 1
    mbarrier.wait(full_values.index(last % STAGES), (last // STAGES) & 1)
    fence_async_shared()
    sums = warpgroup_mma(operand, values.index(last % STAGES), sums)
    sums = sums * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, VALUES)), 1)
    places = _places(begin + token, num_tokens, out_stride, kv_head, GROUP, ROWS, DIM, VALUES)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, VALUES))
    gl.store(out + places, sums.to(out.dtype.element_ty), mask=gl.expand_dims(row // GROUP < num_tokens, 1))


@gluon.jit(do_not_specialize=["num_seqs", "skipped"])
def _specialised_kernel(query, pages, out, rows, query_start, seq_lens, tables, num_seqs, skipped, query_stride,
                        out_stride, table_stride, scale, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
                        DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
                        PRODUCER_REGISTERS: gl.constexpr, MULTIPLIER_REGISTERS: gl.constexpr,
                        num_warps: gl.constexpr):  # fmt: skip
    """Program (tile of 128 rows of queries, key head), the last tiles first."""
    TOKENS: gl.constexpr = 128 // GROUP
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    element: gl.constexpr = pages.dtype.element_ty
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    kv_head = gl.program_id(1)
    sequence = _find_sequence(query_start, tile, num_seqs, TOKENS)
    begin = gl.load(query_start + sequence)
    num_new = gl.load(query_start + sequence + 1) - begin
    seq_len = gl.load(seq_lens + sequence)
    table = tables + gl.load(rows + sequence).to(gl.int64) * table_stride
    first = (tile - begin // TOKENS - sequence) * TOKENS
    if (first >= num_new) | (num_new <= skipped):
        return
    num_tokens = gl.minimum(num_new - first, TOKENS)
    first_position = seq_len - num_new + first
    end_key = first_position + num_tokens
    num_tiles = (end_key + BLOCK_N - 1) // BLOCK_N
    keys = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, DIM], SHARED)
    values = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, DIM], SHARED)
    queries = gl.allocate_shared_memory(element, [2, 64, DIM], SHARED)
    full_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_keys.index(stage), count=128)
        mbarrier.init(full_values.index(stage), count=128)
        mbarrier.init(empty_keys.index(stage), count=2)
        mbarrier.init(empty_values.index(stage), count=2)
    for number in gl.static_range(2):
        mbarrier.init(turns.index(number), count=1)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_multiply, (query, out, begin, first, num_tokens, kv_head, first_position, num_tiles, query_stride,
                         out_stride, scale, queries, keys, values, full_keys, full_values, empty_keys, empty_values,
                         turns, gl.constexpr(0), GROUP, BLOCK_N, DIM, STAGES, num_warps)),
            (_multiply, (query, out, begin, first, num_tokens, kv_head, first_position, num_tiles, query_stride,
                         out_stride, scale, queries, keys, values, full_keys, full_values, empty_keys, empty_values,
                         turns, gl.constexpr(1), GROUP, BLOCK_N, DIM, STAGES, num_warps)),
            (_produce, (pages, table, kv_head, end_key, num_tiles, keys, values, full_keys, full_values, empty_keys,
                        empty_values, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, DIM, STAGES, COPIED)),
        ],
        [4, 4],
        [MULTIPLIER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def gluon_attention(work: PagedAttention, block_n: int, stages: int, producer: int, multiplier: int) -> Call:
    """The computation of `varlen_attention`. stages: tiles of keys, and of values, in shared memory. producer,
    multiplier: registers of a thread of either kind of warp group."""
    layer, batch = work.layer, work.batch
    group = layer.num_heads // layer.num_kv_heads
    scale, _, _ = score_constants(layer)
    constants: dict[str, Any] = {
        "NUM_KV_HEADS": layer.num_kv_heads,
        "GROUP": group,
        "DIM": layer.head_dim,
        "BLOCK_SIZE": work.pages.shape[2],
        "BLOCK_N": block_n,
        "STAGES": stages,
        "PRODUCER_REGISTERS": producer,
        "MULTIPLIER_REGISTERS": multiplier,
        "num_warps": 4,
    }
    return partial(
        launch,
        _specialised_kernel,
        (batch.num_tokens // (128 // group) + batch.num_seqs, layer.num_kv_heads),
        work.query,
        work.pages,
        work.out,
        batch.rows,
        batch.query_start,
        batch.seq_lens,
        work.tables,
        batch.num_seqs,
        0,
        work.query.stride(0),
        work.out.stride(0),
        work.tables.stride(0),
        scale,
        **constants,
    )
