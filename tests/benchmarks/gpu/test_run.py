"""A run of parts: limits of time are kept, what fails stops nothing, and the summary says what came of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import records
from benchmarks.gpu.parts import Outcome, Part, choose, run_part
from benchmarks.gpu.run import PARTS, main
from benchmarks.gpu.summary import TARGETS, library_verdict, suite_counts, summarize, verdicts
from tests.architecture.source import ROOT

HANGS = (sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(100)")


def prints(text: str, code: int = 0) -> tuple[str, ...]:
    return (sys.executable, "-c", f"print({text!r}); raise SystemExit({code})")


def test_a_part_that_is_done(tmp_path: Path) -> None:
    outcome = run_part(Part("good", (prints("one"), prints("two")), 60), tmp_path, 60)
    assert (outcome.status, outcome.exit_codes, outcome.tail) == ("done", (0, 0), "")
    assert (tmp_path / "good-1.log").read_text() == "two\n"


def test_a_part_that_fails_shows_its_last_words(tmp_path: Path) -> None:
    outcome = run_part(Part("bad", (prints("fine"), prints("broken", 3)), 60), tmp_path, 60)
    assert (outcome.status, outcome.exit_codes) == ("failed", (0, 3))
    assert outcome.tail == "broken\n"


def test_a_part_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(100)'])"
    outcome = run_part(Part("slow", ((sys.executable, "-c", child), HANGS), 6), tmp_path, 60)
    assert outcome.status == "out of time"
    assert all(code is not None and code < 0 for code in outcome.exit_codes)


def test_no_time_is_left(tmp_path: Path) -> None:
    assert run_part(Part("late", (HANGS,), 60), tmp_path, 1).status == "not begun"


def test_names_are_filled_in(tmp_path: Path) -> None:
    echo = (sys.executable, "-c", "import sys; print(sys.argv[1:])", "{out}", "{folder}", "{name}")
    run_part(Part("echo", (echo,), 60), tmp_path, 60)
    assert str(tmp_path / "results.jsonl") in (tmp_path / "echo-0.log").read_text()
    assert "echo-0'" in (tmp_path / "echo-0.log").read_text()


def test_parts_are_chosen_by_name() -> None:
    assert [part.name for part in choose(PARTS, "kernels,tests")] == ["tests", "kernels"]
    assert choose(PARTS, None) == list(PARTS)
    with pytest.raises(ValueError, match="no part kernel "):
        choose(PARTS, "kernel,tests")


def test_all_parts_fit_into_ten_minutes() -> None:
    assert sum(part.seconds for part in PARTS) <= 590


def test_every_part_runs_something_that_exists() -> None:
    for part in PARTS:
        for command in part.commands:
            assert command[0] == sys.executable
            paths = [Path(word) for word in command if word.startswith("tests/")]
            module = command[2]
            assert module == "pytest" or (ROOT / Path(*module.split("."))).with_suffix(".py").exists()
            assert all((ROOT / path).exists() for path in paths)
            assert paths or module != "pytest"


def test_records_survive_a_broken_last_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert records.read(path) == []
    emit = records.writer(path)
    emit({"part": "a", "what": "b"})
    with path.open("a") as file:
        file.write('{"part": "a", "wh')
    assert records.read(path) == [{"part": "a", "what": "b"}]


def kernel(name: str, case: str, variant: str, seconds: float, share: float) -> records.Record:
    fields = {"kernel": name, "case": case, "variant": variant, "seconds": seconds, "share": share}
    return {"part": "kernels", "what": "kernel", **fields}


def ladder(mode: str, num_seqs: int, seconds: float) -> records.Record:
    fields = {"mode": mode, "num_seqs": num_seqs, "step_seconds": seconds, "share": 0.5}
    return {"part": "engine", "what": "ladder", **fields}


FOUND = [
    {"part": "kernels", "what": "limits", "bandwidth": 4.3e12, "peak": 7.9e14, "spread": {}},
    kernel("decode attention", "a", "triton", 1.05, 0.9),
    kernel("decode attention", "a", "contiguous", 1.0, 0.95),
    kernel("decode attention", "b", "triton", 2.4, 0.7),
    kernel("decode attention", "b", "contiguous", 2.0, 0.8),
    kernel("prefill attention", "a", "triton", 1.0, 0.65),
    {
        "part": "kernels",
        "what": "kernel",
        "kernel": "prefill attention",
        "case": "b",
        "variant": "triton",
        "error": "no",
    },
    kernel("RMSNorm", "8192 tokens", "triton", 1.0, 0.9),
    kernel("RMSNorm", "1 tokens", "triton", 1.0, 0.01),
    ladder("full", 1, 1.0),
    ladder("eager", 1, 1.4),
    ladder("full", 8, 2.0),
    ladder("eager", 8, 2.2),
    ladder("piecewise", 8, 2.1),
    {"part": "engine", "mode": "full", "what": "single", "share": 0.86},
    {"part": "engine", "mode": "full", "what": "peer work", "tokens_per_second": 900.0},
    {"part": "transformers", "what": "transformers, first run", "tokens_per_second": 1.0},
    {"part": "transformers", "what": "transformers", "tokens_per_second": 100.0},
]


def test_targets_are_judged_by_the_records() -> None:
    values = {verdict.target.text: (verdict.value, verdict.word) for verdict in verdicts(FOUND)}
    assert len(values) == len(TARGETS)

    def of(start: str) -> tuple[float | None, str]:
        (found,) = [value for text, value in values.items() if text.startswith(start)]
        return found

    assert of("decode attention") == (0.7, "MISSED")
    assert of("prefill attention") == (0.65, "reached")
    assert of("norms") == (0.9, "reached")
    assert of("Qwen3-8B, batch 1") == (0.86, "reached")
    assert of("batch 256") == (None, "not measured")
    assert of("GPU idle") == (None, "not measured")
    assert of("full graphs over eager") == (pytest.approx((0.4 + 0.1) / 2), "reached")
    assert of("piecewise graphs over eager") == (pytest.approx(2.2 / 2.1 - 1), "MISSED")
    assert of("full over piecewise") == (pytest.approx(0.05), "reached")
    assert of("over Transformers") == (pytest.approx(9.0), "reached")
    assert of("paged over contiguous") == (pytest.approx((0.05 + 0.2) / 2), "MISSED")


def test_nothing_measured_is_said_plainly() -> None:
    assert {verdict.word for verdict in verdicts([])} == {"not measured"}


def timed(variant: str, **seconds: float) -> list[records.Record]:
    base = {"what": "kernel", "kernel": "decode attention", "variant": variant}
    return [{**base, "case": case, "seconds": each} for case, each in seconds.items()]


@pytest.mark.parametrize(
    ("theirs", "reads_pages", "verdict"),
    [
        ({"a": 0.5, "b": 1.9}, True, "in 2 of 2 cases, 1.53 x as fast in the median, 2.00 x at best (a): pick"),
        ({"a": 0.98, "b": 2.5}, True, "in 1 of 2 cases, 0.91 x as fast in the median, 1.02 x at best (a): keep"),
        ({"a": 0.1, "b": 0.1}, False, "15.00 x as fast in the median, 20.00 x at best (b): reads no pages"),
        ({}, True, "not measured"),
    ],
)  # fmt: skip
def test_whether_to_pick_another_library(theirs: dict[str, float], reads_pages: bool, verdict: str) -> None:
    found = timed("triton", a=1.0, b=2.0) + timed("FlashInfer, paged", **theirs)
    line = library_verdict(found, "decode attention", "FlashInfer, paged", reads_pages=reads_pages)
    assert line is not None
    assert verdict in line
    assert library_verdict(found, "prefill attention", "FlashInfer, paged", reads_pages=reads_pages) is None


def test_the_summary(tmp_path: Path) -> None:
    (tmp_path / "tests-0.log").write_text("")
    cases = ['name="x"/>', 'name="y"><failure/></testcase>', 'name="z"><skipped/></testcase>']
    body = "".join(f'<testcase classname="a" {case}' for case in cases)
    (tmp_path / "tests-0.xml").write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    (tmp_path / "tests-1.log").write_text("")
    counts = suite_counts(tmp_path)
    assert (counts.passed, counts.failures, counts.left_out) == (1, ("a.y", "tests-1.xml: no report"), 1)
    outcomes = [Outcome("tests", "failed", 3.0, (1,), "assert x"), Outcome("kernels", "done", 2.0, (0,))]
    text = summarize(FOUND, outcomes, tmp_path)
    assert "1 passed, 2 failed, 1 left out" in text
    assert "FAILED a.y" in text
    assert "assert x" in text
    assert "copy 4.30 TB/s, bfloat16 product 790 TFLOP/s" in text
    assert "prefill attention, b, triton" in text
    assert "ERROR no" in text
    assert text.count("MISSED") + text.count("reached") + text.count("not measured  ") == len(TARGETS)
    assert "prefill attention: FlashInfer, paged: not measured" in text
    assert "86.0%  Qwen3-8B, batch 1" in text
    assert "9.00  over Transformers" in text
    assert str(tmp_path / "results.json") in text


def test_a_run_writes_its_result_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps(FOUND[0]).replace("{", "{{").replace("}", "}}")
    script = f"import sys; open(sys.argv[1], 'a').write({line!r} + chr(10))"
    parts = (
        Part("kernels", ((sys.executable, "-c", script, "{out}"),), 60),
        Part("engine", (prints("no card", 1),), 60),
    )
    monkeypatch.setattr("benchmarks.gpu.run.PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path / "results"), "--seconds", "100"])
    assert main() == 1
    result = json.loads((tmp_path / "results" / "results.json").read_text())
    assert [part["status"] for part in result["parts"]] == ["done", "failed"]
    assert result["records"] == [FOUND[0]]
    assert {target["verdict"] for target in result["targets"]} == {"not measured"}
    assert "== Targets" in capsys.readouterr().out


def test_a_rehearsal_is_interpreted_and_tiny(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every part, each command with the words that its script has for it; and no part's own limit."""
    script = "import os, sys; open(sys.argv[1], 'w').write(' '.join([*sys.argv[2:], os.environ['TRITON_INTERPRET']]))"
    parts = tuple(
        Part(part.name, ((sys.executable, "-c", script, "{folder}/{name}"),), 0.0, part.rehearsal) for part in PARTS
    )
    monkeypatch.setattr("benchmarks.gpu.run.PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path), "--rehearse"])
    assert main() == 0
    assert "Times mean nothing" in capsys.readouterr().out
    result = json.loads((tmp_path / "results.json").read_text())
    assert (result["is_rehearsal"], result["targets"]) == (True, [])
    said = {part.name: (tmp_path / f"{part.name}-0").read_text() for part in parts}
    assert said.pop("tests") == "--interpreted 1"
    assert set(said.values()) == {"--tiny 1"}


def run_script(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path or "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    script = str(ROOT / "benchmarks" / "gpu" / "run.sh")
    return subprocess.run(["bash", script, *arguments], capture_output=True, text=True, env=environment, timeout=120)


def test_the_script_names_its_options_and_refuses_unknown_parts(tmp_path: Path) -> None:
    assert "--parts" in run_script("--help").stdout
    refused = run_script("--parts", "kernel")
    assert refused.returncode == 2
    assert "no part kernel" in refused.stderr
    empty = run_script("--wheels", str(tmp_path))
    assert empty.returncode == 2
    assert "no wheels" in empty.stderr
