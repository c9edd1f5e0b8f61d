"""resolve(): every default and every check of an engine option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import envs
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import MAX_BLOCK_SIZE, resolve
from quire.errors import ConfigError

CONTEXT = 128


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory with nothing but the config.json of a tiny LLaMA."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def resolved(model: str, **options: Any) -> EngineConfig:
    return resolve(EngineOptions(model=model, load_format="dummy", **options))


def refused(model: str, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolved(model, **options)
    assert "\n" not in caught.value.message
    return caught.value


def test_defaults(model: str) -> None:
    config = resolved(model)
    assert config.model.max_model_len == CONTEXT
    assert config.model.dtype == "float32"
    assert config.cache.block_size == 16
    assert config.cache.memory is None
    assert config.cache.memory_utilization == 0.5
    assert config.cache.enable_prefix_caching
    assert config.scheduler.max_num_batched_tokens >= config.scheduler.max_num_seqs >= 1
    assert config.scheduler.queue_depth == 1
    assert config.device.device == "cpu"
    assert config.load.load_format == "dummy"


def test_options_reach_their_slices(model: str) -> None:
    config = resolved(
        model,
        max_model_len=64,
        dtype="bfloat16",
        block_size=32,
        kv_cache_memory="2MiB",
        gpu_memory_utilization=0.25,
        num_blocks_override=7,
        enable_prefix_caching=False,
        max_num_seqs=3,
        max_num_batched_tokens=50,
        max_prefill_chunk=20,
        queue_depth=2,
        num_threads=5,
        seed=11,
    )
    assert (config.model.max_model_len, config.model.dtype) == (64, "bfloat16")
    assert (config.cache.block_size, config.cache.memory, config.cache.memory_utilization) == (32, 2 * 1024**2, 0.25)
    assert (config.cache.num_blocks_override, config.cache.enable_prefix_caching) == (7, False)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (3, 50)
    assert (config.scheduler.max_prefill_chunk, config.scheduler.queue_depth) == (20, 2)
    assert config.device.num_threads == 5
    assert (config.seed, config.load.seed) == (11, 11)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", -16),
        ("block_size", 12),
        ("block_size", 2 * MAX_BLOCK_SIZE),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.01),
        ("gpu_memory_utilization", -0.5),
        ("gpu_memory_utilization", float("nan")),
        ("kv_cache_memory", 0),
        ("kv_cache_memory", "lots"),
        ("num_blocks_override", 0),
        ("max_model_len", 0),
        ("max_model_len", CONTEXT + 1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -1),
        ("max_prefill_chunk", 0),
        ("queue_depth", 0),
        ("queue_depth", 3),
        ("num_threads", 0),
        ("dtype", "float64"),
        ("device", "cuda"),
        ("attention_backend", "flash"),
        ("preemption_mode", "swap"),
        ("quantization", "awq"),
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 0),
    ],
)
def test_a_bad_value_is_refused_by_name(model: str, name: str, value: object) -> None:
    error = refused(model, **{name: value})
    assert error.param == name
    assert name in error.message


def test_a_misspelt_choice_gets_a_suggestion(model: str) -> None:
    assert "did you mean 'bfloat16'?" in refused(model, dtype="bfloat").message


def test_unknown_load_format_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"load_format must be one of auto, safetensors, pt, gguf, dummy, not 'ggml'"):
        resolve(EngineOptions(model=model, load_format="ggml"))


def test_each_running_sequence_must_get_its_token(model: str) -> None:
    error = refused(model, max_num_seqs=100, max_num_batched_tokens=99)
    assert error.param == "max_num_batched_tokens"
    assert "(99)" in error.message
    assert "(100)" in error.message
    assert resolved(model, max_num_seqs=5000).scheduler.max_num_batched_tokens == 5000


def test_threads_come_from_the_option_then_the_environment_then_the_machine(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolved(model).device.num_threads == envs.affinity_cores()
    monkeypatch.setenv("QUIRE_NUM_THREADS", "7")
    assert resolved(model).device.num_threads == 7
    assert resolved(model, num_threads=2).device.num_threads == 2


def test_nothing_is_written_back(model: str) -> None:
    options = EngineOptions(model=model, load_format="dummy")
    assert resolve(options) == resolve(options)
    assert options == EngineOptions(model=model, load_format="dummy")
