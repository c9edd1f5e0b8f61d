"""What is timed computes what its plain twin computes, at sizes that take no time; a kernel that does not is seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.kernels import run
from benchmarks.kernels.cases import KERNELS, Case
from benchmarks.kernels.run import BF16_PEAK, FLOAT_PEAK, INTEGER_PEAK, READ, Subject, load_subjects
from benchmarks.kernels.subjects import attention, layers, linear, machine
from benchmarks.kernels.subjects.machine import Machine, calls_per_run, in_turn, parts, relative_error
from quire.kernels.cpu import _native
from tests.benchmarks.kernels.builders import TINY

SMALL_CACHE = 1 << 16


@pytest.fixture
def tiny_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """With caches so small that few copies exceed them, and an instruction set that every type is possible with.

    One thread, where a test asks for no other number: more wait for each other on the processor.
    """
    threads = torch.get_num_threads()
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: SMALL_CACHE)
    monkeypatch.setattr(machine, "READ_BYTES", machine.READ_SLICE)
    monkeypatch.setattr(layers, "VOCABULARY", 300)
    yield Machine("auto" if _native.has_bf16_products("auto") else "bf16_emulated", getattr(request, "param", 1))
    torch.set_num_threads(threads)


def cases_of(kernel: str) -> list[Case]:
    """Of the tiny model, with few rows; a decode of 16384 tokens says nothing that one of 256 does not."""
    counts = (512,) if kernel == "prefill" else (1, 32)
    found = [case for case in KERNELS[kernel](TINY) if case.rows in counts and case.shape not in ("4096", "16384")]
    assert found
    return found


def subject_of(kernel: str, tiny_machine: Machine) -> Subject:
    return load_subjects(tiny_machine)(kernel)


@pytest.mark.parametrize(
    ("kernel", "tiny_machine"),
    [*((kernel, 1) for kernel in KERNELS), ("barrier", 2), ("norm", 2)],
    indirect=["tiny_machine"],
)
def test_each_kernel_agrees_with_its_twin(kernel: str, tiny_machine: Machine) -> None:
    subject = subject_of(kernel, tiny_machine)
    for case in cases_of(kernel):
        prepared = subject.prepare(case)
        assert set(prepared.natives) == set(prepared.errors) == set(case.variants)
        assert {name: error for name, error in prepared.errors.items() if error > prepared.tolerances[name]} == {}
        assert prepared.twins
        assert all(runner() >= 1 for runner in (*prepared.natives.values(), *prepared.twins.values()))
        assert subject.memory_bytes(case) > 0


def test_every_kernel_has_a_subject() -> None:
    assert set(run.SUBJECTS) == set(KERNELS)


def test_a_kernel_that_computes_something_else_is_seen(tiny_machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = [case for case in KERNELS["linear"](TINY) if (case.shape, case.rows) == ("o", 8)]
    right = linear.packed

    def wrong(matrix: linear.Matrix, values: torch.Tensor, name: str, arena: linear.Arena) -> linear.PackedMatrix:
        return right(matrix, values.roll(1, 0), name, arena)

    monkeypatch.setattr(linear, "packed", wrong)
    prepared = subject_of("linear", tiny_machine).prepare(case)
    assert all(error > prepared.tolerances[name] for name, error in prepared.errors.items())


def test_weights_are_kept_for_the_next_rows_of_a_matrix(tiny_machine: Machine) -> None:
    subject = linear.LinearSubject(tiny_machine)
    few, many, other = (
        next(case for case in KERNELS["linear"](TINY) if (case.shape, case.rows) == which)
        for which in (("o", 1), ("o", 8), ("qkv", 1))
    )
    one = replace(few, variants={"bf16": few.variants["bf16"]})
    packed = []
    original = linear.packed

    def counting(matrix: linear.Matrix, values: torch.Tensor, name: str, arena: linear.Arena) -> linear.PackedMatrix:
        packed.append(name)
        return original(matrix, values, name, arena)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "packed", counting)
        for case in (one, replace(many, variants=one.variants), replace(other, variants=one.variants)):
            subject.prepare(case)
    assert packed == ["bf16", "bf16"]


def test_operands_exceed_the_caches(tiny_machine: Machine) -> None:
    assert tiny_machine.num_copies(1000) * 1000 >= 2 * SMALL_CACHE
    assert tiny_machine.num_copies(10 * SMALL_CACHE) == 1


def test_runs_go_through_all_copies() -> None:
    seen: list[int] = []

    def one(part: list[int]) -> run.Runner:
        def go() -> int:
            seen.extend(part)
            return len(part)

        return go

    runner = in_turn([one(list(part)) for part in parts(range(6), 2)])
    assert seen == [0, 1, 2, 3, 4, 5]  # each was made once, so that its memory is there
    seen.clear()
    assert [runner() for _ in range(4)] == [2, 2, 2, 2]
    assert seen == [0, 1, 2, 3, 4, 5, 0, 1]


@pytest.mark.parametrize(("num_bytes", "operations", "calls"), [(1, 0, 40), (10**7, 0, 10), (1, 10**12, 1)])
def test_a_run_has_as_many_calls_as_take_some_milliseconds(num_bytes: int, operations: int, calls: int) -> None:
    assert calls_per_run(40, num_bytes, operations) == calls


def test_limits_count_bytes_and_operations(tiny_machine: Machine) -> None:
    limits = tiny_machine.limits()
    assert limits[READ]() == machine.READ_SLICE
    assert limits[FLOAT_PEAK]() > 0
    assert limits[INTEGER_PEAK]() > 0
    per_unit = 128 if tiny_machine.runtime.isa == "amx" else 2  # a unit of tiles has 64 times the products of vectors
    assert limits[BF16_PEAK]() == per_unit * limits[FLOAT_PEAK]()


def test_an_instruction_set_without_bfloat16_has_no_limit_for_it(tiny_machine: Machine) -> None:
    assert set(Machine("portable", 1).limits()) == {READ, FLOAT_PEAK, INTEGER_PEAK}


def test_relative_error() -> None:
    expected = torch.tensor([1.0, -4.0])
    assert relative_error(torch.tensor([1.0, -3.0]), expected) == pytest.approx(0.25)
    assert relative_error(torch.tensor([1.0, torch.nan]), expected) == float("inf")


def test_decode_tables_name_every_block_once() -> None:
    batch = attention.new_tokens(3, 40, 1)
    (table,) = batch.block_tables
    assert sorted(table.flatten().tolist()) == list(range(1, 10))
    (slots,) = batch.slot_mapping
    assert slots.tolist() == [int(table[s, 2]) * 16 + 8 for s in range(3)]
