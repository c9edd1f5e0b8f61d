"""What a copied server runs (tests/server/serve_process.py)."""

from __future__ import annotations

import json
import sys

from quire.config.options import EngineOptions
from quire.server.run import serve
from quire.server.settings import ServerSettings


def main() -> None:
    """Read options, settings and executor as a line of standard input, and serve."""
    options, settings, executor = json.loads(sys.stdin.readline())
    sys.exit(serve(EngineOptions(**options), ServerSettings(**settings), executor=executor))
