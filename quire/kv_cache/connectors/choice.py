from __future__ import annotations

from quire.config.cache import CacheConfig
from quire.kv_cache.connectors.interface import ConnectorFactory, no_connector
from quire.kv_cache.connectors.offload import OffloadConnector


def connector_of(config: CacheConfig) -> ConnectorFactory:
    """Factory of the configured KV connector: the disk tier's if it has a directory."""
    return no_connector if config.offload_dir is None else OffloadConnector
