"""Choice of the platform."""

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


def make_platform(
    config: EngineConfig,
    group: ProcessGroup | None = None,
    stage: Stage = WHOLE_MODEL,
    sharing: ProcessGroup | None = None,
) -> Platform:
    """Make the platform `config.device.platform`: a name of PLATFORMS, or "module:class" with the same arguments
    (`stage` only if it supports stages). Imports only its module. group: ranks that share each layer (None: one).
    stage: layers to compute. sharing: ranks that share the tokens of prompts (None: one)."""
    name = config.device.platform
    make = load_target(name) if ":" in name else PLATFORMS.load(name)
    group = SINGLE_RANK if group is None else group
    platform: Platform
    if sharing is not None:
        platform = make(config, group, stage, sharing)
    else:
        platform = make(config, group) if stage.count == 1 else make(config, group, stage)
    return platform
