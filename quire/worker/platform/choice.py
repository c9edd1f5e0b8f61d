"""The platform that a configuration asks for."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.parallel.interface import ProcessGroup
from quire.parallel.single import SINGLE_RANK
from quire.registry import Registry, load_target
from quire.worker.platform.interface import Platform

PLATFORMS = Registry(
    "platform", {"cpu": "quire.worker.platform.cpu:CpuPlatform", "cuda": "quire.worker.platform.cuda:CudaPlatform"}
)


def make_platform(config: EngineConfig, group: ProcessGroup = SINGLE_RANK) -> Platform:
    """The platform of `config.device.platform`: a name of PLATFORMS, or "module:class" of another one, which takes the
    same arguments. Only that one's module is imported. group: the ranks that share each layer."""
    name = config.device.platform
    make = load_target(name) if ":" in name else PLATFORMS.load(name)
    platform: Platform = make(config, group)
    return platform
