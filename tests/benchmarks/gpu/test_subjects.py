"""What is timed, in a tiny shape in Triton's interpreter: every way of a subject computes the same, and the work is
counted right."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.attention_subjects import AttentionSubjects, Batch, device_batch, padded, scattered_tables
from benchmarks.gpu.family_subjects import FamilySubjects
from benchmarks.gpu.kernels import TINY_SCALE, measured
from benchmarks.gpu.limits import Ceilings, Work
from benchmarks.gpu.quantized_subjects import QuantizedSubjects
from benchmarks.gpu.shapes import QWEN3_8B, TINY
from benchmarks.gpu.subjects import Subject, Subjects

CPU = torch.device("cpu")
SUBJECTS = [*Subjects(TINY, CPU, TINY_SCALE).all()]


@pytest.mark.parametrize(
    "subject",
    [subject for subject in SUBJECTS if "256" in subject.case or "blocks" in subject.case or subject.work.bytes < 2048],
    ids=lambda subject: f"{subject.kernel} {subject.case}",
)
def test_every_variant_runs(subject: Subject) -> None:
    for variant in subject.variants:
        (call,) = subject.calls(variant, cache_bytes=1)
        call()


QUANTIZED = {subject.kernel: subject for subject in QuantizedSubjects(TINY, CPU, TINY_SCALE).all()}
"""One case of each kernel."""


@pytest.mark.parametrize("kernel", QUANTIZED)
def test_quantised_variants_run(kernel: str) -> None:
    subject = QUANTIZED[kernel]
    for variant in subject.variants:
        (call,) = subject.calls(variant, cache_bytes=1)
        call()


FAMILIES = {subject.kernel: subject for subject in FamilySubjects(TINY, CPU, TINY_SCALE).all()}


@pytest.mark.parametrize("kernel", FAMILIES)
def test_what_some_families_compute_runs(kernel: str) -> None:
    """The last case of each kernel."""
    (call,) = FAMILIES[kernel].calls("triton", cache_bytes=1)
    call()


def test_the_work_of_states_indexers_and_texts() -> None:
    subjects = FamilySubjects(QWEN3_8B, CPU)
    decode = subjects.rule_work(Batch(256, 1, 992))
    state, row = 32 * 128 * 128, 32 * 128 + 16 * 128 + 32
    assert decode.bytes == 256 * (4 * (state + 32 * row) + 2 * (8192 + 4096))
    prompt = subjects.rule_work(Batch(1, 8192, 8192))
    assert prompt.operations == 8192 * 32 * (4 * 128 * 128 + 4 * 32 * 256)
    choose, attended = subjects.indexed_work(Batch(64, 1, 8192))
    assert choose.operations == 2 * 64 * 8192 * 64 * 128
    assert choose.bytes > 64 * 8192 * 128 * 2
    assert attended.operations == 2 * 64 * 2048 * 128 * (576 + 512)
    assert subjects.lengths(4, 4) == [2, 3, 4, 2]


def test_the_work_of_experts_and_latents() -> None:
    subjects = {(subject.kernel, subject.case): subject.work for subject in QuantizedSubjects(QWEN3_8B, CPU).all()}
    experts = subjects["fp8 experts", "64 rows an expert"]
    assert experts.operations == 2 * 3 * 64 * 128 * 2048 * 768
    assert experts.bytes > 3 * 128 * 2048 * 768
    latents = subjects["fp8 latent attention", "64 x 1 of 4096 tokens"]
    assert latents.operations == 2 * 64 * 4096 * 128 * (576 + 512)
    assert latents.bytes > 64 * 4096 * 576


def test_operands_are_many_enough_for_the_cache() -> None:
    subject = next(each for each in SUBJECTS if each.kernel == "RMSNorm")
    calls = subject.calls("triton", cache_bytes=subject.work.bytes)
    assert len(calls) == 4


def test_the_work_of_attention() -> None:
    subjects = AttentionSubjects(QWEN3_8B, CPU)
    decode = subjects.work(Batch(256, 1, 2048))
    assert decode.bytes == 256 * 2049 * 4096 + 256 * (6144 + 4096) * 2
    assert decode.operations == 4 * 256 * 2048 * 32 * 128
    prompt = subjects.work(Batch(1, 1024, 1024))
    assert prompt.operations == 4 * (1024 * 1025 / 2) * 32 * 128
    chunk = subjects.work(Batch(1, 2, 10))
    assert chunk.operations == 4 * (9 + 10) * 32 * 128


def test_tables_are_scattered_over_distinct_blocks() -> None:
    tables, num_blocks = scattered_tables(Batch(3, 1, 40), 16, CPU)
    assert tables.shape == (3, 3)
    assert sorted(tables.flatten().tolist()) == list(range(1, 10))
    assert num_blocks == 10
    batch = device_batch(Batch(3, 2, 40), tables, 16, CPU)
    assert batch.positions.tolist() == [38, 39] * 3
    assert batch.query_start.tolist() == [0, 2, 4, 6]
    assert batch.slot_mapping[0].tolist() == [int(tables[s, 2]) * 16 + offset for s in range(3) for offset in (6, 7)]
    assert padded(40) == 64


@pytest.mark.parametrize("batch", [Batch(2, 1, 9), Batch(1, 4, 12)], ids=lambda batch: batch.name)
def test_scattered_and_contiguous_memory_give_the_same(batch: Batch) -> None:
    """Both are the engine's own step, over the same keys and values."""
    subjects = AttentionSubjects(TINY, CPU)
    scattered, whole = (subjects.prepare(batch, block_size) for block_size in (4, padded(batch.length)))
    tables, _ = scattered_tables(batch, 4, CPU)
    others, _ = scattered_tables(batch, padded(batch.length), CPU)
    for sequence in range(batch.num_seqs):
        tokens = scattered.pages[tables[sequence].long()].transpose(1, 2).flatten(0, 1)[: batch.length]
        whole.pages[int(others[sequence, 0]), :, : batch.length] = tokens.transpose(0, 1)
    whole.qkv.copy_(scattered.qkv)
    for own, other in zip(
        (scattered.heads.query_norm, scattered.heads.key_norm),
        (whole.heads.query_norm, whole.heads.key_norm),
        strict=True,
    ):
        other.weight.copy_(own.weight)
    results = [case.step.attend(case.heads, case.qkv, None, None) for case in (scattered, whole)]
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


def test_what_fails_is_a_record_too() -> None:
    def fail() -> object:
        raise ValueError("out of shared memory")

    subject = Subject("some", "case", Work(100.0), {"bad": lambda: fail, "good": lambda: lambda: None})
    bad, good = measured(subject, Ceilings(1e9, 1e12), CPU, cache_bytes=1)
    assert bad["error"] == "ValueError: out of shared memory"
    assert good["bound"] == "memory"
    assert good["share"] == pytest.approx(100 / 1e9 / good["seconds"])
