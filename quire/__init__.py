"""Quire: an LLM inference and serving engine built on PagedAttention. Names are loaded on first use, so `import quire`
and `quire --help` cost milliseconds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quire.version import __version__

if TYPE_CHECKING:
    from quire.beam_search_params import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from quire.cli.engine_args import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
    from quire.engine.async_engine import AsyncLLM
    from quire.engine.async_engine import AsyncLLM as AsyncLLMEngine
    from quire.engine.input_processor import TextPrompt, TokensPrompt
    from quire.errors import QuireError, UserError
    from quire.llm import LLM
    from quire.llm_engine import LLMEngine
    from quire.lora_request import LoRARequest
    from quire.outputs import CompletionOutput, Logprob, RequestOutput
    from quire.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from quire.pooling_params import PoolingParams
    from quire.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
    from quire.structured_outputs_params import StructuredOutputsParams

_EXPORTS = {
    "LLM": "quire.llm",
    "LLMEngine": "quire.llm_engine",
    "AsyncLLM": "quire.engine.async_engine",
    "AsyncLLMEngine": "quire.engine.async_engine",
    "AsyncEngineArgs": "quire.cli.engine_args",
    "EngineArgs": "quire.cli.engine_args",
    "FlexibleArgumentParser": "quire.cli.engine_args",
    "BeamSearchParams": "quire.beam_search_params",
    "BeamSearchOutput": "quire.beam_search_params",
    "SamplingParams": "quire.sampling_params",
    "LoRARequest": "quire.lora_request",
    "StructuredOutputsParams": "quire.structured_outputs_params",
    "RequestOutput": "quire.outputs",
    "CompletionOutput": "quire.outputs",
    "TextPrompt": "quire.engine.input_processor",
    "TokensPrompt": "quire.engine.input_processor",
    "PoolingParams": "quire.pooling_params",
    "RepetitionDetectionParams": "quire.sampling_params",
    "RequestOutputKind": "quire.sampling_params",
    "Logprob": "quire.outputs",
    "PoolingRequestOutput": "quire.pooling_outputs",
    "EmbeddingRequestOutput": "quire.pooling_outputs",
    "ClassificationRequestOutput": "quire.pooling_outputs",
    "ScoringRequestOutput": "quire.pooling_outputs",
    "PoolingOutput": "quire.pooling_outputs",
    "EmbeddingOutput": "quire.pooling_outputs",
    "ClassificationOutput": "quire.pooling_outputs",
    "ScoringOutput": "quire.pooling_outputs",
    "BeamSearchSequence": "quire.beam_search_params",
    "QuireError": "quire.errors",
    "UserError": "quire.errors",
}

OTHER_NAMES = {"AsyncLLMEngine": "AsyncLLM"}
"""vLLM's second names for our classes."""

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "QuireError",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UserError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    try:
        module = _EXPORTS[name]
    except KeyError:
        raise AttributeError(f"module 'quire' has no attribute {name!r}") from None
    return getattr(importlib.import_module(module), OTHER_NAMES.get(name, name))
