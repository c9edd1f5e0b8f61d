"""resolve(): every default and every check of an engine option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import MAX_BLOCK_SIZE, resolve
from quire.errors import ConfigError
from quire.utils.control_groups import usable_cores
from tests.config.conftest import CONTEXT


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
        scheduling_policy="priority",
        priority_seconds=2.5,
        num_threads=5,
        output_window=0.5,
        seed=11,
    )
    assert (config.model.max_model_len, config.model.dtype) == (64, "bfloat16")
    assert (config.cache.block_size, config.cache.memory, config.cache.memory_utilization) == (32, 2 * 1024**2, 0.25)
    assert (config.cache.num_blocks_override, config.cache.enable_prefix_caching) == (7, False)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (3, 50)
    assert (config.scheduler.max_prefill_chunk, config.scheduler.queue_depth) == (20, 2)
    assert (config.scheduler.scheduling_policy, config.scheduler.priority_seconds) == ("priority", 2.5)
    assert (config.device.num_threads, config.output_window) == (5, 0.5)
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
        ("scheduling_policy", "lottery"),
        ("priority_seconds", 0.0),
        ("priority_seconds", -1.0),
        ("priority_seconds", float("nan")),
        ("output_window", -0.001),
        ("output_window", 1.5),
        ("output_window", float("nan")),
        ("num_threads", 0),
        ("dtype", "float64"),
        ("device", "cuda"),
        ("attention_backend", "flash"),
        ("matmul_precision", "float16"),
        ("preemption_mode", "swop"),
        ("swap_space", "4GiB"),
        ("quantization", "awq"),
        ("tensor_parallel_size", 0),
        ("pipeline_parallel_size", 0),
    ],
)
def test_a_bad_value_is_refused_by_name(model: str, name: str, value: object) -> None:
    error = refused(model, **{name: value})
    assert error.param == name
    assert name in error.message


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_swap_space(model: str, mode: str) -> None:
    config = resolve(EngineOptions(model=model, preemption_mode=mode, swap_space="3MiB"))
    assert (config.scheduler.preemption_mode, config.cache.swap_space) == (mode, 3 * 2**20)
    assert resolve(EngineOptions(model=model, preemption_mode=mode)).cache.swap_space is None
    assert resolve(EngineOptions(model=model)).cache.swap_space == 0
    assert refused(model, preemption_mode=mode, swap_space=0).param == "swap_space"


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


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(50, 50), (1, 1), (4096, 128)])
def test_a_small_budget_lowers_the_default_of_max_num_seqs(model: str, budget: int, max_num_seqs: int) -> None:
    scheduler = resolved(model, max_num_batched_tokens=budget).scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (budget, max_num_seqs)


def test_numbers_that_cannot_be_meant_are_refused_with_arithmetic(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the scores of a step that samples for all would take" in str(refused(model, max_num_seqs=1_000_000))
    assert resolved(model, max_num_seqs=65536).scheduler.max_num_seqs == 65536
    monkeypatch.setattr("quire.config.resolve.os.cpu_count", lambda: 100)
    assert resolved(model, num_threads=400).device.num_threads == 400
    assert "num_threads 401 is more than 400, with 100 cores" in str(refused(model, num_threads=401))
    monkeypatch.setattr("quire.config.resolve.os.cpu_count", lambda: 2)
    assert resolved(model, num_threads=256).device.num_threads == 256
    monkeypatch.setenv("QUIRE_NUM_THREADS", "257")
    assert "num_threads 257 is more than 256" in str(refused(model))


def test_threads_come_from_the_option_then_the_environment_then_the_machine(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUIRE_NUM_THREADS")
    assert resolved(model).device.num_threads == usable_cores()
    monkeypatch.setenv("QUIRE_NUM_THREADS", "7")
    assert resolved(model).device.num_threads == 7
    assert resolved(model, num_threads=2).device.num_threads == 2


def test_nothing_is_written_back(model: str) -> None:
    options = EngineOptions(model=model, load_format="dummy")
    assert resolve(options) == resolve(options)
    assert options == EngineOptions(model=model, load_format="dummy")


def change(model: str, **changes: Any) -> str:
    path = Path(model) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return model


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def test_native_kernels_compute_what_they_can(model: str) -> None:
    assert resolved(model).device.attention_backend == "native"
    assert resolved(model, attention_backend="torch").device.attention_backend == "torch"
    odd = change(model, hidden_size=48)  # heads of 12
    assert resolved(odd).device.attention_backend == "torch"
    assert "heads of 12" in refused(odd, attention_backend="native").message


def test_the_plain_path_computes_in_float32_unless_told_otherwise(model: str) -> None:
    change(model, torch_dtype="bfloat16")
    native, plain = resolved(model).model, resolved(model, attention_backend="torch").model
    assert (native.dtype, native.kv_cache_dtype) == ("bfloat16", "bfloat16")
    assert (plain.dtype, plain.kv_cache_dtype) == ("float32", "float32")
    told = resolved(model, attention_backend="torch", dtype="bfloat16").model
    assert (told.dtype, told.kv_cache_dtype) == ("bfloat16", "bfloat16")


def test_an_installation_without_the_extension(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.config.resolve.has_native_kernels", lambda: False)
    assert resolved(model).device.attention_backend == "torch"
    assert "built without" in refused(model, attention_backend="native").message
    error = refused(model, quantization="int8")
    assert (error.param, "built without" in error.message) == ("quantization", True)


@pytest.mark.parametrize(
    ("backend", "cache", "possible"),
    [
        ("native", "int8", True),
        ("native", "float16", False),
        ("torch", "float16", True),
        ("torch", "int8", False),
        ("auto", "int8", True),
        ("native", "fp8", True),
        ("torch", "fp8", True),
    ],
)
def test_cache_dtypes_of_the_back_ends(model: str, backend: str, cache: str, possible: bool) -> None:
    options = {"attention_backend": backend, "kv_cache_dtype": cache}
    if possible:
        assert resolved(model, **options).model.kv_cache_dtype == cache
    else:
        assert refused(model, **options).param == "kv_cache_dtype"


def test_names_of_8_bit_floats_for_the_cache(model: str) -> None:
    assert resolved(model, kv_cache_dtype="fp8_e4m3").model.kv_cache_dtype == "fp8"
    assert "'fp8' (e4m3)" in refused(model, kv_cache_dtype="fp8_e5m2").message


@pytest.mark.parametrize(
    ("stored", "options", "precision"),
    [
        ("float32", {}, "float32"),
        ("bfloat16", {}, "auto"),  # as the CPU has it
        ("bfloat16", {"dtype": "float32"}, "float32"),
        ("float32", {"dtype": "bfloat16"}, "float32"),  # cast here
        ("bfloat16", {"matmul_precision": "float32"}, "float32"),
        ("bfloat16", {"matmul_precision": "bfloat16"}, "bfloat16"),
        ("float32", {"dtype": "bfloat16", "matmul_precision": "bfloat16"}, "bfloat16"),
        ("float32", {"kv_cache_dtype": "bfloat16", "matmul_precision": "bfloat16"}, "bfloat16"),
        ("float32", {"matmul_precision": "bfloat16"}, None),  # nothing is stored in it
        ("float32", {"matmul_precision": "bfloat16", "quantization": "int8"}, "bfloat16"),  # concerns those
        ("bfloat16", {"attention_backend": "torch"}, "float32"),
        ("bfloat16", {"attention_backend": "torch", "dtype": "bfloat16"}, "bfloat16"),
        ("bfloat16", {"attention_backend": "torch", "matmul_precision": "bfloat16"}, None),
        ("bfloat16", {"attention_backend": "torch", "dtype": "bfloat16", "matmul_precision": "float32"}, None),
    ],
)
def test_matmul_precision(model: str, stored: str, options: dict[str, str], precision: str | None) -> None:
    """None: refused, because the option would change nothing or cannot be honoured."""
    change(model, torch_dtype=stored)
    if precision is None:
        assert refused(model, **options).param == "matmul_precision"
    else:
        assert resolved(model, **options).device.matmul_precision == precision


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({}, 0),
        ({"quantization": "int8"}, 0),
        ({"quantization": "int4", "activation_bits": "8"}, 8),
        ({"quantization": "mxfp4", "activation_bits": "32"}, 32),
        ({"activation_bits": "8"}, None),  # weights are floating point
        ({"quantization": "fp8", "activation_bits": "8"}, None),
        ({"quantization": "w8a8", "activation_bits": "16"}, None),
        ({"quantization": "int8", "activation_bits": "4"}, None),
        ({"attention_backend": "torch", "activation_bits": "8"}, None),
    ],
)
def test_activation_bits(model: str, options: dict[str, str], bits: int | None) -> None:
    """None: refused."""
    if bits is None:
        assert refused(model, **options).param == "activation_bits"
    else:
        assert resolved(model, **options).model.activation_bits == bits


def test_activation_bits_may_be_a_number() -> None:
    assert EngineOptions.from_keywords({"activation_bits": 16}).activation_bits == "16"


@pytest.mark.parametrize(
    ("method", "bits", "group_size", "rounds"),
    [("int8", 8, None, False), ("w8a8", 8, None, True), ("int4", 4, 32, False), ("w4a8", 4, 32, True)],
)
def test_quantising_while_loading(model: str, method: str, bits: int, group_size: int | None, rounds: bool) -> None:
    quantization = resolved(model, quantization=method).model.quantization
    assert quantization is not None
    assert (quantization.bits, quantization.group_size, quantization.rounds_activations) == (bits, group_size, rounds)
    assert quantization.checkpoint_format is None
    assert resolved(model).model.quantization is None


def test_a_quantised_checkpoint_may_be_named_and_its_activations_rounded(model: str) -> None:
    change(model, quantization_config=GPTQ)
    stored = resolved(model).model.quantization
    assert stored is not None
    assert (stored.method, stored.checkpoint_format) == ("int4", "gptq")
    for name in ("int4", "gptq"):
        assert resolved(model, quantization=name).model.quantization == stored
    rounded = resolved(model, quantization="w4a8").model.quantization
    assert rounded is not None
    assert (rounded.method, rounded.checkpoint_format, rounded.group_size) == ("w4a8", "gptq", 32)
    for name in ("int8", "w8a8", "awq"):
        assert "int4 (gptq)" in refused(model, quantization=name).message
    assert refused(model, quantization="w4a8", attention_backend="torch").param == "quantization"


def test_a_kind_of_checkpoint_that_this_one_is_not(model: str) -> None:
    error = refused(model, quantization="awq")
    assert "this one is not quantised" in error.message
    assert "w8a8" in error.message
