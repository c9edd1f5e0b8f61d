"""A run of parts: limits of time are kept, what fails stops nothing, and the summary says what came of it."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import records, targets
from benchmarks.gpu.archive import pack
from benchmarks.gpu.attention_subjects import DECODES, PROMPTS
from benchmarks.gpu.parts import Outcome, Part, choose, run_part
from benchmarks.gpu.run import GATE, RESERVED_SECONDS, SIDE_BY_SIDE, all_parts, gate_files, main, more_parts
from benchmarks.gpu.summary import first_to_fix, library_verdict, suite_counts, summarize
from benchmarks.gpu.targets import TARGETS, verdicts
from tests.architecture.source import ROOT
from tests.processes import has_pid_ended

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
    parts = all_parts()
    assert [part.name for part in choose(parts, "kernels,tests")] == ["tests", "kernels"]
    assert choose(parts, None) == list(parts)
    with pytest.raises(ValueError, match="no part kernel "):
        choose(parts, "kernel,tests")


def test_all_parts_fit_into_ten_minutes_together() -> None:
    """So that a part that uses all of its time takes none from those after it."""
    assert sum(part.seconds for part in all_parts()) <= 600 - RESERVED_SECONDS


def test_the_gate_comes_first_and_names_the_files_that_are_missing() -> None:
    assert [part.name for part in all_parts()][:3] == ["machine", "gate", "tests"]
    there, missing = gate_files()
    assert sorted([*(Path(path).stem for path in there), *missing]) == sorted(GATE)
    assert "tests/gpu/test_shapes.py" in there


def test_every_part_runs_something_that_exists() -> None:
    for part in (*all_parts(), *more_parts()):
        for command in (*part.commands, *(part.rehearsed_commands or ())):
            assert command[0] == sys.executable
            paths = [Path(word) for word in command if word.startswith("tests/")]
            module = command[2]
            assert module == "pytest" or (ROOT / Path(*module.split("."))).with_suffix(".py").exists(), module
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


LARGE, ALONE, PROMPT, SHORT = (
    "256 x 1 of 1024 tokens",
    "1 x 1 of 8192 tokens",
    "1 x 8192 of 8192 tokens",
    "8 x 1024 of 1024 tokens",
)
FOUND = [
    {"part": "kernels", "what": "limits", "bandwidth": 4.3e12, "peak": 7.9e14, "spread": {}},
    kernel("decode attention", LARGE, "triton", 1.05, 0.9),
    kernel("decode attention", LARGE, "contiguous", 1.0, 0.95),
    kernel("decode attention", LARGE, "planned for 40,960", 1.155, 0.82),
    kernel("decode attention", ALONE, "triton", 2.4, 0.55),
    kernel("decode attention", ALONE, "contiguous", 2.0, 0.8),
    kernel("prefill attention", PROMPT, "triton", 1.0, 0.65),
    {
        "part": "kernels",
        "what": "kernel",
        "kernel": "prefill attention",
        "case": SHORT,
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
    {"part": "engine", "mode": "full", "what": "batch", "share": 0.75, "num_preemptions": 3},
    {"part": "engine", "mode": "full", "what": "peer work", "tokens_per_second": 900.0},
    {"part": "transformers", "what": "transformers, first run", "tokens_per_second": 1.0},
    {"part": "transformers", "what": "transformers", "tokens_per_second": 100.0},
]


def test_targets_are_judged_by_the_records() -> None:
    found = verdicts(FOUND)
    assert len(found) == len(TARGETS)

    def of(start: str) -> tuple[float | None, str]:
        (verdict,) = [verdict for verdict in found if verdict.target.text.startswith(start)]
        return verdict.value, verdict.word

    assert of("decode attention >=") == (0.9, "reached")
    assert of("decode attention of one") == (0.55, "MISSED")
    assert of("prompt attention, 8192") == (0.65, "reached")
    assert of("prompt attention, 8 x 1024") == (None, "not measured")
    assert of("norms") == (0.9, "reached")
    assert of("Qwen3-8B, batch 1") == (0.86, "reached")
    assert of("as many requests as fit") == (0.75, "reached")
    assert of("no preemption") == (3, "MISSED")
    assert of("GPU idle") == (None, "not measured")
    assert of("splits planned for 40,960") == (pytest.approx(0.1), "MISSED")
    assert of("full graphs over eager") == (pytest.approx((0.4 + 0.1) / 2), "reached")
    assert of("piecewise graphs over eager") == (pytest.approx(2.2 / 2.1 - 1), "MISSED")
    assert of("full over piecewise") == (pytest.approx(0.05), "reached")
    assert of("over Transformers") == (pytest.approx(9.0), "reached")
    assert of("paged over contiguous") == (pytest.approx((0.05 + 0.2) / 2), "MISSED")


def test_cases_that_targets_name_are_measured() -> None:
    names = {batch.name for batch in (*DECODES, *PROMPTS)}
    assert {LARGE, ALONE, PROMPT, SHORT} <= names
    assert targets.ONE_LONG == ALONE


def test_the_worst_miss_is_the_one_that_costs_most(tmp_path: Path) -> None:
    """Four points of idle time are less than a fifth of a kernel's limit."""
    idle = {"part": "engine", "mode": "full", "what": "idle", "idle": 0.07}
    slow = kernel("decode attention", LARGE, "triton", 1.0, 0.64)
    assert first_to_fix([idle, slow], DONE, tmp_path, is_rehearsal=False).startswith("decode attention >= 80 %")
    assert first_to_fix([idle], DONE, tmp_path, is_rehearsal=False).startswith("GPU idle between steps")
    assert first_to_fix([idle], DONE, tmp_path, is_rehearsal=True) == "nothing failed"


DONE = [Outcome("kernels", "done", 2.0, (0,))]


def test_what_makes_figures_worthless_is_fixed_first(tmp_path: Path) -> None:
    def first(found: list[records.Record], outcomes: list[Outcome]) -> str:
        return first_to_fix(found, outcomes, tmp_path, is_rehearsal=False)

    machine = {"part": "machine", "what": "machine", "needs": [{"name": "C compiler", "missing": "no gcc"}]}
    assert first([], DONE).startswith("nothing")
    assert "write the tests tests/gpu/x.py" in first([{"what": "missing", "name": "tests/gpu/x.py"}], DONE)
    sound = [record for record in FOUND if "error" not in record]
    assert first(sound, DONE).startswith("no preemption in that batch: 3.00. Look at: the number of blocks")
    assert first(FOUND, DONE).startswith(f"kernel, prefill attention, {SHORT}, triton: no")
    assert first(FOUND, [Outcome("engine", "out of time", 150.0)]) == "the part engine: out of time"
    (tmp_path / "gate-0.log").write_text("")
    assert first(FOUND, DONE).startswith("gate: gate-0.xml: no report (1 failed)")
    assert first([*FOUND, machine], DONE) == "the machine: C compiler: no gcc"


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
    ],
)  # fmt: skip
def test_whether_to_pick_another_library(theirs: dict[str, float], reads_pages: bool, verdict: str) -> None:
    found = timed("triton", a=1.0, b=2.0) + timed("FlashInfer, paged", **theirs)
    line = library_verdict(found, "decode attention", "FlashInfer, paged", reads_pages)
    assert line is not None
    assert verdict in line
    assert library_verdict(found, "decode attention", "FlashAttention 3, paged", reads_pages) is None


def test_the_summary(tmp_path: Path) -> None:
    (tmp_path / "tests-0.log").write_text("")
    cases = ['name="x"/>', 'name="y"><failure/></testcase>', 'name="z"><skipped/></testcase>']
    body = "".join(f'<testcase classname="a" {case}' for case in cases)
    (tmp_path / "tests-0.xml").write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    (tmp_path / "tests-1.log").write_text("")
    counts = suite_counts(tmp_path)
    assert (counts.passed, counts.failures, counts.left_out) == (1, ("a.y", "tests-1.xml: no report"), 1)
    outcomes = [Outcome("tests", "failed", 3.0, (1,), "assert x"), Outcome("kernels", "done", 2.0, (0,))]
    throttled = {"part": "engine", "what": "clocks", "after": {"reasons": "0x0000000000000004"}}
    peer = kernel("decode attention", LARGE, "FlashAttention 3, paged", 0.525, 0.9)
    text = summarize([*FOUND, throttled, peer], outcomes, tmp_path)
    assert "First to fix: tests: a.y (2 failed)" in text
    assert "1 passed, 2 failed, 1 left out" in text
    assert "FAILED a.y" in text
    assert "assert x" in text
    assert "copy 4.30 TB/s, bfloat16 product 790 TFLOP/s" in text
    assert f"ERROR kernel, prefill attention, {SHORT}, triton: no" in text
    assert f"decode   {LARGE:26} 90.0% 1050000.0 us; FlashAttention 3, paged 2.00 x as fast" in text
    assert "decode attention: FlashAttention 3, paged: faster in 1 of 1 cases" in text
    assert "86.0%  Qwen3-8B, batch 1" in text
    assert "9.00  over Transformers" in text
    assert "ladder (full): 1: 1000.00 ms 50%" in text
    assert "Throttled after: engine" in text
    assert len(text.splitlines()) <= 70, "one page"


def stand_in_parts(monkeypatch: pytest.MonkeyPatch, *parts: Part) -> None:
    monkeypatch.setattr("benchmarks.gpu.run.all_parts", lambda: parts)


def test_a_run_writes_its_result_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps(FOUND[0]).replace("{", "{{").replace("}", "}}")
    script = f"import sys; open(sys.argv[1], 'a').write({line!r} + chr(10))"
    stand_in_parts(
        monkeypatch,
        Part("kernels", ((sys.executable, "-c", script, "{out}"),), 60),
        Part("engine", (prints("no card", 1),), 60),
    )
    monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path / "results"), "--seconds", "200"])
    assert main() == 1
    result = json.loads((tmp_path / "results" / "results.json").read_text())
    assert [part["status"] for part in result["parts"]] == ["done", "failed"]
    assert FOUND[0] in result["records"]
    assert {target["verdict"] for target in result["targets"]} == {"not measured"}
    assert "== Targets" in capsys.readouterr().out
    assert "== Targets" in (tmp_path / "results" / "summary.txt").read_text()
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [
        "logs.tar.xz",
        "results.json",
        "summary.txt",
    ]
    with tarfile.open(tmp_path / "results" / "logs.tar.xz") as archive:
        assert {"logs/kernels-0.log", "logs/engine-0.log", "logs/results.jsonl"} <= set(archive.getnames())


def test_a_mistake_in_the_summary_costs_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> str:
        raise KeyError("variant")

    stand_in_parts(monkeypatch, Part("kernels", (prints("one"),), 60), Part("engine", (prints("two"),), 60))
    monkeypatch.setattr("benchmarks.gpu.run.summarize", fail)
    monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path)])
    assert main() == 1
    assert [part["status"] for part in json.loads((tmp_path / "results.json").read_text())["parts"]] == ["done"] * 2
    assert "KeyError: 'variant'" in capsys.readouterr().out


def test_a_part_that_hangs_costs_the_next_one_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores being asked to end, and so does a process that it starts in a session of its own. The next part has
    all of its time, and the card to itself."""
    sleeps = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    starts = f"p = subprocess.Popen([sys.executable, '-c', {sleeps!r}], start_new_session=True)"
    hangs = (sys.executable, "-c", f"import subprocess, sys; {starts}; print(p.pid, flush=True); {sleeps}")
    stand_in_parts(monkeypatch, Part("gate", (hangs, hangs), 8), Part("tests", (prints("fine"),), 60))
    limits = []

    def noted(part: Part, out: Path, seconds: float, *rest: Any) -> Outcome:
        limits.append(min(part.seconds, seconds))
        return run_part(part, out, seconds, *rest)

    monkeypatch.setattr("benchmarks.gpu.run.run_part", noted)
    monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path), "--seconds", str(8 + 60 + RESERVED_SECONDS + 30)])
    assert main() == 1
    outcomes = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert [each["status"] for each in outcomes] == ["out of time", "done"]
    assert limits == [8, 60]
    with tarfile.open(tmp_path / "logs.tar.xz") as archive:
        logs = [archive.extractfile(f"logs/gate-{number}.log") for number in (0, 1)]
        started = [int(word) for log in logs if log is not None for word in log.read().split()]
    assert all(map(has_pid_ended, started)), "what is left would hold the card"


def test_processes_that_a_part_orphans_are_ended(tmp_path: Path) -> None:
    """The part itself ends well; what it leaves in a session of its own does not outlive it."""
    leaves = "import subprocess, sys; p = subprocess.Popen(['sleep', '600'], start_new_session=True); print(p.pid)"
    script = f"""
import sys
from pathlib import Path
from benchmarks.gpu.parts import Part, adopt_orphans, run_part
adopt_orphans()
outcome = run_part(Part("leaves", ((sys.executable, "-c", {leaves!r}),), 60), Path(sys.argv[1]), 60)
print(outcome.status)
"""
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout == "done\n", run.stderr
    pid = int((tmp_path / "leaves-0.log").read_text())
    assert has_pid_ended(pid)


def test_a_rehearsal_is_interpreted_and_tiny(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every part, each command with the words that its script has for it, and stand-ins for tools."""
    script = "import os, shutil, sys; open(sys.argv[1], 'w').write(' '.join([*sys.argv[2:], os.environ['TRITON_INTERPRET'], shutil.which('ncu')]))"  # noqa: E501
    echo = (sys.executable, "-c", script, "{folder}/{name}.said")
    stand_in_parts(monkeypatch, *(Part(part.name, (echo,), 1.0, part.rehearsal) for part in all_parts()))
    monkeypatch.setattr("benchmarks.gpu.run.SIDE_BY_SIDE", replace(SIDE_BY_SIDE, commands=(echo,)))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path), "--rehearse"])
    assert main() == 0
    assert "Times mean nothing" in capsys.readouterr().out
    result = json.loads((tmp_path / "results.json").read_text())
    assert (result["is_rehearsal"], result["targets"]) == (True, [])
    with tarfile.open(tmp_path / "logs.tar.xz") as archive:
        files = {Path(name).stem: archive.extractfile(name) for name in archive.getnames() if name.endswith(".said")}
        said = {name.partition("-")[0]: file.read().decode() for name, file in files.items() if file is not None}
    ncu = str(ROOT / "benchmarks" / "gpu" / "stand_ins" / "bin" / "ncu")
    assert said.pop("tests") == said.pop("gate") == f"--interpreted 1 {ncu}"
    assert said.pop("side") == f"--rehearse --rounds 1 1 {ncu}"
    assert set(said.values()) == {f"--tiny 1 {ncu}"}


def test_logs_that_are_too_large_for_a_file_are_cut(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.log").write_bytes(random.Random(0).randbytes(100_000))
    pieces = pack(folder, tmp_path / "logs.tar.xz", max_bytes=40_000)
    assert [path.name for path in pieces] == ["logs.tar.xz.0", "logs.tar.xz.1", "logs.tar.xz.2"]
    assert all(path.stat().st_size <= 40_000 for path in pieces)
    whole = b"".join(path.read_bytes() for path in pieces)
    with tarfile.open(fileobj=io.BytesIO(whole), mode="r:xz") as archive:
        assert archive.getnames() == ["logs", "logs/a.log"]
    assert [path.name for path in pack(folder, tmp_path / "logs.tar.xz")] == ["logs.tar.xz"]
    assert not list(tmp_path.glob("*.xz.*")), "pieces of a run before are gone"


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
    assert "--peer-path" in run_script("--side-by-side", "--help").stdout
    missing = run_script("--peer", str(tmp_path / "none.tar.xz"))
    assert missing.returncode == 2
    assert "cannot unpack" in missing.stderr
