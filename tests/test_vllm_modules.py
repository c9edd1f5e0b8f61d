"""Programs of vLLM after `sed -E 's/\\bvllm\\b/quire.vllm/g'`: their imports work, or say why not."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from typing import Any

import pytest

import quire
from quire.vllm import MODULES

LINES = """
import vllm
from vllm import LLM, SamplingParams
from vllm import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, PoolingParams, RequestOutput
from vllm import __version__
from vllm.beam_search import BeamSearchSequence
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.engine.llm_engine import LLMEngine
from vllm.entrypoints.llm import LLM
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.inputs.data import TokensPrompt
from vllm.logger import init_logger
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils import FlexibleArgumentParser, random_uuid
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine
"""


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_imports_of_programs(line: str) -> None:
    found: dict[str, Any] = {}
    exec(re.sub(r"\bvllm\b", "quire.vllm", line), found)
    for name, value in found.items():
        if name in quire.__all__:
            assert value is getattr(quire, name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from vllm.config import VllmConfig", "keywords of LLM and AsyncLLM"),
        ("from vllm.sampling_params import GuidedDecodingParams", "it is StructuredOutputsParams"),
        ("from vllm.inputs import TextPromt", "did you mean 'TextPrompt'?"),
        ("from vllm import LMM", "did you mean 'LLM'?"),
        ("from vllm import ModelRegistry", "no code of users runs in the engine"),
        ("from vllm.entrypoints.openai.api_server import run_server", "`quire serve` is the server"),
        ("import vllm.multimodal.utils", "prompts take pictures (docs/images.md)"),
        ("import vllm.forward_context", "vLLM's module 'forward_context' is not here: it has no counterpart"),
    ],
)
def test_names_without_a_meaning(line: str, message: str) -> None:
    with pytest.raises(ImportError, match=re.escape(message)):
        exec(re.sub(r"\bvllm\b", "quire.vllm", line), {})


@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_its_names(name: str) -> None:
    module = importlib.import_module(f"quire.vllm.{name}")
    assert [getattr(module, each, None) is None for each in module.__all__] == [False] * len(module.__all__)


def test_helpers() -> None:
    from quire.vllm import cleanup_dist_env_and_memory, init_logger, random_uuid

    cleanup_dist_env_and_memory(shutdown_ray=True)
    assert init_logger("a.b").name == "a.b"
    assert len({random_uuid() for _ in range(3)}) == 3


def test_imports_load_no_engine() -> None:
    script = "import sys, quire.vllm.engine.arg_utils; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
