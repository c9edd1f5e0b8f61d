"""`quire doctor`: on a CPU, with a device, with something wrong; as text and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quire import envs
from quire.cli import doctor
from quire.cli.doctor import TypicalStep, typical_steps
from quire.cli.machine import Machine, find_machine
from quire.cli.main import main
from quire.config.cuda import CudaDevice, CudaFacts
from quire.config.device import default_ladder
from quire.config.toolchain import Toolchain
from quire.kernels.cpu import _native

H200 = CudaDevice("NVIDIA H200", 141 * 2**30, (9, 0), 132)
PRESENT = CudaFacts("13.0", (13, 1), (H200,), None)
ABSENT = CudaFacts(None, None, (), "torch 2.13.0+cpu was built without CUDA")

COMPLETE = Toolchain("/usr/bin/gcc", "/usr/include/python3.12", "/usr/lib", None)

ROOMY = Machine(64, None, None, 2**30, "madvise", None)

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command on a machine with these devices; returns the exit status and what was printed."""

    def call(
        *arguments: str,
        facts: CudaFacts = ABSENT,
        triton: bool = True,
        node: bool = False,
        toolchain: Toolchain = COMPLETE,
        machine: Machine = ROOMY,
    ) -> tuple[int, str]:
        for place in ("quire.cli.doctor", "quire.config.resolve_device"):
            monkeypatch.setattr(f"{place}.find_cuda", lambda: facts)
            monkeypatch.setattr(f"{place}.has_triton", lambda: triton)
        monkeypatch.setattr(doctor, "find_toolchain", lambda: toolchain)
        monkeypatch.setattr(doctor, "find_machine", lambda: machine)
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        monkeypatch.setattr(doctor, "DEVICE_NODE", Path("/" if node else "/nowhere"))
        status = main(["doctor", *arguments])
        return status, capsys.readouterr().out

    return call


def test_a_cpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    status, text = run()
    assert status == 0
    assert "the CPU: torch 2.13.0+cpu was built without CUDA" in text
    assert "native: kernels for" in text
    (sets,) = [line for line in text.splitlines() if line.startswith("instruction sets")]
    names = _native.available_isas()
    assert sets.split(maxsplit=2)[2] == f"{', '.join(names)}: {names[-1]} is used, the best"
    assert "bundled (LlamaForCausalLM" in text
    assert "Sizes of CUDA graphs" not in text
    assert text.rstrip().endswith("No problems.")


@pytest.mark.parametrize(
    ("options", "change", "problem"),
    [
        (("--threads", "8"), {"cpu_quota": 2.5}, "8 threads share a quota of 2.5 cores, and stand still"),
        (("--threads", "8"), {"cores": 4}, "8 threads share 4 cores: set --threads 4"),
        ((), {"open_files": 1024}, "at most 1024 open files: the server takes 896 connections; 8320 files allow all"),
        (("--kv-cache-memory", "900TiB"), {}, "a KV cache of 900.0 TiB does not fit into the"),
        (("-tp", "2"), {"shared_memory": 64 * 2**20}, "/dev/shm is too small for the ranks of one model"),
        ((), {"huge_pages": "never"}, "transparent huge pages are off"),
        ((), {"governor": "acpi-cpufreq: powersave"}, "the frequency governor is powersave"),
    ],
)
def test_limits_of_a_container(run: Run, options: tuple[str, ...], change: dict[str, object], problem: str) -> None:
    """Each with what to change; an engine would start all the same."""
    status, text = run(*options, machine=replace(ROOMY, **change))  # type: ignore[arg-type]
    assert status == 0
    [found] = [line for line in text.splitlines() if line.startswith("  - ")]
    assert problem in found


def test_a_governor_that_follows_the_load_is_none_to_change(run: Run) -> None:
    assert "No problems." in run(machine=replace(ROOMY, governor="intel_pstate: powersave"))[1]


def test_this_machine_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_machine()
    assert found.cores >= 1
    assert [name for name, _ in found.rows()] == ["processor", "open files", "memory pages"]
    files = {
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(envs, "affinity_numbers", lambda: [0, 1, 2, 5])
    assert find_machine(tmp_path).physical_cores is None
    for number in (0, 1, 2, 5):
        (tmp_path / f"sys/devices/system/cpu/cpu{number}/topology").mkdir(parents=True)
        siblings = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        siblings.write_text("2\n" if number == 2 else f"{number % 4},{number % 4 + 4}\n")
    made_up = find_machine(tmp_path)
    assert (made_up.cores, made_up.physical_cores) == (4, 3)
    assert dict(made_up.rows())["processor"].startswith("4 hardware threads of 3 cores, acpi")
    assert (made_up.huge_pages, made_up.governor) == ("never", "acpi-cpufreq: powersave")
    assert (made_up.cpu_quota, made_up.shared_memory) == (None, None)


def test_a_device(run: Run) -> None:
    """What is printed of a step is what choose_execution says."""
    status, text = run(facts=PRESENT)
    assert status == 0
    assert "NVIDIA H200, 141.0 GiB, compute capability 9.0, 132 multiprocessors" in text
    assert "CUDA driver       13.1" in text
    assert (
        "C compiler        /usr/bin/gcc\nPython's headers  /usr/include/python3.12\nlibcuda           /usr/lib\n"
        in text
    )
    assert "  " + " ".join(map(str, default_ladder(256, 8192))) in text
    lines = {line.strip() for line in text.splitlines()}
    assert "3 decoding                      one graph of 4 tokens, 1 of them padding" in lines
    assert "256 decoding                    one graph of 256 tokens" in lines
    assert "1 decoding, a prompt of 31      graphs of 32 tokens, attention between them" in lines
    assert "64 decoding, a prompt of 500    graphs of 576 tokens, 12 of them padding, attention between them" in lines
    assert "a prompt of 8192                kernel by kernel, 8192 tokens" in lines
    assert "varlen: tiles of" in text
    assert "decode, a sequence and key head cut in" in text


def test_options_count(run: Run) -> None:
    _, text = run("--enforce-eager", "--max-num-seqs", "2", "--batch-invariant", facts=PRESENT)
    assert "Sizes of CUDA graphs" not in text
    assert "2 decoding                      kernel by kernel, 2 tokens" in text
    assert "batch invariant   yes" in text
    _, text = run("--device", "cpu", facts=PRESENT)
    assert "the CPU, as the options say" in text


def test_json_has_everything(run: Run) -> None:
    status, text = run("--json", "--max-num-seqs", "4", facts=PRESENT)
    report = json.loads(text)
    assert status == 0
    assert report["cuda"]["devices"][0]["capability"] == [9, 0]
    assert report["ladder"] == list(default_ladder(4, 8192))
    assert ["4 decoding", "one graph of 4 tokens"] in report["choices"]
    assert report["versions"]["torch"]
    assert report["problems"] == []


@pytest.mark.parametrize(
    ("options", "machine", "problem", "status"),
    [
        ((), {"facts": PRESENT, "triton": False}, "Triton is not installed", 1),
        (("--device", "cuda"), {}, "device='cuda' is not possible: torch 2.13.0+cpu was built without CUDA", 1),
        ((), {"node": True}, "there is an NVIDIA driver, and no device can be used: torch 2.13.0+cpu", 0),
        ((), {"facts": CudaFacts("13.0", (13, 0), (CudaDevice("T4", 2**34, (7, 5), 40),), None)}, "T4 is too old", 1),
        ((), {"facts": PRESENT, "toolchain": Toolchain(None, "x", "x", None)}, "no C compiler (gcc or clang", 0),
        (
            (),
            {"facts": PRESENT, "toolchain": Toolchain("x", None, "x", None)},
            "Python's headers (Python.h) are not",
            0,
        ),
        ((), {"facts": PRESENT, "toolchain": Toolchain("x", "x", None, None)}, "libcuda.so.1 is not found", 0),
        (
            (),
            {"facts": PRESENT, "toolchain": Toolchain("x", "x", "x", "13.1")},
            "TRITON_PTXAS_PATH names ptxas 13.1",
            0,
        ),
        (("--kv-cache-dtype", "int8"), {"facts": PRESENT}, "kv_cache_dtype='int8' is not available", 1),
        (("no/such/model",), {}, "no/such/model", 1),
    ],
)
def test_problems(
    run: Run,
    options: tuple[str, ...],
    machine: dict[str, object],
    problem: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found, text = run(*options, **machine)
    assert problem in text.partition("Problems\n")[2]
    assert found == status


def test_what_is_missing_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_native_kernels", lambda: False)
    monkeypatch.setattr(doctor, "SERVER_MODULES", ("zmq", "no_such_module"))
    status, text = run()
    assert status == 0
    assert "the native CPU kernels are not built" in text
    assert "`quire serve` is not possible: no_such_module is not installed" in text


def test_typical_steps_fit_the_budget() -> None:
    for max_num_seqs, budget in ((256, 8192), (1, 16), (4, 4), (2000, 2048)):
        steps = typical_steps(max_num_seqs, budget)
        assert all(step.num_tokens <= budget and step.num_seqs <= max_num_seqs for step in steps if step.num_decodes)
        assert any(step.num_decodes == max_num_seqs for step in steps)
    step = TypicalStep(2, (5, 7))
    assert (step.num_tokens, step.num_seqs, step.max_query_len) == (14, 4, 7)
    assert str(step) == "2 decoding, a prompt of 5, a prompt of 7"


def test_it_needs_no_torch() -> None:
    program = "import sys; from quire.cli.main import main; main(['doctor']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
