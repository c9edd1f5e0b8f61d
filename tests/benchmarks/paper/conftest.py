from __future__ import annotations

from tests.cli.conftest import quire_logger

__all__ = ["quire_logger"]
