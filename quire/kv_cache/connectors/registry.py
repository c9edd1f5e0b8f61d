"""Which KV connector an engine has, by its options."""

from __future__ import annotations

from quire.config.cache import CacheConfig
from quire.kv_cache.connectors.interface import ConnectorFactory, no_connector
from quire.kv_cache.connectors.offload import OffloadConnector


def connector_factory(config: CacheConfig) -> ConnectorFactory:
    """The factory of the connector that the options ask for."""
    return no_connector if config.offload_dir is None else OffloadConnector
