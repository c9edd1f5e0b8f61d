"""Other libraries' attention over the same work, where they are installed: what ours is to be compared with.

Each is given what it likes best: keys and values in its own layout, and its planning done beforehand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import Call

if TYPE_CHECKING:
    from benchmarks.gpu.attention_subjects import Batch

WORKSPACE_BYTES = 256 << 20
Peer = Callable[["Batch", Shape, torch.device], Call]


def peers(device: torch.device) -> dict[str, Peer]:
    """By name, those that this installation has for the device: none but on a GPU."""
    if device.type != "cuda":
        return {}
    found: dict[str, Peer] = {"torch varlen, contiguous": torch_varlen}
    if find_spec("flash_attn_interface") is not None:
        found["FlashAttention 3, paged"] = flash_attention_paged
    if find_spec("flashinfer") is not None:
        found["FlashInfer, paged"] = flashinfer_paged
    return found


def torch_varlen(batch: Batch, shape: Shape, device: torch.device) -> Call:
    """torch's own varlen attention over sequences in one piece each."""
    from torch.nn.attention.varlen import varlen_attn

    random = partial(torch.randn, device=device, dtype=getattr(torch, shape.dtype))
    query = random(batch.num_seqs * batch.num_new, shape.num_heads, shape.head_dim)
    key, value = (random(batch.num_seqs * batch.length, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    starts = torch.arange(batch.num_seqs + 1, dtype=torch.int32, device=device)
    # Both names of being causal, and whether groups must be asked for, have changed between versions.
    known = inspect.signature(varlen_attn).parameters
    options = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    return partial(
        varlen_attn,
        query,
        key,
        value,
        starts * batch.num_new,
        starts * batch.length,
        batch.num_new,
        batch.length,
        **options,
    )


def flash_attention_paged(batch: Batch, shape: Shape, device: torch.device) -> Call:
    """FlashAttention 3 over scattered pages of our shape: keys and values are strided views of them."""
    from flash_attn_interface import flash_attn_with_kvcache

    from benchmarks.gpu.attention_subjects import scattered_tables
    from benchmarks.gpu.subjects import BLOCK_SIZE

    random = partial(torch.randn, device=device, dtype=getattr(torch, shape.dtype))
    tables, num_blocks = scattered_tables(batch, BLOCK_SIZE, device)
    pages = random(num_blocks, 2, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    query = random(batch.num_seqs * batch.num_new, shape.num_heads, shape.head_dim)
    starts = torch.arange(batch.num_seqs + 1, dtype=torch.int32, device=device)
    return partial(
        flash_attn_with_kvcache,
        query,
        pages[:, 0],
        pages[:, 1],
        cache_seqlens=torch.full((batch.num_seqs,), batch.length, dtype=torch.int32, device=device),
        page_table=tables,
        cu_seqlens_q=starts * batch.num_new,
        max_seqlen_q=batch.num_new,
        causal=True,
    )


def flashinfer_paged(batch: Batch, shape: Shape, device: torch.device) -> Call:
    """FlashInfer's wrappers over scattered pages of our shape."""
    import flashinfer

    from benchmarks.gpu.attention_subjects import scattered_tables
    from benchmarks.gpu.subjects import BLOCK_SIZE

    dtype = getattr(torch, shape.dtype)
    random = partial(torch.randn, device=device, dtype=dtype)
    tables, num_blocks = scattered_tables(batch, BLOCK_SIZE, device)
    pages = random(num_blocks, 2, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    query = random(batch.num_seqs * batch.num_new, shape.num_heads, shape.head_dim)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    starts = torch.arange(batch.num_seqs + 1, dtype=torch.int32, device=device)
    last = torch.full((batch.num_seqs,), (batch.length - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=device)
    paged = (starts * tables.shape[1], tables.flatten(), last)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
    if batch.num_new == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*paged, *heads, q_data_type=dtype, kv_data_type=dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(starts * batch.num_new, *paged, *heads, causal=True, q_data_type=dtype, kv_data_type=dtype)
    return partial(wrapper.run, query, pages)
