from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from quire import envs

if TYPE_CHECKING:
    from quire.utils.server_connection import ServerConnection


def add_connection_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--api-key", metavar="KEY", help="default: QUIRE_API_KEY")
    parser.add_argument("--cacert", metavar="FILE", help="authorities of the server's certificate (https)")
    parser.add_argument("--insecure", action="store_true", help="take any certificate (https)")


def connect(namespace: argparse.Namespace, *, timeout: float) -> ServerConnection:
    """Connect to `namespace.url`. timeout: limit without data, in seconds. Raises UserError."""
    from quire.utils.server_connection import ServerConnection

    key = namespace.api_key or envs.api_key()
    return ServerConnection(
        namespace.url, key, timeout=timeout, cacert=namespace.cacert, is_insecure=namespace.insecure
    )
