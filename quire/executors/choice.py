"""Choice of the executor for a configuration, made by the engine core."""

from __future__ import annotations

from quire import envs
from quire.config.engine import EngineConfig
from quire.executors.interface import Executor
from quire.utils.garbage import without_collections


def make_executor(config: EngineConfig) -> Executor:
    """One worker in this process, or processes for several ranks; imports only what is needed."""
    if config.executor == "ray":
        envs.keep_ray_to_itself()
        from quire.executors.ray_ranks import make_ray_executor

        return make_ray_executor(config)
    if config.executor == "external_launcher":
        from quire.executors.launched import LaunchedRank

        launched: Executor = LaunchedRank(config)
        return launched
    if config.executor == "mp":
        from quire.executors.multiprocess import make_multiprocess_executor

        return make_multiprocess_executor(config)
    with without_collections():  # collections would scan the objects of torch's import again and again
        from quire.executors.local import LocalExecutor

    return LocalExecutor(config)
