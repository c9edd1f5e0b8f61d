"""A failure as native extensions raise it: no `Exception`."""

from __future__ import annotations


class Panic(BaseException):
    """As pyo3's PanicException, which cannot be imported."""
