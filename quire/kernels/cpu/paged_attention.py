"""Native paged attention: supported shapes, and the plan of a step. For the block layout see csrc/attention.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.attention.interface import AttentionBatch
from quire.config.device import NATIVE_HEAD_LIMIT, NATIVE_HEAD_MULTIPLE, why_no_index, why_no_latents
from quire.errors import ConfigError
from quire.kernels.cpu import _native
from quire.kv_cache.deal import ALL_TOKENS, Deal
from quire.kv_cache.layout import FOREIGN_LAYER, KVCacheLayout
from quire.kv_cache.spec import LatentSpec

CACHE_TYPES = {
    "float32": _native.CacheType.F32,
    "bfloat16": _native.CacheType.BF16,
    "int8": _native.CacheType.I8,
    "fp8": _native.CacheType.E4M3,
}
MAX_BLOCK_SIZE = 1024


def check_shape(block_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise ConfigError unless block_size is a power of two up to 1024, head_dim a multiple of 8 up to 256, and query
    heads divisible by key heads."""
    if not 1 <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise ConfigError(f"native attention needs a block size that is a power of two up to 1024, not {block_size}")
    if not NATIVE_HEAD_MULTIPLE <= head_dim <= NATIVE_HEAD_LIMIT or head_dim % NATIVE_HEAD_MULTIPLE:
        raise ConfigError(f"native attention needs a head dimension that is a multiple of 8 up to 256, not {head_dim}")
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} query heads cannot share {num_kv_heads} key/value heads evenly")


def check_latent(rank: int, rope_dim: int) -> None:
    reason = why_no_latents(rank, rope_dim)
    if reason is not None:
        raise ConfigError(f"attention_backend='native' is not possible: {reason}", param="attention_backend")


def check_index(num_heads: int, dim: int, top: int) -> None:
    reason = why_no_index(num_heads, dim, top)
    if reason is not None:
        raise ConfigError(f"attention_backend='native' is not possible: {reason}", param="attention_backend")


def block_bytes(block_size: int, num_kv_heads: int, head_dim: int, cache_dtype: str) -> int:
    """Bytes of a layer's block; equals `AttentionSpec.page_bytes`. cache_dtype: key of CACHE_TYPES. Raises
    ConfigError for unsupported shapes."""
    check_shape(block_size, num_kv_heads, num_kv_heads, head_dim)
    return _native.block_bytes(block_size, num_kv_heads, head_dim, CACHE_TYPES[cache_dtype])


class AttentionPlans:
    """Native plans of the KV groups with keys and values, set before each step's programs."""

    def __init__(self, layout: KVCacheLayout, num_heads: int, num_threads: int, deal: Deal = ALL_TOKENS) -> None:
        """num_heads: query heads per layer. num_threads: threads that run the plans. deal: tokens that this rank keeps
        in dealt groups, where it attends with all ranks' heads."""
        self.plans = []
        for group in layout.token_groups:
            spec = group.spec
            num_blocks = layout.num_blocks * layout.kernel_blocks(group)
            shape = spec.page_shape(layout.block_size)
            dealing = deal if spec.dealt_to > 1 else ALL_TOKENS
            dealt = {"ranks": dealing.num_ranks, "rank": dealing.rank, "run": dealing.run}
            heads = num_heads * dealing.num_ranks
            if isinstance(spec, LatentSpec):
                plan = _native.AttentionPlan(
                    layout.block_size, num_blocks, heads, 1, 0, num_threads, latent=True, top=spec.top, **dealt
                )
                self.plans.append(plan)
                continue
            if len(shape) != 4:
                raise ConfigError(
                    f"the native kernels do not compute layers of kind {spec.kind!r} with pages of {shape}"
                )
            _, size, num_kv_heads, head_dim = shape
            if all(layer == FOREIGN_LAYER for layer in group.layers):
                heads = num_kv_heads
            check_shape(size, heads, num_kv_heads, head_dim)
            self.plans.append(
                _native.AttentionPlan(
                    size,
                    num_blocks,
                    heads,
                    num_kv_heads,
                    spec.window or 0,
                    num_threads,
                    chunked=spec.kind == "chunked",
                    **dealt,
                )
            )
        self._batch: AttentionBatch | None = None

    def set(self, batch: AttentionBatch) -> list[_native.AttentionPlan]:
        """Plans of one step by KV group, valid until the next call; the batch's tensors must not change meanwhile.
        Raises ValueError for wrong tensors and accesses outside the pool."""
        starts, positions = batch.query_start, batch.start_positions
        num_sequences = positions.shape[0]
        _check(starts, torch.int64, (num_sequences + 1,), "query starts")
        _check(positions, torch.int64, (num_sequences,), "start positions")
        num_rows = int(starts[-1])
        for plan, table, slots in zip(self.plans, batch.block_tables, batch.slot_mapping, strict=True):
            if table.dtype != torch.int32 or table.dim() != 2 or len(table) != num_sequences or table.stride(1) != 1:
                raise ValueError(f"block tables: int32 rows of {num_sequences} sequences expected")
            _check(slots, torch.int64, (num_rows,), "slots")
            plan.set(
                num_sequences,
                starts.data_ptr(),
                positions.data_ptr(),
                table.data_ptr(),
                table.shape[1],
                table.stride(0),
                slots.data_ptr(),
            )
            if batch.last_seen is not None:
                _check(batch.last_seen, torch.int64, (num_rows,), "last positions")
                plan.see_ahead(batch.last_seen.data_ptr())
        self._batch = batch
        return self.plans


def copy_blocks(
    pool: _native.Pool,
    pages: Sequence[torch.Tensor],
    page_block_bytes: int,
    num_blocks: int,
    copies: Sequence[tuple[int, int]],
) -> None:
    """Copy blocks by (source, destination) in every page; all sources are read first. pages: contiguous, num_blocks
    blocks of page_block_bytes. Raises ValueError for wrong sizes, invalid blocks and repeated destinations."""
    if not copies:
        return
    for page in pages:
        if not page.is_contiguous() or page.nbytes != num_blocks * page_block_bytes:
            raise ValueError(f"a page of {num_blocks} blocks of {page_block_bytes} bytes expected")
    pairs = torch.tensor(copies, dtype=torch.int64)
    addresses = [page.data_ptr() for page in pages]
    _native.copy_blocks(pool, addresses, page_block_bytes, num_blocks, pairs.data_ptr(), len(copies))


def move_blocks(
    sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy blocks by (source, destination) from each page to its counterpart elsewhere, on one thread without the GIL.
    sources, destinations: contiguous uint8 [num_blocks, block bytes]. Raises ValueError for other pages and invalid
    blocks."""
    if not pairs:
        return
    (num_sources, block_bytes), num_destinations = sources[0].shape, len(destinations[0])
    for pages, num_blocks in ((sources, num_sources), (destinations, num_destinations)):
        for page in pages:
            _check(page, torch.uint8, (num_blocks, block_bytes), "page")
    table = torch.tensor(pairs, dtype=torch.int64)
    _native.move_blocks(
        [page.data_ptr() for page in sources],
        [page.data_ptr() for page in destinations],
        block_bytes,
        num_sources,
        num_destinations,
        table.data_ptr(),
        len(pairs),
    )


def _check(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(f"{name}: {dtype} {list(shape)} expected, got {tensor.dtype} {list(tensor.shape)}")
