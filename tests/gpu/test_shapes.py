"""Attention and products in the shapes of real models against float64; small ones are tests/kernels/triton."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.attention_subjects import AttentionSubjects, Batch, device_batch, scattered_tables
from benchmarks.gpu.shapes import QWEN3_8B, TINY
from quire.kernels.triton.matmul import matmul
from quire.kernels.triton.norm import norm
from tests.kernels.triton.helpers import assert_near, random

pytestmark = pytest.mark.gpu
ON_CARD = torch.cuda.is_available()


@pytest.mark.parametrize(
    "batch",
    [Batch(3, 1, 8192), Batch(1, 1, 32768), Batch(300, 1, 300), Batch(2, 1500, 1500), Batch(2, 700, 4000)]
    if ON_CARD
    else [Batch(2, 1, 40), Batch(2, 5, 30)],
    ids=lambda batch: batch.name,
)
def test_attention(batch: Batch, device: torch.device) -> None:
    """The engine's own step over random pages: what it writes is what torch's dense attention then reads."""
    shape = QWEN3_8B if ON_CARD else TINY
    subjects = AttentionSubjects(shape, device)
    case = subjects.prepare(batch, block_size=16)
    qkv = case.qkv.clone()
    result = case.step.attend(case.heads, case.qkv, None, None).view(-1, shape.num_heads, shape.head_dim)
    tables, _ = scattered_tables(batch, 16, device)
    described = device_batch(batch, tables, 16, device)
    group = shape.num_heads // shape.num_kv_heads
    for sequence in {0, batch.num_seqs - 1}:
        rows = slice(sequence * batch.num_new, (sequence + 1) * batch.num_new)
        blocks = tables[sequence].long()
        keys, values = (
            part.reshape(-1, shape.num_kv_heads, shape.head_dim)[: batch.length].double()
            for part in case.pages[blocks].unbind(1)
        )
        heads = qkv[rows].view(batch.num_new, -1, shape.head_dim)
        query = _normed(heads[:, : shape.num_heads], case.heads.query_norm.weight)
        own = described.slot_positions[rows]
        seen = torch.arange(batch.length, device=device) <= own[:, None]
        for head in {0, shape.num_heads - 1}:
            scores = query[:, head] @ keys[:, head // group].T * shape.head_dim**-0.5
            weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
            expected = weights @ values[:, head // group]
            error = (result[rows, head].double() - expected).norm() / expected.norm()
            assert error < (1e-2 if shape.dtype == "bfloat16" else 1e-4)


def _normed(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = heads.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


@pytest.mark.parametrize("m", [1, 16, 300])
def test_invariant_products(m: int, device: torch.device) -> None:
    n, k = (24576, 4096) if ON_CARD else (70, 50)
    x, weight = random(device, m, k, dtype=torch.bfloat16), random(device, n, k, dtype=torch.bfloat16, seed=1)
    result = matmul(x, weight)
    expected = x.double() @ weight.double().T
    assert (result.double() - expected).norm() / expected.norm() < 4e-3
    assert torch.equal(matmul(x[:1], weight), result[:1])


def test_norms(device: torch.device) -> None:
    size = 5120 if ON_CARD else 80
    x, weight = (
        random(device, 700 if ON_CARD else 3, size, dtype=torch.bfloat16),
        random(device, size, dtype=torch.bfloat16),
    )
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_near(norm(x, weight, None, 1e-6, centred=False), expected, roundings=3)
