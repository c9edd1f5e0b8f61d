"""Which precision products with bfloat16 weights get where the user has not chosen."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from quire.kernels.cpu import _native
from quire.kernels.cpu.precision import MARGIN, choose_precision, measure_rates

ISA = "native"
CPU_INFO = """processor\t: 0
vendor_id\t: {vendor}
cpu family\t: {family}
model\t\t: {model}
model name\t: Some Processor

processor\t: 1
vendor_id\t: SomeoneElse
cpu family\t: 1
model\t\t: 1
"""


@pytest.fixture
def cpu_info(tmp_path: Path) -> Path:
    return tmp_path / "cpuinfo"


@pytest.fixture(autouse=True)
def instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that multiplies bfloat16, whatever this machine has."""
    monkeypatch.setattr(_native, "has_bf16_products", lambda isa: isa != "old")
    monkeypatch.setattr(_native, "available_isas", lambda: ["old", ISA, "amx"])


def describe(path: Path, vendor: str, family: int, model: int) -> Path:
    path.write_text(CPU_INFO.format(vendor=vendor, family=family, model=model))
    return path


def never(isa: str) -> float:
    raise AssertionError("measured")


@pytest.mark.parametrize(
    ("processor", "precision"),
    [
        (("AuthenticAMD", 25, 97), "bfloat16"),
        (("AuthenticAMD", 26, 2), "bfloat16"),
        (("GenuineIntel", 6, 143), "float32"),
        (("GenuineIntel", 6, 207), "float32"),
    ],
)
def test_known_processors_are_not_measured(
    cpu_info: Path, tmp_path: Path, processor: tuple[str, int, int], precision: str
) -> None:
    memory = tmp_path / "cache" / "processors.json"
    choice = choose_precision(ISA, memory=memory, cpu_info=describe(cpu_info, *processor), measure=never)
    assert choice.precision == precision
    assert not memory.exists()


@pytest.mark.parametrize(
    ("ratio", "precision"), [(0.5, "float32"), (1.19, "float32"), (MARGIN, "bfloat16"), (2.0, "bfloat16")]
)
def test_others_are_measured_once(cpu_info: Path, tmp_path: Path, ratio: float, precision: str) -> None:
    memory = tmp_path / "cache" / "processors.json"
    describe(cpu_info, "GenuineIntel", 6, 85)
    first = choose_precision(ISA, memory=memory, cpu_info=cpu_info, measure=lambda isa: ratio)
    assert first.precision == precision
    assert f"{ratio:.2f} times" in first.reason
    again = choose_precision(ISA, memory=memory, cpu_info=cpu_info, measure=never)
    assert again.precision == precision
    describe(cpu_info, "GenuineIntel", 6, 86)
    choose_precision(ISA, memory=memory, cpu_info=cpu_info, measure=lambda isa: 1 / ratio)
    assert set(json.loads(memory.read_text())) == {"GenuineIntel 6 85 native", "GenuineIntel 6 86 native"}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"unknown native": "float8"}', "\x00"])
def test_a_damaged_memory_is_written_anew(cpu_info: Path, tmp_path: Path, content: str) -> None:
    memory = tmp_path / "processors.json"
    memory.write_text(content)
    choice = choose_precision(ISA, memory=memory, cpu_info=cpu_info, measure=lambda isa: 2.0)
    assert choice.precision == "bfloat16"
    assert json.loads(memory.read_text()) == {"unknown native": "bfloat16"}


def test_a_memory_that_cannot_be_written(cpu_info: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    memory = tmp_path / "file" / "processors.json"
    for ratio, precision in ((2.0, "bfloat16"), (0.5, "float32")):
        choice = choose_precision(ISA, memory=memory, cpu_info=cpu_info, measure=lambda isa, ratio=ratio: ratio)  # type: ignore[misc]
        assert choice.precision == precision


def test_without_the_instruction(cpu_info: Path) -> None:
    assert choose_precision("old", cpu_info=cpu_info, measure=never).precision == "float32"


def test_tiles_are_not_measured(cpu_info: Path) -> None:
    """Also on processors whose vector instruction is slow."""
    describe(cpu_info, "GenuineIntel", 6, 143)
    choice = choose_precision("amx", cpu_info=cpu_info, measure=never)
    assert (choice.precision, "tiles" in choice.reason) == ("bfloat16", True)


def test_an_emulation_uses_what_it_emulates(cpu_info: Path) -> None:
    assert choose_precision("bf16_emulated", cpu_info=cpu_info, measure=never).precision == "bfloat16"


def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ratio = measure_rates("bf16_emulated")
    assert math.isfinite(ratio)
    assert ratio > 0
