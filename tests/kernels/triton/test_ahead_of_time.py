"""Every kernel compiles for the cards that Quire is meant for, and fits into their shared memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from sysconfig import get_paths

import pytest
import triton

from tests.architecture.source import ROOT
from tests.kernels.triton.compiler import Compiler, compiled_environment

SHARED_BYTES = {80: 166_912, 90: 232_448}
"""Of one program, by compute capability."""


@pytest.mark.long
def test_an_engine_finds_what_was_compiled_ahead(tmp_path: Path, triton_compiler: Compiler) -> None:
    """The key has the card's compute capability in it, and neither its driver nor the process that compiled."""
    cache = {"QUIRE_TRITON_CACHE": str(tmp_path / "ahead")}
    compiled = {line["kernel"] for line in triton_compiler.run("ahead_of_time", "90", "words", "cache", **cache)}
    looked_up = triton_compiler.run("cached_launches", **cache)
    assert {line["kernel"] for line in looked_up} == compiled | {"__triton_launcher", "cuda_utils"}
    assert all(line["was cached"] for line in looked_up)
    elsewhere = triton_compiler.run("cached_launches", "80", **cache)
    assert {line["was cached"] for line in elsewhere if line["kernel"] in compiled} == {False}


@pytest.mark.long
def test_an_engine_of_another_python_finds_what_was_compiled_for_it(tmp_path: Path, triton_compiler: Compiler) -> None:
    """Its Triton differs in one file, which is part of every key. Modules in C have the names that it looks for."""
    theirs = tmp_path / "site" / "triton"
    copy_of_triton(theirs)
    other = f"import json; print(json.dumps([{get_paths()['include']!r}, '.cpython-399.so', '3.99']))"
    asked = tmp_path / "python3.99"
    asked.write_text(f"#!{sys.executable}\n{other}\n")
    asked.chmod(0o755)
    cache = {"QUIRE_TRITON_CACHE": str(tmp_path / "cache")}
    libtriton = f"libtriton={theirs / '_C' / 'libtriton.so'}"
    words = ("90", "words", "cache", f"for={asked}", libtriton)
    compiled = {line["kernel"] for line in triton_compiler.run("ahead_of_time", *words, **cache)}
    with_their_triton = subprocess.run(
        (sys.executable, "-m", "tests.kernels.triton.cached_launches"),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=compiled_environment(**cache, PYTHONPATH=os.pathsep.join((str(theirs.parent), str(ROOT)))),
    )
    assert with_their_triton.returncode == 0, with_their_triton.stderr[-2000:]
    theirs_found = [json.loads(line) for line in with_their_triton.stdout.splitlines()]
    for looked_up, is_found in ((theirs_found, True), (triton_compiler.run("cached_launches", **cache), False)):
        assert {line["was cached"] for line in looked_up if line["kernel"] in compiled} == {is_found}
    modules = [path for path in (tmp_path / "cache").glob("*/*.cpython-399.so") if path.stat().st_size]
    names = [path.name for path in modules]
    assert names.count("cuda_utils.cpython-399.so") == 2, "with the program `file` and without"
    assert len(names) == 2 + 2 * len(compiled)
    for module in modules:
        needed = subprocess.run(("readelf", "-d", module), capture_output=True, text=True, check=True).stdout
        assert "Shared library: [libcuda.so.1]" in needed, "else it cannot be loaded on a card"


def copy_of_triton(to: Path) -> None:
    """The installed Triton by links, but for its compiled part, which is a byte longer."""
    installed = Path(triton.__file__).parent
    shutil.copytree(installed, to, copy_function=os.symlink)
    changed = to / "_C" / "libtriton.so"
    changed.unlink()
    shutil.copyfile(installed / "_C" / "libtriton.so", changed)
    with changed.open("ab") as file:
        file.write(b"\0")


@pytest.mark.long
@pytest.mark.timeout(1800)  # minutes of a compiler, which other processes slow down
@pytest.mark.parametrize("arguments", [("90",), ("80", "products")], ids=str)
def test_kernels_compile_and_fit(triton_compiler: Compiler, arguments: tuple[str, ...]) -> None:
    capability = int(arguments[0])
    launches = triton_compiler.run("ahead_of_time", *arguments)
    assert {launch["kernel"]: launch for launch in launches if launch["shared"] > SHARED_BYTES[capability]} == {}
    # A few bytes of stack are sums that wait outside an attention kernel's innermost loop.
    # Not tuned on a card yet: 64 x 512 sums are half of all registers; a state, 64 keys and 64 updates are too many.
    most = {"_latent_kernel": 704, "_sparse_kernel": 768}
    if capability == 90:
        most["_rule_kernel"] = 2560
        most["_varlen_kernel"] = 96  # two programs on a multiprocessor are faster all the same, as measured
        (prompts,) = (launch for launch in launches if launch["kernel"] == "_warp_group_kernel")
        assert prompts["wgmma.mma_async"] == 2 * (8 + 16 + 16 + 8), (
            "first keys, a step with a mask, one without, last values"
        )
        rules = [launch["registers"] for launch in launches if launch["kernel"] == "_rule_kernel"]
        assert rules == [255], "the assembler's highest level takes 32, and spills 10 times as much"
        chunks = [launch for launch in launches if launch["kernel"] in ("_chunk_kernel", "_states_kernel")]
        assert len(chunks) == 2
        assert all(launch["wgmma.mma_async"] for launch in chunks), "delta rules of prompts"
        merges = [launch for launch in launches if launch["kernel"] == "_merge_kernel"]
        assert any(launch.get("cp.async.cg", 0) >= 7 for launch in merges), "parts of latents on their way"
    if capability == 80:
        most["_varlen_kernel"] = 304  # over e4m3 bits, which this card does not convert: not tuned yet
    spilling = [launch for launch in launches if launch["stack"] > most.get(launch["kernel"], 64)]
    assert spilling == [], "spills"
    products = [launch for launch in launches if launch["kernel"] == "_matmul_kernel"]
    instruction = "wgmma.mma_async" if capability == 90 else "mma.sync"
    assert sum(launch.get(instruction, 0) > 0 for launch in products) == len(products) - 1, "all but float32"
    attention = [launch for launch in launches if launch["kernel"] in ("_varlen_kernel", "_split_kernel")]
    assert len(attention) == (8 if capability == 90 else 4)
    for launch in attention:
        assert launch.get("wgmma.mma_async", 0) + launch.get("mma.sync", 0) > 0
        assert launch.get("cp.async.cg", 0) > 0, "keys and values come 16 bytes at a time, past the first-level cache"
        if launch["kernel"] == "_varlen_kernel":
            assert launch.get(instruction, 0) > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_attention_of_towers_fits(triton_compiler: Compiler, capability: int) -> None:
    """Wide heads in float32 take fewer tiles at once. (They spill: towers compute in 16 bits.)"""
    launches = triton_compiler.run("ahead_of_time", str(capability), "towers")
    assert len(launches) == 2
    assert max(launch["shared"] for launch in launches) <= SHARED_BYTES[capability]


@pytest.mark.long
def test_no_compiler_fuses_what_attention_leaves_open(triton_compiler: Compiler) -> None:
    """A product and a sum that it may contract in one loop and not in the other give a row other bits there: a soft
    cap's, in tiles with a mask and without."""
    counts = triton_compiler.run("contractions")
    assert {each["kernel"] for each in counts} == {"_varlen_kernel", "_split_kernel", "_merge_kernel"}
    for apart, contracted in zip(counts[::2], counts[1::2], strict=True):
        assert apart["fused"] == contracted["fused"], apart["kernel"]
