"""A fork server that ends at once."""

from __future__ import annotations

import sys


def main() -> None:
    sys.exit(3)
