"""The measured gain of paging: which run of a system counts. (The runs themselves: test_command.py.)"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.paper import gain
from benchmarks.paper.gain import COMPARED, Gain, measure
from quire.errors import QuireError


def run_with(monkeypatch: pytest.MonkeyPatch, seconds: list[float], tokens: list[int]) -> list[Gain]:
    """Rounds of runs that take these times, and generate these numbers of tokens, in the order of the runs."""
    made = iter(zip(seconds, tokens, strict=True))

    def run(_core: object, system: str, *_: object) -> tuple[Gain, dict[str, list[int]]]:
        taken, num_tokens = next(made)
        return Gain(system, taken, num_tokens, 1, 1.0), {"0": [1] * num_tokens}

    monkeypatch.setattr(gain, "build_core", lambda *_: SimpleNamespace(shutdown=lambda: None))
    monkeypatch.setattr(gain, "_run", run)
    rounds = len(seconds) // len(COMPARED)
    return measure(Path("model"), "", [], num_rounds=rounds, num_threads=1, on_done=lambda _: None)


def test_the_run_of_median_length_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns, so that what slows the machine for a while slows all of them."""
    seconds = [9.0, 2.0, 3.0, 4.0, 5.0, 8.0, 1.0, 4.5, 6.0, 7.0, 2.0, 4.1]
    found = run_with(monkeypatch, seconds, [3] * 12)
    assert [(each.system, each.seconds) for each in found] == list(zip(COMPARED, [6.0, 7.0, 2.0, 4.1], strict=True))


def test_all_generate_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QuireError, match=r"Orca \(Oracle\) generated other tokens than Orca \(Pow2\)"):
        run_with(monkeypatch, [1.0] * 4, [3, 3, 4, 3])
