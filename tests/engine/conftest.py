"""A model directory without weights: what the fake executor's engines are made of."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from tests.engine.async_driving import start

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 96,
}


@pytest.fixture
def weightless_model(tmp_path: Path) -> Path:
    """A directory with a config.json alone; the fake executors need no more."""
    return write_weightless_model(tmp_path / "model")


def write_weightless_model(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY_CONFIG))
    return path


@pytest.fixture
def options(weightless_model: Path) -> EngineOptions:
    return EngineOptions(model=str(weightless_model), num_blocks_override=256)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """A pool that a few requests fill, so that they preempt and swap one another."""
    path = write_weightless_model(tmp_path_factory.mktemp("models") / "tiny")
    return EngineOptions(
        model=str(path),
        num_blocks_override=24,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        preemption_mode="swap",
        swap_space="1MiB",
    )


@pytest.fixture
async def engine(options: EngineOptions) -> AsyncIterator[AsyncLLM]:
    engine = start(options, "slow")
    yield engine
    engine.shutdown()


@pytest.fixture
async def process_engine(options: EngineOptions) -> AsyncIterator[AsyncLLM]:
    engine = start(options, "slow", in_process=False)
    yield engine
    engine.shutdown()
