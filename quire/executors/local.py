"""The executor of an engine whose model runs in the engine core's own process."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.executors.inprocess import InProcessExecutor
from quire.executors.interface import Executor


def make_executor(config: EngineConfig) -> Executor:
    """The one of the resolved back end."""
    if config.device.is_accelerated:
        from quire.executors.device import DeviceExecutor  # brings Triton, which a CPU need not have

        return DeviceExecutor(config)
    return InProcessExecutor(config)
