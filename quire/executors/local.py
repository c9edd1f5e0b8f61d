"""The executor that a configuration asks for."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.executors.interface import Executor


def make_executor(config: EngineConfig) -> Executor:
    """The one of the resolved back end and ranks. Only what it needs is imported: an engine core whose ranks are other
    processes has no use for torch."""
    if config.parallel.num_devices > 1:
        from quire.executors.multiprocess import make_multiprocess_executor

        return make_multiprocess_executor(config)
    if config.device.is_accelerated:
        from quire.executors.device import DeviceExecutor  # brings Triton, which a CPU need not have

        return DeviceExecutor(config)
    from quire.executors.inprocess import InProcessExecutor

    return InProcessExecutor(config)
