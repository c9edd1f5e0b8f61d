"""The platform that a configuration asks for."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.parallel.interface import ProcessGroup
from quire.parallel.single import SINGLE_RANK
from quire.parallel.stage import WHOLE_MODEL, Stage
from quire.registry import Registry, load_target
from quire.worker.platform.interface import Platform

PLATFORMS = Registry(
    "platform", {"cpu": "quire.worker.platform.cpu:CpuPlatform", "cuda": "quire.worker.platform.cuda:CudaPlatform"}
)


def make_platform(config: EngineConfig, group: ProcessGroup | None = None, stage: Stage = WHOLE_MODEL) -> Platform:
    """The platform of `config.device.platform`: a name of PLATFORMS, or "module:class" of another one, which takes the
    same arguments; the last one only if it runs stages. Only that one's module is imported. group: the ranks that share
    each layer (None: one has it alone). stage: the layers that it computes."""
    name = config.device.platform
    make = load_target(name) if ":" in name else PLATFORMS.load(name)
    group = SINGLE_RANK if group is None else group
    platform: Platform = make(config, group) if stage.count == 1 else make(config, group, stage)
    return platform
