from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.cli.devices import DEVICES, Device
from quire.cli.main import main
from quire.cli.memory_plan import estimate_activations, make_plan
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import InsufficientMemoryError
from quire.executors.inprocess import InProcessExecutor
from quire.kv_cache.spec import layer_specs

GIB = 1024**3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
PARAMETERS = 2 * 1000 * 64 + 64 + 4 * (64 * 64 + 2 * 64 * 16 + 64 * 64 + 3 * 64 * 128 + 2 * 64)
READ_PER_STEP = PARAMETERS - 1000 * 64
KV_TOKEN_BYTES = 4 * 2 * 2 * 8 * 4
"""Layers x (key, value) x heads x head size x float32."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write(tmp_path, {})


def write(directory: Path, changes: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(directory)


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert isinstance(parsed, dict)
    return parsed


def test_the_arithmetic(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--memory", "64MiB", "--max-num-seqs", "1000", "--max-num-batched-tokens", "1000", "--tokens", "100"]
    found = plan_json(capsys, model, *flags)
    assert found["num_parameters"] == PARAMETERS
    assert found["weight_bytes"] == 4 * PARAMETERS
    assert found["weight_bytes_by_dtype"] == {
        "float32": 4 * PARAMETERS,
        "bfloat16": 2 * PARAMETERS,
        "float16": 2 * PARAMETERS,
    }
    assert found["kv_bytes_per_token"] == KV_TOKEN_BYTES
    assert found["kv_bytes_per_block"] == 16 * KV_TOKEN_BYTES
    free = 64 * 1024**2 - 4 * PARAMETERS - found["activation_bytes_estimate"]
    assert found["memory_utilization"] == 0.5
    assert found["num_blocks"] == found["num_blocks_memory"] == int(free * 0.5) // (16 * KV_TOKEN_BYTES)
    short, long = found["concurrency"]
    assert (short["num_tokens"], short["blocks_per_sequence"]) == (100, 7)
    assert short["max_sequences"] == found["num_blocks"] // 7
    assert (long["num_tokens"], long["blocks_per_sequence"]) == (256, 16)
    assert long["bytes_per_sequence"] == 256 * KV_TOKEN_BYTES
    assert short["decode_bounds"] == []


def test_the_pool_is_no_larger_than_it_can_be_used(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [model, "--memory", "4GiB", "--max-num-seqs", "3"]
    found = plan_json(capsys, *flags)
    assert found["num_blocks"] == 3 * 16
    assert found["num_blocks_memory"] > 3 * 16
    assert main(["plan", *flags]) == 0
    assert "all that 3 sequences of 256 tokens can use" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "num_blocks"), [(["--num-blocks-override", "77"], 77), (["--kv-cache-memory", "1MiB"], 128)]
)
def test_cache_options_are_obeyed(
    model: str, flags: list[str], num_blocks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_json(capsys, model, "--memory", "4GiB", *flags)["num_blocks"] == num_blocks


def test_swap_space_is_part_of_the_memory(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--memory", "4GiB", "--max-num-seqs", "100000", "--gpu-memory-utilization", "1")
    without = plan_json(capsys, model, *flags)
    found = plan_json(capsys, model, *flags, "--preemption-mode", "swap", "--swap-space", "1GiB")
    assert without["swap_space_bytes"] == 0
    assert 0 <= GIB - found["swap_space_bytes"] < found["kv_bytes_per_block"]
    assert abs(without["kv_cache_bytes"] - found["kv_cache_bytes"] - GIB) <= 2 * found["kv_bytes_per_block"]
    assert main(["plan", model, *flags, "--preemption-mode", "swap"]) == 0
    assert "swap space" in capsys.readouterr().out
    assert main(["plan", model, "--gpu", "l4", "--preemption-mode", "swap"]) == 2
    assert "host memory" in capsys.readouterr().err


def test_a_gpu_brings_its_memory_share_and_the_checkpoints_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(tmp_path, {"torch_dtype": "bfloat16"})
    found = plan_json(capsys, model, "--gpu", "L4")
    assert found["dtype"] == "bfloat16"
    assert found["memory_bytes"] == 24 * 10**9
    assert found["memory_utilization"] == 0.9
    assert found["bandwidth_bytes_per_second"] == 300 * 10**9
    assert plan_json(capsys, model, "--gpu", "l4", "--dtype", "float32")["dtype"] == "float32"
    assert plan_json(capsys, model, "--gpu", "l4", "--memory", "1GiB")["memory_bytes"] == GIB


def test_bounds_follow_from_bytes_and_bandwidth(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--memory", "1GiB", "--bandwidth", "1GB", "--max-num-seqs", "10"]
    (entry,) = plan_json(capsys, model, *flags)["concurrency"]
    one, full = entry["decode_bounds"]
    for bound, batch_size in ((one, 1), (full, 10)):
        step_bytes = 4 * READ_PER_STEP + batch_size * 256 * KV_TOKEN_BYTES
        assert bound["batch_size"] == batch_size
        assert bound["step_bytes"] == step_bytes
        assert bound["max_tokens_per_second"] == pytest.approx(batch_size * 1e9 / step_bytes)
        assert bound["limit"] == "bandwidth"


def test_a_full_batch_may_be_bound_by_arithmetic(model: str) -> None:
    config = resolve(EngineOptions(model=model, load_format="dummy", max_num_seqs=64, max_num_batched_tokens=64))
    device = Device("slow", memory=GIB, bandwidth=1e12, peak=1e9)
    (entry,) = make_plan(config, GIB, device, [16]).lengths
    full = entry.bounds[-1]
    assert full.limit == "compute"
    assert full.tokens_per_second == pytest.approx(1e9 / (2 * READ_PER_STEP))


def test_windows_make_long_sequences_cheaper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path, {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32})
    found = plan_json(capsys, model, "--memory", "1GiB", "--bandwidth", "1GB")
    assert found["kv_groups"] == [{"num_layers": 4, "window": 32}]
    (entry,) = found["concurrency"]
    assert entry["blocks_per_sequence"] == 3
    assert entry["decode_bounds"][0]["step_bytes"] == 4 * READ_PER_STEP + 32 * KV_TOKEN_BYTES


def test_text_for_people(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.zeros(256)}, Path(model) / "model.safetensors")
    assert main(["plan", "--model", model, "--gpu", "h100", "--tokens", "64"]) == 0
    text = capsys.readouterr().out
    assert f"parameters    {PARAMETERS:,}" in text
    assert "checkpoint    F32 1.0 KiB in 1 safetensors file(s)" in text
    assert "NVIDIA H100" in text
    assert "not a measurement" in text
    assert text.count("tokens, batch") == 4


def test_without_a_bandwidth_there_is_no_bound(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model]) == 0
    text = capsys.readouterr().out
    assert "this machine" in text
    assert "the memory bandwidth is not known" in text


def test_the_bundled_model_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_json(capsys, "--memory", "1GiB")["model"] == "bundled"


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--gpu", "h10"], 2, "did you mean 'h100'"),
        (["--memory", "lots"], 2, "memory must be a size"),
        (["--tokens", "257"], 2, "max_model_len (256)"),
        (["--tokens", "0"], 2, "--tokens"),
        (["--memory", "10KiB"], 1, "the weights alone take"),
        (["--memory", "1500KiB"], 1, "no memory for the KV cache"),
        (["--tensor-parallel-size", "2"], 2, "not available yet"),
        (["--num-threads", "2"], 2, "unknown option '--num-threads'"),
        (["--block-size", "15"], 2, "power of two"),
    ],
)
def test_mistakes_are_one_line(
    model: str, flags: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, *flags]) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, {"architectures": ["MistralForCausalLM"], "sliding_window": 32}])
def test_the_plan_and_the_loaded_model_agree_on_the_cache(tmp_path: Path, dtype: str, changes: dict[str, Any]) -> None:
    model = write(tmp_path, changes)
    config = resolve(EngineOptions(model=model, load_format="dummy", dtype=dtype))
    executor = InProcessExecutor(config)
    try:
        assert executor.load() == layer_specs(config.model)
    finally:
        executor.shutdown()


def test_a_missing_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_activations_grow_with_the_budget_and_the_batch(model: str) -> None:
    config = resolve(EngineOptions(model=model, load_format="dummy"))
    scheduler = config.scheduler
    more_tokens = replace(config, scheduler=replace(scheduler, max_num_batched_tokens=4096))
    more_rows = replace(config, scheduler=replace(scheduler, max_num_seqs=256))
    extra_tokens = estimate_activations(more_tokens) - estimate_activations(config)
    assert extra_tokens == (4096 - scheduler.max_num_batched_tokens) * (3 * 64 + 3 * 128) * 4
    assert estimate_activations(more_rows) - estimate_activations(config) == 3 * 128 * 1000 * 4


def test_memory_that_does_not_hold_the_weights(model: str) -> None:
    config = resolve(EngineOptions(model=model, load_format="dummy"))
    with pytest.raises(InsufficientMemoryError, match="the weights alone"):
        make_plan(config, 4 * PARAMETERS, None, [1])


def test_the_table_of_devices_is_plausible() -> None:
    for name, device in DEVICES.items():
        assert name == name.lower()
        assert 10e9 < device.memory < 1e12
        assert 100e9 < device.bandwidth < 2e13
        assert 10 < device.peak / device.bandwidth < 1000, name


@pytest.mark.parametrize(
    ("method", "bytes_per_weight"), [("int8", 1 + 4 / 64), ("w8a8", 1 + 4 / 64), ("int4", 0.5 + 8 / 32), ("w4a8", 0.75)]
)
def test_quantised_weights_are_counted_as_they_are_stored(
    model: str, method: str, bytes_per_weight: float, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan_json(capsys, model, "--memory", "64MiB", "--quantization", method)
    tables = 2 * 1000 * 64
    assert found["weight_bytes"] == int(tables + (PARAMETERS - tables) * bytes_per_weight)
    assert main(["plan", model, "--memory", "64MiB", "--quantization", method]) == 0
    assert f"as {method}" in capsys.readouterr().out
