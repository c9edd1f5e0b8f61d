"""The sweep over tiles of attention, and what other libraries are given, in a tiny shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu.attention_peers import peers, torch_varlen
from benchmarks.gpu.attention_subjects import Batch
from benchmarks.gpu.attention_sweep import Candidate, Sweep, summary
from benchmarks.gpu.limits import Ceilings
from benchmarks.gpu.shapes import QWEN3_8B, TINY
from quire.kernels.triton.attention_tiles import FIXED_KEYS

CPU = torch.device("cpu")


@pytest.mark.parametrize("batch", [Batch(2, 1, 20), Batch(1, 9, 20)], ids=lambda batch: batch.name)
def test_candidates_run(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice, that of batch-invariant mode, and another."""
    sweep = Sweep(TINY, CPU)
    some = sweep.candidates(batch)[:3]
    monkeypatch.setattr(sweep, "candidates", lambda batch: some)
    found = list(sweep.records(batch, Ceilings(1e9, 1e12), cache_bytes=1))
    assert [record["what"] for record in found] == ["choice", "batch-invariant", "other"]
    assert all(record["share"] > 0 for record in found), found
    _, line = summary(found).splitlines()
    assert line.startswith(batch.name)
    assert max(found, key=lambda record: record["share"])["tiles"] in line


def test_candidates_are_different() -> None:
    sweep = Sweep(QWEN3_8B, CPU)
    for batch in sweep.batches():
        candidates = sweep.candidates(batch)
        assert len(set(candidates)) == len(candidates)
        assert candidates[1].tiles.fixed_keys == FIXED_KEYS
        assert len(candidates) > 10


def test_the_work_of_the_kernels_alone() -> None:
    work = Sweep(QWEN3_8B, CPU).work(Batch(2, 3, 100))
    assert work.bytes == 2 * 100 * 4096 + 2 * (2 * 3) * 4096 * 2
    assert work.operations == 4 * 2 * (98 + 99 + 100) * 32 * 128


def test_what_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: Batch, candidate: Candidate) -> Any:
        raise RuntimeError("out of resource: shared memory")

    sweep = Sweep(TINY, CPU)
    monkeypatch.setattr(sweep, "call", fail)
    found = list(sweep.records(Batch(1, 1, 20), Ceilings(1e9, 1e12), cache_bytes=1))
    assert all("shared memory" in record["error"] for record in found)
    assert "failed" in summary(found)


def test_varlen_attention_of_torch_is_given_every_sequence_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def varlen_attn(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *lengths: Any, window_size: tuple[int, int]
    ) -> None:
        given.update(query=query, key=key, value=value, lengths=lengths, window_size=window_size)

    # By name: the import takes seconds, and the other tests need not wait for it.
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    torch_varlen(Batch(3, 2, 10), TINY, CPU)()
    assert given["query"].shape == (6, 4, 16)
    assert given["key"].shape == given["value"].shape == (30, 2, 16)
    starts, ends, longest_query, longest = given["lengths"]
    assert (starts.tolist(), ends.tolist(), longest_query, longest) == ([0, 2, 4, 6], [0, 10, 20, 30], 2, 10)
    assert given["window_size"] == (-1, 0)
    assert peers(CPU) == {}
