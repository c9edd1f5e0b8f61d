"""Which platform a configuration asks for."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.worker.platform.interface import Platform


def make_platform(config: EngineConfig) -> Platform:
    """The one of the resolved back end."""
    if config.device.is_accelerated:
        from quire.worker.platform.cuda import CudaPlatform  # brings Triton, which a CPU need not have

        return CudaPlatform(config)
    from quire.worker.platform.cpu import CpuPlatform

    return CpuPlatform(config)
