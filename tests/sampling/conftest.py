"""The same tests for every set of kernels."""

from __future__ import annotations

import pytest
import torch

from tests.sampling import helpers


@pytest.fixture(params=["plain", "native"])
def plain_and_native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: `helpers.sample` with plain kernels and with native ones, where they are built."""
    use(request.param, monkeypatch)


@pytest.fixture(params=["plain", "native", "triton"])
def kernel_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> str:
    """Runs a test with every set of kernels, those of a device on `device`; returns the set's name."""
    if request.param != "triton":
        use(request.param, monkeypatch)
        return str(request.param)
    pytest.importorskip("triton")
    from tests.sampling.device_helpers import Device

    monkeypatch.setattr(helpers, "PLATFORM", Device(device))
    return "triton"


def use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "native":
        pytest.importorskip("quire.kernels.cpu._native")
        from quire.kernels.cpu.runtime import NativeRuntime
        from quire.sampling.native_kernels import NativeKernels

        runtime = NativeRuntime("auto", 2)
        monkeypatch.setattr(helpers, "PLATFORM", helpers.Host(lambda rows: NativeKernels(rows, runtime)))
