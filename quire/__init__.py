"""Quire: an LLM inference and serving engine built on PagedAttention.

The names below are loaded on first use, so that `import quire` and `quire --help` cost milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quire.version import __version__

if TYPE_CHECKING:
    from quire.beam_search_params import BeamSearchOutput, BeamSearchParams
    from quire.engine.async_engine import AsyncLLM
    from quire.errors import QuireError, UserError
    from quire.llm import LLM
    from quire.outputs import CompletionOutput, RequestOutput
    from quire.sampling_params import SamplingParams

_EXPORTS = {
    "LLM": "quire.llm",
    "AsyncLLM": "quire.engine.async_engine",
    "BeamSearchParams": "quire.beam_search_params",
    "BeamSearchOutput": "quire.beam_search_params",
    "SamplingParams": "quire.sampling_params",
    "RequestOutput": "quire.outputs",
    "CompletionOutput": "quire.outputs",
    "QuireError": "quire.errors",
    "UserError": "quire.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "UserError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    try:
        module = _EXPORTS[name]
    except KeyError:
        raise AttributeError(f"module 'quire' has no attribute {name!r}") from None
    return getattr(importlib.import_module(module), name)
