"""A whole run with kernels that only move a clock: time, memory, what is kept and what is skipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks.kernels.cases import Case, Work
from benchmarks.kernels.measure import Method
from benchmarks.kernels.results import Limits, Result
from benchmarks.kernels.run import (
    BF16_PEAK,
    FLOAT_PEAK,
    INTEGER_PEAK,
    READ,
    SUBJECTS,
    Bench,
    Prepared,
    Skipped,
    Subject,
    load_subjects,
    split,
)
from quire.clock import VirtualClock
from tests.benchmarks.kernels.builders import case, taking


class FakeSubject:
    """Each type takes as many seconds as SECONDS says, each twin ten; a case takes its bytes of memory."""

    SECONDS: Mapping[str, float] = {"f32": 4.0, "bf16": 2.0, "w16a16": 2.0, "int8": 1.0}

    def __init__(self, clock: VirtualClock, error: float = 0.0) -> None:
        self.clock, self.error = clock, error
        self.prepared: list[list[str]] = []

    def memory_bytes(self, of: Case) -> int:
        return sum(work.bytes for work in of.variants.values())

    def prepare(self, of: Case) -> Prepared:
        self.prepared.append(list(of.variants))
        return Prepared(
            natives={name: taking(self.clock, self.SECONDS[name]) for name in of.variants},
            twins={"f32": taking(self.clock, 10.0)},
            errors=dict.fromkeys(of.variants, self.error),
            tolerances=dict.fromkeys(of.variants, 0.1),
        )


def bench(subject: FakeSubject, memory: int = 10**6, *, with_twins: bool = True) -> Bench:
    clock = subject.clock
    limits = {
        READ: taking(clock, 1.0, 1000),
        FLOAT_PEAK: taking(clock, 1.0, 2000),
        INTEGER_PEAK: taking(clock, 1.0, 8000),
    }
    method = Method(clock, lambda: None, min_rounds=1, max_rounds=1)
    subjects: Mapping[str, Subject] = {"linear": subject}
    return Bench(method, limits, subjects.__getitem__, memory, with_twins)


ALL = case(f32=Work(400), bf16=Work(200), int8=Work(100))


def test_every_type_becomes_a_result_with_the_limits_of_its_rounds() -> None:
    (outcomes,) = bench(FakeSubject(VirtualClock())).run([ALL], None, 1.0)
    results = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    assert [(found.type, found.seconds) for found in results] == [("f32", 4.0), ("bf16", 2.0), ("int8", 1.0)]
    assert {found.limits for found in results} == {Limits(1000.0, 2000.0, 8000.0)}
    assert [found.speedup("f32") for found in results] == [2.5, 5.0, 10.0]
    assert [found.bandwidth_share for found in results] == [0.1, 0.1, 0.1]
    assert all(found.sound for found in results)


def test_products_that_the_machine_does_not_have_are_left_out() -> None:
    """A case that is nothing else is listed as not measured."""
    both = case(bf16=Work(200), w16a16=Work(200, bf16_operations=1))
    alone = case(w16a16=Work(200, bf16_operations=1))
    subject = FakeSubject(VirtualClock())
    first, second = bench(subject).run([both, alone], None, 1.0)
    assert [found.type for found in first if isinstance(found, Result)] == ["bf16"]
    assert second == [Skipped(alone, "this instruction set does not multiply bfloat16")]
    assert subject.prepared == [["bf16"]]


def test_products_in_bfloat16_have_a_limit_of_their_own() -> None:
    subject = FakeSubject(VirtualClock())
    made = bench(subject)
    made = replace(made, limits={**made.limits, BF16_PEAK: taking(subject.clock, 1.0, 4000)})
    (outcomes,) = made.run([case(w16a16=Work(200, bf16_operations=4000))], None, 1.0)
    (found,) = (outcome for outcome in outcomes if isinstance(outcome, Result))
    assert found.limits == Limits(1000.0, 2000.0, 8000.0, 4000.0)
    assert found.bf16_share == 0.5


def test_without_twins() -> None:
    (outcomes,) = bench(FakeSubject(VirtualClock()), with_twins=False).run([ALL], None, 1.0)
    assert [found.twins for found in outcomes if isinstance(found, Result)] == [{}, {}, {}]


def test_a_result_too_far_from_the_twin_is_not_sound() -> None:
    (outcomes,) = bench(FakeSubject(VirtualClock(), error=0.2)).run([ALL], None, 1.0)
    assert [found.sound for found in outcomes if isinstance(found, Result)] == [False] * 3


def test_what_comes_after_the_end_is_skipped() -> None:
    """A case takes 2 x (3 x 1 s for the limits, 4 + 2 + 1 s and 10 s): the first run of each is not a sample."""
    subject = FakeSubject(VirtualClock())
    outcomes = list(bench(subject).run([ALL, ALL, ALL], 41.0, 1.0))
    assert [type(each[0]) for each in outcomes] == [Result, Result, Skipped]
    assert outcomes[2] == [Skipped(ALL, "out of time")]
    assert len(subject.prepared) == 2


def test_types_that_do_not_fit_together_are_measured_apart() -> None:
    subject = FakeSubject(VirtualClock())
    (outcomes,) = bench(subject, memory=300).run([ALL], None, 1.0)
    assert subject.prepared == [["bf16", "int8"]]
    assert [found.type for found in outcomes if isinstance(found, Result)] == ["bf16", "int8"]
    (skipped,) = [outcome for outcome in outcomes if isinstance(outcome, Skipped)]
    assert (list(skipped.case.variants), skipped.reason) == (["f32"], "needs 400 B")


@pytest.mark.parametrize(
    ("available", "fitting", "too_large"),
    [
        (700, [["f32", "bf16", "int8"]], []),
        (600, [["f32", "bf16"], ["int8"]], []),
        (400, [["f32"], ["bf16", "int8"]], []),
        (200, [["bf16"], ["int8"]], [["f32"]]),
        (50, [], [["f32"], ["bf16"], ["int8"]]),
    ],
)
def test_split(available: int, fitting: list[list[str]], too_large: list[list[str]]) -> None:
    found = split(ALL, FakeSubject(VirtualClock()).memory_bytes, available)
    assert [[list(part.variants) for part in parts] for parts in found] == [fitting, too_large]


def test_a_subject_serves_its_kernels_and_is_let_go_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"{__name__}:FakeSubject"
    monkeypatch.setitem(SUBJECTS, "decode", here)
    monkeypatch.setitem(SUBJECTS, "prefill", here)
    monkeypatch.setitem(SUBJECTS, "linear", f"{__name__}:OtherSubject")
    subject = load_subjects(VirtualClock())
    first = subject("decode")
    assert subject("prefill") is first
    assert isinstance(subject("linear"), OtherSubject)
    assert subject("decode") is not first


class OtherSubject(FakeSubject):
    pass
