"""What is timed, in a tiny shape in Triton's interpreter: every subject runs, and the work is counted right."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.attention_subjects import AttentionSubjects, Batch, device_batch, scattered_tables
from benchmarks.gpu.kernels import TINY_SCALE, measured
from benchmarks.gpu.limits import Ceilings, Work
from benchmarks.gpu.shapes import QWEN3_8B, TINY
from benchmarks.gpu.subjects import Products, Subject

CPU = torch.device("cpu")
PRODUCTS = {subject.kernel: subject for subject in Products(TINY, CPU, TINY_SCALE).all() if subject.case == "1 tokens"}


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_every_product_runs(kernel: str) -> None:
    subject = PRODUCTS[kernel]
    for variant in subject.variants:
        (call,) = subject.calls(variant, cache_bytes=1)
        call()


def test_operands_are_many_enough_for_the_cache() -> None:
    subject = PRODUCTS["bf16 product o"]
    assert len(subject.calls("library", cache_bytes=int(subject.work.bytes))) == 4


def test_the_work_of_attention_and_products() -> None:
    subjects = AttentionSubjects(QWEN3_8B, CPU)
    decode = subjects.work(Batch(256, 1, 2048))
    assert decode.bytes == 256 * 2049 * 4096 + 256 * (6144 + 4096) * 2
    assert decode.operations == 4 * 256 * 2048 * 32 * 128
    assert subjects.work(Batch(1, 1024, 1024)).operations == 4 * (1024 * 1025 / 2) * 32 * 128
    assert subjects.work(Batch(1, 2, 10)).operations == 4 * (9 + 10) * 32 * 128
    products = {(each.kernel, each.case): each.work for each in Products(QWEN3_8B, CPU).all()}
    assert products["int4 product gate_up", "32 tokens"] == Work(
        24576 * 4096 / 2 + 32 * (24576 + 4096) * 2, 2 * 32 * 24576 * 4096
    )


def test_tables_are_scattered_over_distinct_blocks() -> None:
    tables, num_blocks = scattered_tables(Batch(3, 1, 40), 16, CPU)
    assert sorted(tables.flatten().tolist()) == list(range(1, 10))
    assert num_blocks == 10
    batch = device_batch(Batch(3, 2, 40), tables, 16, CPU)
    assert batch.slot_positions.tolist() == [38, 39] * 3
    assert batch.query_start.tolist() == [0, 2, 4, 6]
    assert batch.slot_mapping[0].tolist() == [int(tables[s, 2]) * 16 + offset for s in range(3) for offset in (6, 7)]


def test_a_variant_that_fails_is_a_record() -> None:
    def broken() -> None:
        raise RuntimeError("no such kernel")

    subject = Subject("a kernel", "a case", Work(8.0), {"broken": broken, "ours": lambda: lambda: None})  # type: ignore[dict-item]
    failed, done = measured(subject, Ceilings(1.0, 1.0), CPU, cache_bytes=1)
    assert failed["error"] == "RuntimeError: no such kernel"
    assert done["seconds"] > 0
