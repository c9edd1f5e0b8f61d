"""A whole run: case after case within the time and the memory that there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from benchmarks.kernels.cases import Case
from benchmarks.kernels.measure import Method, Runner, Timing
from benchmarks.kernels.results import Limits, Result
from quire.registry import Registry
from quire.utils.sizes import format_bytes

SUBJECTS = {
    "linear": "benchmarks.kernels.subjects.linear:LinearSubject",
    "decode": "benchmarks.kernels.subjects.attention:AttentionSubject",
    "prefill": "benchmarks.kernels.subjects.attention:AttentionSubject",
    "write": "benchmarks.kernels.subjects.attention:AttentionSubject",
    "copy": "benchmarks.kernels.subjects.attention:CopySubject",
    "norm": "benchmarks.kernels.subjects.layers:NormSubject",
    "barrier": "benchmarks.kernels.subjects.layers:BarrierSubject",
    "rotation": "benchmarks.kernels.subjects.layers:RotationSubject",
    "embed": "benchmarks.kernels.subjects.layers:EmbedSubject",
    "delta": "benchmarks.kernels.subjects.states:DeltaSubject",
    "choose": "benchmarks.kernels.subjects.sampling:ChooseSubject",
    "logprobs": "benchmarks.kernels.subjects.sampling:LogprobsSubject",
}
READ, FLOAT_PEAK, INTEGER_PEAK, BF16_PEAK = "limit read", "limit float", "limit integer", "limit bf16"


@dataclass(frozen=True, slots=True)
class Prepared:
    """One case, ready to run: its kernel in each type, its plain twins, and how far each type's result lay from the
    twin's, with what is allowed."""

    natives: Mapping[str, Runner]
    twins: Mapping[str, Runner]
    errors: Mapping[str, float]
    tolerances: Mapping[str, float]


class Subject(Protocol):
    """Makes cases of one kernel. May keep what another case of the same shape can use again, for as long as its cases
    have that shape."""

    def prepare(self, case: Case) -> Prepared: ...

    def memory_bytes(self, case: Case) -> int:
        """What the case takes while it is measured."""
        ...


@dataclass(frozen=True, slots=True)
class Skipped:
    """A case, or some types of it, that was not measured."""

    case: Case
    reason: str


Outcome = Result | Skipped


@dataclass(frozen=True, slots=True)
class Bench:
    """limits: runners by READ, FLOAT_PEAK, INTEGER_PEAK and, where the machine multiplies bfloat16, BF16_PEAK; a unit
    is a byte or an operation. subject: by kernel. memory: bytes that a case may take. with_twins: the plain twins are
    timed too."""

    method: Method
    limits: Mapping[str, Runner]
    subject: Callable[[str], Subject]
    memory: int
    with_twins: bool = True

    def run(self, cases: Sequence[Case], seconds: float | None, case_seconds: float) -> Iterator[list[Outcome]]:
        """What came of each case. seconds: for all cases together (None: no end), shared evenly among those to come;
        what would begin later is skipped. case_seconds: for one case at most, beyond the rounds that each one gets."""
        clock = self.method.clock
        deadline = None if seconds is None else clock.now() + seconds
        for index, case in enumerate(cases):
            share = case_seconds
            if deadline is not None:
                left = deadline - clock.now()
                if left <= 0:
                    yield [Skipped(case, "out of time")]
                    continue
                share = min(share, left / (len(cases) - index))
            yield list(self._measure(case, share))

    def _measure(self, case: Case, seconds: float) -> Iterator[Outcome]:
        if BF16_PEAK not in self.limits:
            possible = {name: work for name, work in case.variants.items() if not work.bf16_operations}
            if not possible:
                yield Skipped(case, "this instruction set does not multiply bfloat16")
                return
            case = replace(case, variants=possible)
        subject = self.subject(case.kernel)
        fitting, too_large = split(case, subject.memory_bytes, self.memory)
        for part in fitting:
            yield from self._measure_part(part, subject.prepare(part), seconds / len(fitting))
        for part in too_large:
            yield Skipped(part, f"needs {format_bytes(subject.memory_bytes(part))}")

    def _measure_part(self, case: Case, prepared: Prepared, seconds: float) -> Iterator[Result]:
        plain = prepared.twins if self.with_twins else {}
        runners = {
            **self.limits,
            **{f"native {name}": runner for name, runner in prepared.natives.items()},
            **{f"twin {name}": runner for name, runner in plain.items()},
        }
        timings = self.method.measure(runners, seconds)
        limits = Limits(
            read=1.0 / timings[READ].median,
            float_peak=1.0 / timings[FLOAT_PEAK].median,
            integer_peak=1.0 / timings[INTEGER_PEAK].median,
            bf16_peak=1.0 / timings[BF16_PEAK].median if BF16_PEAK in timings else None,
        )
        twins: dict[str, Timing] = {name: timings[f"twin {name}"] for name in plain}
        for name in prepared.natives:
            error = prepared.errors[name]
            yield Result(
                case=case,
                type=name,
                timing=timings[f"native {name}"],
                twins=twins,
                limits=limits,
                error=error,
                sound=error <= prepared.tolerances[name],
            )


def split(case: Case, memory_bytes: Callable[[Case], int], available: int) -> tuple[list[Case], list[Case]]:
    """Cut a case into parts with some of its types, each within `available` bytes; and the types that are not even
    alone, one a part."""
    fitting: list[Case] = []
    too_large: list[Case] = []
    for name, work in case.variants.items():
        alone = replace(case, variants={name: work})
        if fitting:
            joined = replace(case, variants={**fitting[-1].variants, name: work})
            if memory_bytes(joined) <= available:
                fitting[-1] = joined
                continue
        (fitting if memory_bytes(alone) <= available else too_large).append(alone)
    return fitting, too_large


def load_subjects(*arguments: object) -> Callable[[str], Subject]:
    """Subjects by kernel, each made once, with `arguments`; one that serves several kernels is the same object."""
    registry = Registry("kernel", SUBJECTS)
    made: dict[type, Subject] = {}

    def subject(kernel: str) -> Subject:
        kind = registry.load(kernel)
        if kind not in made:
            made.clear()  # what another kernel kept for its next case is not needed any more
            made[kind] = kind(*arguments)
        return made[kind]

    return subject
