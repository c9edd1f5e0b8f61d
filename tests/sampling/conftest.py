"""The same tests for the plain sampler and for the native one."""

from __future__ import annotations

import pytest

from tests.sampling import helpers


@pytest.fixture(params=["plain", "native"])
def plain_and_native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: `helpers.sample` with plain operators and with native kernels, where they are built."""
    if request.param == "native":
        pytest.importorskip("quire.kernels.cpu._native")
        from quire.kernels.cpu.runtime import NativeRuntime

        monkeypatch.setattr(helpers, "RUNTIME", NativeRuntime("auto", 2))
