"""A run of parts: limits of time are kept, what fails stops nothing, what is known is in four files at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import records, run
from benchmarks.gpu.parts import ROOT, Outcome, Part, run_part
from benchmarks.gpu.run import (
    FIRST_SECONDS,
    RESERVED_SECONDS,
    SIDE_BY_SIDE_SECONDS,
    choose,
    first_parts,
    relocate,
    side_by_side_parts,
)
from benchmarks.gpu.summary import summarize
from tests.processes import has_pid_ended

HANGS = (sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(100)")
FILES = ["logs.tar.xz", "results.json", "summary.txt", "triton-cache.tar.xz"]
MOST_TREE_BYTES = 13 << 20
"""Of 64 MiB that a call may carry: vLLM, its wheels and the cache of kernels take up to 50."""


def prints(text: str, code: int = 0) -> tuple[str, ...]:
    return (sys.executable, "-c", f"print({text!r}); raise SystemExit({code})")


def take(part: Part, folder: Path, seconds: float = 60) -> Outcome:
    return run_part(part, folder, folder / "results.jsonl", seconds, {"OF_THE_RUN": "1"})


def test_parts_that_end_by_themselves(tmp_path: Path) -> None:
    done = take(Part("good", prints("one"), 60), tmp_path)
    assert (done.status, done.tail) == ("done", "")
    assert (tmp_path / "good.log").read_text() == "one\n"
    failed = take(Part("bad", prints("broken", 3), 60), tmp_path)
    assert (failed.status, failed.tail) == ("failed", "broken\n")
    assert take(Part("late", HANGS, 60), tmp_path, 1).status == "not begun"
    assert take(Part("long", HANGS, 60, least=30), tmp_path, 20).status == "not begun"


def test_names_and_variables_are_filled_in(tmp_path: Path) -> None:
    script = "import os, sys; print(sys.argv[1:], os.environ['OF_THE_RUN'], os.environ['OWN'])"
    echo = (sys.executable, "-c", script, "{out}", "{folder}/x")
    take(Part("echo", echo, 60, environment={"OWN": "2"}), tmp_path)
    expected = f"{[str(tmp_path / 'results.jsonl'), str(tmp_path / 'x')]} 1 2\n"
    assert (tmp_path / "echo.log").read_text() == expected


def test_what_a_part_leaves_running_is_ended(tmp_path: Path) -> None:
    """One that hangs with a child that cannot be asked, and one that ends well and leaves a session of its own."""
    sleeps = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    starts = f"p = subprocess.Popen([sys.executable, '-c', {sleeps!r}], start_new_session=True)"
    for name, after in (("hangs", sleeps), ("leaves", "pass")):
        command = (sys.executable, "-c", f"import subprocess, sys; {starts}; print(p.pid, flush=True); {after}")
        script = f"""
import sys
from pathlib import Path
from benchmarks.gpu.parts import Part, adopt_orphans, run_part
adopt_orphans()
folder = Path(sys.argv[1])
print(run_part(Part({name!r}, {command!r}, 6), folder, folder / "x", 60, {{}}).status)
"""
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout == ("out of time\n" if name == "hangs" else "done\n"), done.stderr
        assert has_pid_ended(int((tmp_path / f"{name}.log").read_text())), "what is left would hold the card"


def test_parts_fit_into_their_calls() -> None:
    """A part that uses all of its time takes none from those after it; the last of each call gets what is left."""
    first, beside = first_parts(), side_by_side_parts("/peers")
    assert [part.name for part in first][:4] == ["machine", "gate", "engine", "kernels"]
    assert sum(part.seconds for part in first[:-1]) + 20 <= FIRST_SECONDS - RESERVED_SECONDS
    assert sum(part.seconds for part in beside[:-1]) <= SIDE_BY_SIDE_SECONDS - RESERVED_SECONDS
    theirs = [part.name for part in beside if "/peers" in part.environment.get("PYTHONPATH", "")]
    assert theirs == ["vllm", "vllm-fp8"]
    assert [part.name for part in choose(first, "kernels,gate")] == ["gate", "kernels"]
    with pytest.raises(ValueError, match="no part kernel "):
        choose(first, "kernel,gate")
    for part in (*first, *beside):
        paths = [
            word.partition("::")[0] for word in (*part.command, *(part.rehearsed or ())) if word.startswith("tests/")
        ]
        assert all((ROOT / path).exists() for path in paths), part.name
        assert paths or (ROOT / Path(*part.command[2].split("."))).with_suffix(".py").exists(), part.name


def test_what_is_carried_leaves_room_for_the_peers() -> None:
    """The tree without the bundled weights, which no part of a run needs."""
    names = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True)
    if names.returncode:
        pytest.skip("not a git checkout")
    carried = [ROOT / name for name in names.stdout.split("\0") if name and not name.startswith("quire/bundled/")]
    assert sum(path.stat().st_size for path in carried if path.is_file()) < MOST_TREE_BYTES


def test_four_files_are_whole_after_a_kill(tmp_path: Path) -> None:
    """The run is killed while its second part runs: the first one's results are there."""
    cache, out = tmp_path / "cache", tmp_path / "out"
    (cache / "KEY").mkdir(parents=True)
    (cache / "KEY" / "a.cubin").write_bytes(b"code")
    emits = "import json, sys; open(sys.argv[1], 'a').write(json.dumps(dict(part='quick', what='x')) + chr(10))"
    script = f"""
import sys
from benchmarks.gpu import run
from benchmarks.gpu.parts import Part
parts = [Part("quick", (sys.executable, "-c", {emits!r}, "{{out}}"), 60), Part("slow", {HANGS!r}, 60)]
run.first_parts = lambda: parts
sys.exit(run.main())
"""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    assert process.stdout is not None
    for line in process.stdout:
        if "slow" in line:
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert sorted(path.name for path in out.iterdir()) == FILES
    result = json.loads((out / "results.json").read_text())
    assert [part["status"] for part in result["parts"]] == ["done"]
    assert {"part": "quick", "what": "x"} in result["records"]
    assert "quick" in (out / "summary.txt").read_text()
    with tarfile.open(out / "logs.tar.xz") as logs, tarfile.open(out / "triton-cache.tar.xz") as kernels:
        assert "logs/quick.log" in logs.getnames()
        assert "./KEY/a.cubin" in kernels.getnames()


def test_the_next_call_begins_with_the_cache_of_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    (cache / "KEY").mkdir(parents=True)
    (cache / "KEY" / "a.cubin").write_bytes(b"code")
    run.pack(cache, tmp_path / "triton-cache.tar.xz", ".")
    began = {"TRITON_CACHE_DIR": str(tmp_path / "next")}
    said = run_script("--triton-cache", str(tmp_path / "triton-cache.tar.xz"), "--help", **began)
    assert "--side-by-side" in said.stdout
    assert (tmp_path / "next" / "KEY" / "a.cubin").read_bytes() == b"code"


def run_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **variables}
    script = str(ROOT / "benchmarks" / "gpu" / "run.sh")
    return subprocess.run(["bash", script, *arguments], capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--parts", "kernel"), "no part kernel"),
        (("--wheels", "{}"), "no wheels"),
        (("--side-by-side", "--peer", "{}/none.tar.xz"), "cannot unpack"),
    ],
)
def test_the_script_refuses(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    refused = run_script(*(word.format(tmp_path) for word in arguments), TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert refused.returncode == 2
    assert words in refused.stderr


def test_a_mistake_in_the_summary_costs_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> str:
        raise KeyError("share")

    monkeypatch.setattr(run, "summarize", broken)
    made = run.Run(tmp_path / "out", tmp_path, is_rehearsal=False)
    assert made.take(Part("fine", prints("one"), 60), 60, {}).status == "done"
    assert "The summary failed" in (tmp_path / "out" / "summary.txt").read_text()
    assert json.loads((tmp_path / "out" / "results.json").read_text())["parts"][0]["name"] == "fine"


def test_the_summary_names_tests_that_failed(tmp_path: Path) -> None:
    log = "..F\nFAILED tests/gpu/test_bits.py::test_a[1] - AssertionError\n1 failed, 2 passed in 3.20s\n"
    (tmp_path / "gate.log").write_text(log)
    text = summarize([{"part": "a", "what": "b", "error": "no"}], [Outcome("gate", "failed", 3.0, log)], tmp_path)
    assert "1 failed, 2 passed in 3.20s" in text
    assert "FAILED tests/gpu/test_bits.py::test_a[1]" in text
    assert "ERROR a, b: no" in text


def test_records_survive_a_broken_last_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert records.read(path) == []
    records.writer(path)({"part": "a", "what": "b"})
    with path.open("a") as file:
        file.write('{"part": "a", "wh')
    assert records.read(path) == [{"part": "a", "what": "b"}]


def test_a_cache_that_was_moved_names_its_own_files(tmp_path: Path) -> None:
    """Triton stores absolute paths: without this a carried cache is never hit."""
    for key in ("A", "B"):
        (tmp_path / key).mkdir()
        names = {name: f"/elsewhere/{key}/{name}" for name in ("_norm_kernel.cubin", "_norm_kernel.json")}
        (tmp_path / key / "__grp___norm_kernel.json").write_text(json.dumps({"child_paths": names}))
    relocate(tmp_path)
    for key in ("A", "B"):
        found = json.loads((tmp_path / key / "__grp___norm_kernel.json").read_text())
        assert found == {
            "child_paths": {name: str(tmp_path / key / name) for name in ("_norm_kernel.cubin", "_norm_kernel.json")}
        }
