"""Prompt attention in Gluon, where the order of products is the programmer's: an experiment of `attention_sweep`.

The products of a tile's queries and keys are issued before those of the last tile's weights and values, and the softmax
runs while the latter are made. Its only shapes are whole tiles: heads of a power of two, no window, no soft cap, and
lengths and first positions that are multiples of BLOCK_N.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from benchmarks.gpu.timing import Call
from quire.kernels.triton.attention_core import score_constants
from quire.kernels.triton.paged_attention import PagedAttention
from quire.kernels.triton.runtime import launch

TILE_ROWS = 128


@gluon.jit
def _copy_tile(smem, pages, blocks, BLOCK_SIZE: gl.constexpr, TOKEN: gl.constexpr, BLOCK_N: gl.constexpr,
               DIM: gl.constexpr, COPIED: gl.constexpr):  # fmt: skip
    """One tile of keys, or of values, from pages into shared memory. blocks: [BLOCK_N], of each key."""
    key = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPIED))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, COPIED))
    at = blocks.to(gl.int64) * (2 * BLOCK_SIZE * TOKEN) + key % BLOCK_SIZE * TOKEN
    async_copy.async_copy_global_to_shared(smem, gl.expand_dims(pages + at, 1) + gl.expand_dims(dims, 0))


@gluon.jit
def _blocks(table, tile, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, COPIED: gl.constexpr):
    """Physical blocks of the keys of a tile; of tile 0 before it."""
    key = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPIED))
    return gl.load(table + (gl.maximum(tile, 0) * BLOCK_N + key) // BLOCK_SIZE)


@gluon.jit
def _wait_for_copies(LATER: gl.constexpr):
    """For all but the LATER last groups, of all threads, as products will read them."""
    async_copy.wait_group(LATER)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _weights(scores, maximum, total, scale):
    """Weights relative to the new maximum, that maximum, the new total, and the factor of what was summed before."""
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale)
    nothing = gl.full(scores.shape, 0.0, gl.float32, scores.type.layout)
    weights = gl.exp2(gl.fma(scores, nothing + scale, nothing - gl.expand_dims(new_maximum, 1)))
    factor = gl.exp2(maximum - new_maximum)
    return weights, new_maximum, total * factor + gl.sum(weights, 1), factor


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
def _causal(scores, first_position, first_key, GROUP: gl.constexpr, SCORES: gl.constexpr):
    """Scores of the tile of keys that the rows' own tokens are in."""
    position = first_position + gl.arange(0, scores.shape[0], gl.SliceLayout(1, SCORES)) // GROUP
    key = first_key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, SCORES))
    return gl.where(gl.expand_dims(key, 0) <= gl.expand_dims(position, 1), scores, float("-inf"))


@gluon.jit
def _places(first_token, stride, kv_head, GROUP: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr,
            LAYOUT: gl.constexpr):  # fmt: skip
    """[ROWS, DIM] int64: where the elements of a tile's rows are."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    at = (first_token + row // GROUP).to(gl.int64) * stride + (kv_head * GROUP + row % GROUP) * DIM
    return gl.expand_dims(at, 1) + gl.expand_dims(dims, 0)


@gluon.jit(do_not_specialize=["num_seqs"])
def _gluon_kernel(query, pages, out, rows, query_start, seq_lens, tables, num_seqs, query_stride, out_stride,
                  table_stride, scale, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
                  BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Program (tile of queries, key head), the last tiles first."""
    BLOCK_M: gl.constexpr = 128
    STAGES: gl.constexpr = 2
    TOKENS: gl.constexpr = BLOCK_M // GROUP
    TOKEN: gl.constexpr = NUM_KV_HEADS * DIM
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
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
    if first >= num_new:
        return
    first_position = seq_len - num_new + first
    num_tiles = (first_position + TOKENS - 1) // BLOCK_N + 1
    keys_from = pages + kv_head * DIM
    values_from = keys_from + BLOCK_SIZE * TOKEN
    keys = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, DIM], SHARED)
    values = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, DIM], SHARED)
    queries = gl.allocate_shared_memory(element, [BLOCK_M, DIM], SHARED)

    # Of step s: values of tile s - 1 and keys of tile s + 1, one group; tiles from the last to the first.
    blocks = _blocks(table, num_tiles - 1, BLOCK_SIZE, BLOCK_N, COPIED)
    next_blocks = _blocks(table, num_tiles - 2, BLOCK_SIZE, BLOCK_N, COPIED)
    places = _places(begin + first, query_stride, kv_head, GROUP, BLOCK_M, DIM, COPIED)
    async_copy.async_copy_global_to_shared(queries, query + places)
    _copy_tile(keys.index(0), keys_from, blocks, BLOCK_SIZE, TOKEN, BLOCK_N, DIM, COPIED)
    async_copy.commit_group()
    _copy_tile(values.index(0), values_from, blocks, BLOCK_SIZE, TOKEN, BLOCK_N, DIM, COPIED)
    _copy_tile(keys.index(1), keys_from, next_blocks, BLOCK_SIZE, TOKEN, BLOCK_N, DIM, COPIED)
    async_copy.commit_group()
    blocks = next_blocks
    next_blocks = _blocks(table, num_tiles - 3, BLOCK_SIZE, BLOCK_N, COPIED)

    no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    _wait_for_copies(1)
    scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), no_scores, use_acc=False)
    scores = _causal(scores, first_position, (num_tiles - 1) * BLOCK_N, GROUP, SCORES)
    maximum = gl.full([BLOCK_M], -1.0e30, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, SCORES))
    weights, maximum, total, factor = _weights(scores, maximum, total, scale)
    operand = gl.convert_layout(weights.to(element), OPERAND)
    sums = gl.zeros([BLOCK_M, DIM], gl.float32, VALUES)

    for step in range(1, num_tiles):
        # Keys of this step and values of the one before.
        _wait_for_copies(0)
        pending = warpgroup_mma(
            queries, keys.index(step % STAGES).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        sums_pending = warpgroup_mma(operand, values.index((step - 1) % STAGES), sums, is_async=True)
        _copy_tile(values.index(step % STAGES), values_from, blocks, BLOCK_SIZE, TOKEN, BLOCK_N, DIM, COPIED)
        _copy_tile(keys.index((step + 1) % STAGES), keys_from, next_blocks, BLOCK_SIZE, TOKEN, BLOCK_N, DIM, COPIED)
        async_copy.commit_group()
        blocks = next_blocks
        next_blocks = _blocks(table, num_tiles - 3 - step, BLOCK_SIZE, BLOCK_N, COPIED)
        scores = warpgroup_mma_wait(1, [pending])
        weights, maximum, total, factor = _weights(scores, maximum, total, scale)
        sums = warpgroup_mma_wait(0, [sums_pending])
        sums = sums * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, VALUES)), 1)
        operand = gl.convert_layout(weights.to(element), OPERAND)

    _wait_for_copies(0)
    sums = warpgroup_mma(operand, values.index((num_tiles - 1) % STAGES), sums)
    sums = sums * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, VALUES)), 1)
    places = _places(begin + first, out_stride, kv_head, GROUP, BLOCK_M, DIM, VALUES)
    gl.store(out + places, sums.to(out.dtype.element_ty))


def gluon_attention(work: PagedAttention, block_n: int, num_warps: int) -> Call:
    """What `varlen_attention` computes."""
    layer, batch = work.layer, work.batch
    group = layer.num_heads // layer.num_kv_heads
    scale, _, _ = score_constants(layer)
    constants: dict[str, Any] = {
        "NUM_KV_HEADS": layer.num_kv_heads,
        "GROUP": group,
        "DIM": layer.head_dim,
        "BLOCK_SIZE": work.pages.shape[2],
        "BLOCK_N": block_n,
        "num_warps": num_warps,
    }
    return partial(
        launch,
        _gluon_kernel,
        (batch.num_tokens // (TILE_ROWS // group) + batch.num_seqs, layer.num_kv_heads),
        work.query,
        work.pages,
        work.out,
        batch.rows,
        batch.query_start,
        batch.seq_lens,
        work.tables,
        batch.num_seqs,
        work.query.stride(0),
        work.out.stride(0),
        work.tables.stride(0),
        scale,
        **constants,
    )
