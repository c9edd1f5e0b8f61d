r"""vLLM's public modules as `quire.vllm`, so `sed -E 's/\bvllm\b/quire.vllm/g'` makes a program run.

Each module has Quire's classes under vLLM's names, loaded on first use. An unsupported name raises ImportError with the
reason.
"""

from __future__ import annotations

import gc
import logging
import sys
import uuid
from collections.abc import Mapping
from enum import StrEnum
from types import ModuleType
from typing import TYPE_CHECKING, Any

import quire
from quire import logits_processors
from quire.errors import nearest_name
from quire.logging import get_logger
from quire.version import __version__ as __version__

if TYPE_CHECKING:  # editors know no names of `__getattr__`
    from quire import *  # noqa: F403


class UsageContext(StrEnum):
    """vLLM's word for the starter of an engine, used in its usage statistics. Quire sends none."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of unreferenced engines. No other process state exists."""
    gc.collect()


def random_uuid() -> str:
    return uuid.uuid4().hex


def init_logger(name: str) -> logging.Logger:
    return get_logger(name)


_PROCESSORS = (
    "AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality", "process_dict_updates",
)  # fmt: skip
_HERE = {
    **{name: getattr(logits_processors, name) for name in _PROCESSORS},
    "UsageContext": UsageContext,
    "cleanup_dist_env_and_memory": cleanup_dist_env_and_memory,
    "random_uuid": random_uuid,
    "init_logger": init_logger,
}

_OUTPUTS = (
    "CompletionOutput", "RequestOutput", "PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput",
    "EmbeddingRequestOutput", "ClassificationOutput", "ClassificationRequestOutput", "ScoringOutput",
    "ScoringRequestOutput",
)  # fmt: skip

MODULES: Mapping[str, tuple[str, ...]] = {
    "beam_search": ("BeamSearchOutput", "BeamSearchSequence"),
    "config": (),
    "distributed": ("cleanup_dist_env_and_memory",),
    "distributed.parallel_state": ("cleanup_dist_env_and_memory",),
    "engine": (),
    "engine.arg_utils": ("AsyncEngineArgs", "EngineArgs"),
    "engine.async_llm_engine": ("AsyncLLMEngine",),
    "engine.llm_engine": ("LLMEngine",),
    "entrypoints": (),
    "entrypoints.llm": ("LLM",),
    "inputs": ("TextPrompt", "TokensPrompt"),
    "inputs.data": ("TextPrompt", "TokensPrompt"),
    "logger": ("init_logger",),
    "logprobs": ("Logprob",),
    "lora": (),
    "lora.request": ("LoRARequest",),
    "model_executor": (),
    "multimodal": (),
    "outputs": _OUTPUTS,
    "pooling_params": ("PoolingParams",),
    "sampling_params": (
        "BeamSearchParams", "RepetitionDetectionParams", "RequestOutputKind", "SamplingParams",
        "StructuredOutputsParams",
    ),
    "usage": (),
    "usage.usage_lib": ("UsageContext",),
    "utils": ("FlexibleArgumentParser", "random_uuid"),
    "utils.argparse_utils": ("FlexibleArgumentParser",),
    "v1": (),
    "v1.engine": (),
    "v1.engine.async_llm": ("AsyncLLM",),
    "v1.engine.llm_engine": ("LLMEngine",),
    "v1.sample": (),
    "v1.sample.logits_processor": _PROCESSORS,
    "v1.sample.logits_processor.builtin": ("process_dict_updates",),
    "v1.sample.logits_processor.interface": ("BatchUpdate", "LogitsProcessor", "MoveDirectionality"),
}  # fmt: skip
"""vLLM's public modules -> names that they have here."""

_NO_CONFIG = "Quire's options are the keywords of LLM and AsyncLLM, and `LLM.model_config` holds the model's facts"
REASONS: Mapping[str, str] = {
    "GuidedDecodingParams": "it is StructuredOutputsParams since vLLM 0.12",
    "VllmConfig": _NO_CONFIG,
    "ModelConfig": _NO_CONFIG,
    "KVTransferConfig": "no KV cache is sent to other engines so far",
    "AttentionConfig": _NO_CONFIG,
    "CompilationConfig": "nothing is compiled by torch; cuda_graphs and enforce_eager say how a GPU runs",
    "ModelRegistry": "no code of users runs in the engine: models are those that Quire or Transformers knows",
}


OTHER_MODULES: Mapping[str, str] = {
    "assets": "it downloads pictures; prompts take any (docs/images.md)",
    "benchmarks": "`quire bench` measures",
    "entrypoints": "`quire serve` is the server, and `python -m quire.cli.vllm` takes vLLM's lines",
    "envs": "docs/cli.md has Quire's variables",
    "model_executor": "no code of users runs in the engine",
    "multimodal": "prompts take pictures (docs/images.md)",
    "tokenizers": "LLM.get_tokenizer() has Transformers' methods",
    "transformers_utils": "LLM.get_tokenizer() has Transformers' methods",
    "v1.metrics": "LLM.stats() has the counters, a server's /metrics all metrics",
}


class _OtherModules:
    """Explains imports of missing modules."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.startswith(f"{__name__}."):
            asked = name.removeprefix(f"{__name__}.")
            why = next((text for known, text in OTHER_MODULES.items() if f"{asked}.".startswith(f"{known}.")), None)
            raise ModuleNotFoundError(
                f"vLLM's module {asked!r} is not here: {why or 'it has no counterpart'} (docs/from-vllm.md)", name=name
            )


class _Module(ModuleType):
    """Module that looks up its names on access."""

    def __init__(self, name: str, names: tuple[str, ...]) -> None:
        super().__init__(f"{__name__}.{name}", f"Quire's classes under the names of `vllm.{name}`.")
        self.__path__: list[str] = []
        self.__all__ = list(names)

    def __getattr__(self, name: str) -> Any:
        if name not in self.__all__:
            raise _missing(name, self.__name__, self.__all__)
        return _HERE[name] if name in _HERE else getattr(quire, name)

    def __dir__(self) -> list[str]:
        return [*self.__all__, "__all__", "__doc__", "__name__"]


def _missing(name: str, module: str, known: list[str]) -> Exception:
    if name.startswith("__"):
        return AttributeError(name)  # Python itself asks for such names
    why = REASONS.get(name) or f"it has no such name{nearest_name(name, known)} (docs/from-vllm.md)"
    return ImportError(f"cannot import {name!r} from {module!r}: {why}", name=module)


for _name, _names in MODULES.items():
    sys.modules[f"{__name__}.{_name}"] = _made = _Module(_name, _names)
    _outer, _, _last = _name.rpartition(".")
    setattr(sys.modules[f"{__name__}.{_outer}" if _outer else __name__], _last, _made)


sys.meta_path.append(_OtherModules)


def __getattr__(name: str) -> Any:
    if name not in quire.__all__:
        raise _missing(name, __name__, quire.__all__)
    return getattr(quire, name)
