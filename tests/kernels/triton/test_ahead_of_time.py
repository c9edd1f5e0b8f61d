"""Every kernel compiles for the cards that Quire is meant for, and fits into their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT

SHARED_BYTES = {80: 166_912, 90: 232_448}
"""Of one program, by compute capability."""


@pytest.mark.parametrize("arguments", [("90",), ("80", "products")], ids=" ".join)
def test_kernels_compile_and_fit(arguments: tuple[str, ...]) -> None:
    capability = int(arguments[0])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.ahead_of_time", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    launches = [json.loads(line) for line in run.stdout.splitlines()]
    assert {launch["kernel"]: launch for launch in launches if launch["shared"] > SHARED_BYTES[capability]} == {}
    # A few bytes of stack are sums that wait outside an attention kernel's innermost loop.
    assert {launch["kernel"]: launch for launch in launches if launch["stack"] > 64} == {}, "spills"
    products = [launch for launch in launches if launch["kernel"] == "_matmul_kernel"]
    instruction = "wgmma.mma_async" if capability == 90 else "mma.sync"
    assert sum(launch.get(instruction, 0) > 0 for launch in products) == len(products) - 1, "all but float32"
    attention = [launch for launch in launches if launch["kernel"] in ("_varlen_kernel", "_split_kernel")]
    assert len(attention) == (6 if capability == 90 else 2)
    for launch in attention:
        assert launch.get("wgmma.mma_async", 0) + launch.get("mma.sync", 0) > 0
        assert launch.get("cp.async.cg", 0) > 0, "keys and values come 16 bytes at a time, past the first-level cache"
        if launch["kernel"] == "_varlen_kernel":
            assert launch.get(instruction, 0) > 0
