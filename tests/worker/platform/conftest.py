"""What a device's platform does by itself: its drivers run there alone."""

from __future__ import annotations

import pytest

from tests.worker.conftest import DEVICE, MakeDriver

__all__ = ["DEVICE", "MakeDriver"]


@pytest.fixture(scope="module", autouse=True)
def plain_torch(fixed_order_of_module: None, no_overflow_checks: None) -> None:
    """Tokens and bits are compared, and hundreds of steps interpreted."""


@pytest.fixture
def platform() -> str:
    return "device"
