"""What decides designs compiles for a card that is not there: the interpreter does not see options of the compiler."""

from __future__ import annotations

import pytest

from tests.kernels.triton.compiler import Compiler
from tests.kernels.triton.test_ahead_of_time import SHARED_BYTES


@pytest.mark.long
def test_experiments_compile_for_hopper(triton_compiler: Compiler) -> None:
    launches = triton_compiler.run("tests.benchmarks.gpu.compiled_experiments")
    assert [launch["griddepcontrol"] for launch in launches[:2]] == [0, 2]
    products = launches[2:]
    assert len(products) == 6
    assert all(launch["wgmma.mma_async"] > 0 for launch in products)
    assert max(launch["shared"] for launch in products) <= SHARED_BYTES[90]
