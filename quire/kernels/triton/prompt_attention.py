"""Attention of long prompts on Hopper: one warp group copies, two multiply 64 rows each, the softmax of one beside the
other's products (FlashAttention-3, arXiv 2407.08608, section 3.1). Gluon has no interpreter."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.arguments import LayerAttention
from quire.kernels.triton.attention_core import score_constants
from quire.kernels.triton.attention_tiles import ROWS, Tiles
from quire.kernels.triton.paged_attention import BATCH_COLUMNS, PagedAttention, find_sequence, launch_over
from quire.kernels.triton.runtime import INTERPRETED, bind

GROUP_ROWS = ROWS // 2
HEAD_DIM = 128
"""Supported head sizes."""
COPYING_REGISTERS, MULTIPLYING_REGISTERS = 56, 224
"""Registers per thread of the copying and the multiplying warp groups."""


def allows_warp_groups(layer: LayerAttention, pages: torch.Tensor, dtype: torch.dtype) -> bool:
    """True for causal attention over all keys, with 16-bit pages of the queries' dtype. pages: [num_blocks, 2,
    block_size, num_kv_heads, head_dim]. dtype: the queries'."""
    group = layer.num_heads // layer.num_kv_heads
    return (
        not INTERPRETED
        and layer.window is None
        and layer.soft_cap is None
        and layer.sinks is None
        and pages.dtype == dtype
        and dtype.itemsize == 2
        and layer.head_dim == layer.value_width == HEAD_DIM
        and GROUP_ROWS % group == 0
    )


@gluon.jit
def _weights(scores, maximum, total, scale):
    """Advance the online softmax by a tile. scores: [64, BLOCK_N] float32. maximum, total: [64], before the tile.
    Returns the tile's weights relative to the new maximum, maximum, total, and factor of earlier sums.
    """
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale)
    nothing = gl.full(scores.shape, 0.0, gl.float32, scores.type.layout)
    weights = gl.exp2(gl.fma(scores, nothing + scale, nothing - gl.expand_dims(new_maximum, 1)))
    factor = gl.exp2(maximum - new_maximum)
    return weights, new_maximum, total * factor + gl.sum(weights, 1), factor


@gluon.jit
def _masked(scores, first_position, first_key, GROUP: gl.constexpr, SCORES: gl.constexpr):
    """Causal scores: -inf for keys after a row's position. first_position: the first token's. first_key: the tile's."""
    position = first_position + gl.arange(0, scores.shape[0], gl.SliceLayout(1, SCORES)) // GROUP
    key = first_key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, SCORES))
    return gl.where(gl.expand_dims(key, 0) <= gl.expand_dims(position, 1), scores, float("-inf"))


@gluon.jit
def _places(first_token, num_tokens, stride, kv_head, GROUP: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr,
            LAYOUT: gl.constexpr):  # fmt: skip
    """[ROWS, DIM] int64: offsets of the rows' elements in queries or results. stride: elements between tokens."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    token = first_token + gl.minimum(row // GROUP, num_tokens - 1)
    at = token.to(gl.int64) * stride + (kv_head * GROUP + row % GROUP) * DIM
    return gl.expand_dims(at, 1) + gl.expand_dims(dims, 0)


@gluon.jit
def _copy_tiles(pages, table, kv_head, end_key, num_tiles, keys, values, full_keys, full_values, empty_keys,
                empty_values, NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
                DIM: gl.constexpr, STAGES: gl.constexpr, COPIED: gl.constexpr):  # fmt: skip
    """Copying warp group: keys and values of each tile, last first, into the stages in turn. end_key: number of keys
    that the last row sees."""
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
def _wait_turn(turns, step, NUMBER: gl.constexpr):
    """Wait for warp group NUMBER's turn to issue a step's products: group 0, then 1."""
    mbarrier.wait(turns.index(NUMBER), (step & 1) ^ (1 - NUMBER))


@gluon.jit
def _step(step, weights, sums, factor, maximum, total, first_position, first_key, scale, queries, keys, values,
          full_keys, full_values, empty_keys, empty_values, turns, NUMBER: gl.constexpr, GROUP: gl.constexpr,
          BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
          num_warps: gl.constexpr):  # fmt: skip
    """Compute this step's scores and weights while the last step's `weights` multiply its values. sums: [64, DIM],
    earlier weighted values; factor: applied to them first. Returns weights, sums, factor, maximum and total for the
    next step."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, DIM, 16])
    stage = step % STAGES
    before = (step - 1) % STAGES
    no_scores = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    mbarrier.wait(full_keys.index(stage), (step // STAGES) & 1)
    mbarrier.wait(full_values.index(before), ((step - 1) // STAGES) & 1)
    fence_async_shared()
    _wait_turn(turns, step, NUMBER)
    sums = sums * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, VALUES)), 1)
    pending = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    sums = warpgroup_mma(weights, values.index(before), sums, is_async=True)
    mbarrier.arrive(turns.index(1 - NUMBER))
    scores = warpgroup_mma_wait(1, [pending])
    mbarrier.arrive(empty_keys.index(stage))
    if MASKED:
        scores = _masked(scores, first_position, first_key, GROUP, SCORES)
    weights, maximum, total, factor = _weights(scores, maximum, total, scale)
    sums = warpgroup_mma_wait(0, [sums])
    mbarrier.arrive(empty_values.index(before))
    weights = gl.convert_layout(weights.to(keys.dtype), gl.DotOperandLayout(0, VALUES, 2))
    return weights, sums, factor, maximum, total


@gluon.jit
def _multiply(query, out, begin, first, num_tokens_of_tile, kv_head, first_position, num_tiles, query_stride,
              out_stride, scale, queries, keys, values, full_keys, full_values, empty_keys, empty_values, turns,
              NUMBER: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr,
              STAGES: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Multiplying warp group NUMBER: 64 of the program's rows. begin: the sequence's first token in the batch. first:
    the program's, in the sequence."""
    ROWS: gl.constexpr = 64
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, DIM, 16])
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    own = queries.index(NUMBER)
    token = first + NUMBER * (ROWS // GROUP)
    num_tokens = num_tokens_of_tile - NUMBER * (ROWS // GROUP)
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
    _wait_turn(turns, 0, NUMBER)
    pending = warpgroup_mma(own, keys.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - NUMBER))
    scores = warpgroup_mma_wait(0, [pending])
    mbarrier.arrive(empty_keys.index(0))
    scores = _masked(scores, first_position, (num_tiles - 1) * BLOCK_N, GROUP, SCORES)
    maximum = gl.full([ROWS], -1.0e30, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    weights, maximum, total, factor = _weights(scores, maximum, total, scale)
    weights = gl.convert_layout(weights.to(keys.dtype), gl.DotOperandLayout(0, VALUES, 2))
    sums = gl.zeros([ROWS, DIM], gl.float32, VALUES)
    if num_tiles > 1:
        weights, sums, factor, maximum, total = _step(
            1, weights, sums, factor, maximum, total, first_position, (num_tiles - 2) * BLOCK_N, scale, own, keys,
            values, full_keys, full_values, empty_keys, empty_values, turns, NUMBER, GROUP, BLOCK_N, DIM, STAGES, True,
            num_warps,
        )  # fmt: skip
    for step in range(2, num_tiles):
        weights, sums, factor, maximum, total = _step(
            step, weights, sums, factor, maximum, total, first_position, 0, scale, own, keys, values, full_keys,
            full_values, empty_keys, empty_values, turns, NUMBER, GROUP, BLOCK_N, DIM, STAGES, False, num_warps,
        )  # fmt: skip
    last = num_tiles - 1
    mbarrier.wait(full_values.index(last % STAGES), (last // STAGES) & 1)
    fence_async_shared()
    sums = sums * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, VALUES)), 1)
    sums = warpgroup_mma(weights, values.index(last % STAGES), sums)
    sums = sums * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, VALUES)), 1)
    places = _places(begin + token, num_tokens, out_stride, kv_head, GROUP, ROWS, DIM, VALUES)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, VALUES))
    gl.store(out + places, sums.to(out.dtype.element_ty), mask=gl.expand_dims(row // GROUP < num_tokens, 1))


@gluon.jit(do_not_specialize=["num_seqs", "skipped"], do_not_specialize_on_alignment=BATCH_COLUMNS)
def _warp_group_kernel(query, pages, out, rows, query_start, seq_lens, tables, num_seqs, skipped, query_stride,
                       out_stride, table_stride, scale, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
                       DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
                       COPYING_REGISTERS: gl.constexpr, MULTIPLYING_REGISTERS: gl.constexpr,
                       num_warps: gl.constexpr):  # fmt: skip
    """Program (tile of 128 query rows, key head), last tiles first."""
    TOKENS: gl.constexpr = 128 // GROUP
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    element: gl.constexpr = pages.dtype.element_ty
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    kv_head = gl.program_id(1)
    sequence = find_sequence(query_start, tile, num_seqs, TOKENS)
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
        # All threads of the copying group arrive at a barrier, or one thread of each multiplying group.
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
            (_copy_tiles, (pages, table, kv_head, end_key, num_tiles, keys, values, full_keys, full_values, empty_keys,
                           empty_values, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, DIM, STAGES, COPIED)),
        ],
        [4, 4],
        [MULTIPLYING_REGISTERS, COPYING_REGISTERS],
    )  # fmt: skip


class WarpGroupAttention:
    """Kernel for one layer and its pages if `allows_warp_groups`; used like `VarlenAttention`."""

    def __init__(self, layer: LayerAttention, pages: torch.Tensor, tiles: Tiles) -> None:
        group = layer.num_heads // layer.num_kv_heads
        self._tokens = tiles.tokens(group)
        scale, _, _ = score_constants(layer)
        self._launch = bind(
            _warp_group_kernel,
            {"pages": pages, "scale": scale},
            NUM_KV_HEADS=layer.num_kv_heads,
            GROUP=group,
            DIM=layer.head_dim,
            BLOCK_SIZE=pages.shape[2],
            BLOCK_N=tiles.block_n,
            STAGES=tiles.num_stages,
            COPYING_REGISTERS=COPYING_REGISTERS,
            MULTIPLYING_REGISTERS=MULTIPLYING_REGISTERS,
            num_warps=tiles.num_warps,
        )

    def launch(self, work: PagedAttention, skipped: int) -> None:
        launch_over(self._launch, work, self._tokens, skipped)
