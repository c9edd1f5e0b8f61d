from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.cli.main import main
from quire.cli.memory_plan import estimate_activations, plan_engine
from quire.config.options import EngineOptions
from quire.config.parallel import ParallelConfig
from quire.config.resolve import resolve
from quire.config.resolve_device import triton_model
from quire.errors import InsufficientMemoryError
from quire.executors.local import LocalExecutor
from quire.kv_cache.spec import layer_specs
from quire.simulator.cost import CostModel, Precision
from quire.simulator.hardware import find, profiles, to_json
from quire.simulator.shape import find_shape
from quire.simulator.work import StepWork
from quire.step import StepPlan
from tests.fakes.gguf_model import NAMES, WIDE, to_gguf
from tests.models.eagle_heads import HeadTwin
from tests.models.families import deepseek_v3, llama

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
    assert found["speed"] == []


def test_the_model_that_makes_drafts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights count, and its layers share the blocks."""
    flags = ["--memory", "4GiB", "--speculative-config", json.dumps({"model": model, "num_speculative_tokens": 2})]
    without, found = plan_json(capsys, model, *flags[:2]), plan_json(capsys, model, *flags)
    assert 2 * found["draft_weight_bytes"] == found["weight_bytes"]
    for name in ("weight_bytes", "activation_bytes_estimate", "kv_bytes_per_token"):
        assert found[name] == 2 * without[name]
    assert main(["plan", model, *flags]) == 0
    assert "draft model" in capsys.readouterr().out


def test_a_head_for_drafts(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights are its joined inputs, layer and logits; a checkpoint that names its model is planned with it."""
    head = HeadTwin(32, 64, 1000, (1, 3), list(range(10)), has_tables=False, authors=False).save(
        tmp_path / "head", Path(model)
    )
    flags = ["--memory", "4GiB", "--dtype", "float32"]
    found = plan_json(capsys, str(head), *flags)
    drafts = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    by_hand = plan_json(capsys, model, *flags, "--speculative-config", drafts)
    assert found["draft_weight_bytes"] == by_hand["draft_weight_bytes"]
    layer = 2 * 32 * (64 + 2 * 32) + 64 * 32 + 3 * 32 * 56
    norms = 4 * 32
    assert found["draft_weight_bytes"] == 4 * (2 * 64 * 32 + layer + 10 * 32 + norms)


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
    flags = ("--memory", "4GiB", "--max-num-seqs", "60000", "--gpu-memory-utilization", "1")
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
    found = plan_json(capsys, model, *flags)
    assert found["is_bound"]
    (speed,) = found["speed"]
    assert speed["ttft_seconds"] is None
    assert [entry["batch_size"] for entry in speed["decoding"]] == [1, 8, 10]
    for entry in speed["decoding"]:
        batch_size = entry["batch_size"]
        step_bytes = 4 * READ_PER_STEP + batch_size * 256 * KV_TOKEN_BYTES
        assert entry["step_seconds"] == pytest.approx(step_bytes / 1e9)
        assert entry["tokens_per_second"] == pytest.approx(batch_size * 1e9 / step_bytes)


def test_replicas_that_share_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen3-30b-a3b", "--gpu", "h200", "--tp", "2", "--dp", "2", "-ep"]) == 0
    text = capsys.readouterr().out
    assert "2 (tp=2 pp=1 dp=2 ep=4); each, at most, 14.9 GiB of weights" in text
    assert "sent a token  1.3 MiB within layers" in text
    assert main(["plan", "qwen3-30b-a3b", "--gpu", "h200", "--dp", "2", "-ep"]) == 0
    assert "1 (tp=1 pp=1 dp=2 ep=2)" in capsys.readouterr().out


def test_predictions_are_the_cost_models(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, model, "--gpu", "l4", "--tokens", "100", "--max-num-seqs", "4")
    assert not found["is_bound"]
    hardware, shape = find("l4"), find_shape(model)
    cost = CostModel(shape, hardware, ParallelConfig(), Precision.of(shape))
    prompt, whole = found["speed"]
    assert (prompt["num_tokens"], whole["num_tokens"]) == (100, 256)

    def seconds(starts: list[int], counts: list[int]) -> float:
        return cost.step_seconds(StepWork.of(StepPlan(0, starts, starts, counts, starts, [])))

    host = hardware.host_overhead + hardware.host_overhead_per_sequence
    assert prompt["ttft_seconds"] == pytest.approx(seconds([0], [100]) + host)
    one, four = prompt["decoding"]
    # Two steps are in flight on a GPU: the slower of host and device tells the pace.
    assert one["step_seconds"] == pytest.approx(max(host, seconds([99], [1])))
    assert four["tokens_per_second"] == pytest.approx(4 / four["step_seconds"])
    synchronous = plan_json(capsys, model, "--gpu", "l4", "--queue-depth", "1")["speed"][0]["decoding"][0]
    assert synchronous["step_seconds"] == pytest.approx(host + seconds([255], [1]))


def test_a_first_token_waits_for_a_device_that_slept(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = replace(find("l4"), name="slow", wake_overhead=7e-3, host_overhead_per_new_sequence=2e-3)
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(to_json(device)))
    plain, slow = (
        plan_json(capsys, model, "--gpu", name, "--max-num-seqs", "4")["speed"][0] for name in ("l4", str(path))
    )
    assert slow["ttft_seconds"] - plain["ttft_seconds"] == pytest.approx(7e-3 + 2e-3)
    assert slow["decoding"] == plain["decoding"]


def test_bounds_of_experts_read_those_that_are_picked(capsys: pytest.CaptureFixture[str]) -> None:
    """Of eight experts, two for each token: eight tokens miss one with a probability of 0.75^8."""
    flags = ("--memory", "200GB", "--bandwidth", "1TB", "--max-num-seqs", "8", "--max-model-len", "1024")
    found = plan_json(capsys, "mixtral-8x7b", *flags)["speed"][0]["decoding"]
    shape = find_shape("mixtral-8x7b")
    for entry, batch_size in zip(found, (1, 8), strict=True):
        routed = 32 * 8 * 3 * 4096 * 14336 * (1 - 0.75**batch_size)
        rest = shape.parameters() - 32 * 8 * 3 * 4096 * 14336 - 32000 * 4096  # one table is looked up
        kept = batch_size * 1024 * 32 * 2 * 8 * 128 * 2
        assert entry["step_seconds"] == pytest.approx((2 * (rest + routed) + kept) / 1e12)


def test_every_group_of_layers_has_its_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--gpu", "h100", "--tp", "2", "--max-num-seqs", "4", "--max-model-len", "4096")
    found = plan_json(capsys, "gpt-oss-120b", *flags)
    assert found["num_blocks"] == 2 * 4 * 4096 // 16 < found["num_blocks_memory"]


@pytest.mark.parametrize(
    "flags",
    [
        ("llama-3-8b", "--gpu", "h100"),
        ("gpt-oss-120b", "--gpu", "h100", "--tp", "2"),
        ("gpt-oss-120b", "--gpu", "h100", "--tp", "2", "--max-num-seqs", "4", "--max-model-len", "4096"),
        ("deepseek-v3", "--gpu", "h200", "--tp", "8", "--kv-cache-memory", "1GiB"),
        ("qwen3-8b", "--gpu", "l4", "--gpu-memory-utilization", "0.8", "--block-size", "32"),
    ],
)
def test_what_is_planned_is_simulated(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pool of `quire simulate` is that of `quire plan`."""
    planned = plan_json(capsys, *flags)
    path = tmp_path / "out.json"
    run = ["--workload", "alpaca", "--rate", "5", "--num-requests", "2", "--json", str(path)]
    assert main(["simulate", "--model", *flags, *run]) == 0
    assert json.loads(path.read_text())["result"]["num_blocks"] == planned["num_blocks"]


def test_a_long_prompt_is_computed_in_chunks(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [model, "--gpu", "l4", "--max-num-seqs", "4"]
    whole = plan_json(capsys, *flags)["speed"][0]["ttft_seconds"]
    chunked = plan_json(capsys, *flags, "--max-num-batched-tokens", "64")["speed"][0]["ttft_seconds"]
    hardware = find("l4")
    assert chunked > whole + 2.9 * (hardware.host_overhead + hardware.host_overhead_per_sequence)


def test_what_limits_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """Reading the weights for a few sequences, multiplying them for many, starting kernels for a tiny model."""
    flags = ["--tokens", "16", "--max-model-len", "16", "--max-num-seqs", "4096"]
    (speed,) = plan_json(capsys, "llama-3-8b", "--gpu", "h100", *flags)["speed"]
    limits = [entry["limit"] for entry in speed["decoding"]]
    assert (limits[0], limits[-1]) == ("memory", "compute")
    (tiny,) = plan_json(capsys, "--gpu", "h100", "--max-model-len", "64", "--max-num-seqs", "2")["speed"]
    assert {entry["limit"] for entry in tiny["decoding"]} == {"overhead"}


def test_devices_share_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("llama-3-70b", "--gpu", "h200", "--tokens", "2048")
    two = plan_json(capsys, *flags, "--tp", "2")
    four = plan_json(capsys, *flags, "--tensor-parallel-size", "4")
    staged = plan_json(capsys, *flags, "--tp", "2", "--pp", "2")
    assert (two["num_devices"], four["num_devices"], staged["num_devices"]) == (2, 4, 4)
    assert two["weight_bytes"] == four["weight_bytes"] == 2 * two["num_parameters"]
    assert four["weight_bytes_per_device"] == two["weight_bytes_per_device"] / 2
    assert two["kv_bytes_per_token"] == 2 * four["kv_bytes_per_token"]
    # The head is a layer's worth: with a layer more on the other stage prompts would lose as much as decodes win.
    assert staged["kv_bytes_per_token"] == two["kv_bytes_per_token"] / 2
    assert four["num_blocks"] > 2 * two["num_blocks"]
    times = {name: plan["speed"][0]["decoding"][0]["step_seconds"] for name, plan in (("two", two), ("four", four))}
    assert times["two"] / 2 < times["four"] < times["two"]
    assert main(["plan", *flags, "--tp", "4"]) == 0
    assert "4 (tp=4 pp=1 dp=1); each, at most," in capsys.readouterr().out
    assert main(["plan", "llama-3-70b", "--gpu", "h100"]) == 1
    assert "does not fit" in capsys.readouterr().err


def test_models_that_the_engine_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By shape: experts, latent attention, a quantised checkpoint, layers with and without windows."""
    found = plan_json(capsys, "deepseek-v3", "--gpu", "h200", "--tp", "8", "--tokens", "2048")
    assert found["kv_bytes_per_token"] == 61 * 576 * 2
    assert found["num_active_parameters"] < found["num_parameters"] / 15
    assert found["weight_bytes"] == pytest.approx(671e9, rel=0.005)
    assert main(["plan", "deepseek-v3", "--gpu", "h200", "--tp", "8"]) == 0
    assert "of which each token is multiplied by" in capsys.readouterr().out
    hybrid = plan_json(capsys, "gpt-oss-120b", "--gpu", "h100", "--tp", "2", "--tokens", "4096")
    assert {group["window"] for group in hybrid["kv_groups"]} == {None, 128}
    changes = {"architectures": ["SomeForCausalLM"], "model_type": "some", "num_local_experts": 4}
    by_file = plan_json(capsys, str(Path(write(tmp_path, {})) / "config.json"), "--gpu", "l4")
    assert by_file["num_parameters"] == PARAMETERS
    mixture = write(tmp_path, changes | {"num_experts_per_tok": 2, "torch_dtype": "bfloat16"})
    assert plan_json(capsys, mixture, "--memory", "1GiB")["architecture"] == "some"
    assert plan_json(capsys, mixture, "--gpu", "l4")["speed"]


def test_a_profile_of_a_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(to_json(replace(find("cpu-2-core-avx512"), name="mine", title="my machine"))))
    found = plan_json(capsys, model, "--gpu", str(path))
    assert (found["target"], found["max_num_seqs"], found["memory_utilization"]) == ("my machine", 128, 0.5)
    slow = plan_json(capsys, model, "--gpu", str(path), "--bandwidth", "1GB")
    assert slow["speed"][0]["decoding"][0]["step_seconds"] > found["speed"][0]["decoding"][0]["step_seconds"]


def test_windows_make_long_sequences_cheaper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path, {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32})
    found = plan_json(capsys, model, "--memory", "1GiB", "--bandwidth", "1GB")
    assert found["kv_groups"] == [
        {"num_layers": 4, "kind": "sliding", "window": 32, "block_size": 16, "page_bytes": 16 * KV_TOKEN_BYTES // 4}
    ]
    assert (found["kv_page_bytes"], found["kv_padding"]) == (16 * KV_TOKEN_BYTES // 4, 0)
    (entry,) = found["concurrency"]
    assert entry["blocks_per_sequence"] == 3
    step_bytes = 4 * READ_PER_STEP + 32 * KV_TOKEN_BYTES
    assert found["speed"][0]["decoding"][0]["step_seconds"] == pytest.approx(step_bytes / 1e9)


def test_text_for_people(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.zeros(256)}, Path(model) / "model.safetensors")
    assert main(["plan", "--model", model, "--gpu", "h100", "--tokens", "64"]) == 0
    text = capsys.readouterr().out
    assert f"parameters    {PARAMETERS:,}" in text
    assert "checkpoint    F32 1.0 KiB in 1 safetensors file(s)" in text
    assert "NVIDIA H100" in text
    assert "not a measurement" in text
    assert text.count("first token after") == 2
    assert text.count("tokens, batch") == 2 * 4  # 1, 8, 64, 256


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
        (["--gpu", "l4", "--memory", "10KiB"], 1, "does not fit"),
        (["--memory", "1500KiB"], 1, "no memory for the KV cache"),
        (["--tp", "3"], 2, "tp=3 does not divide the 8 heads"),
        (["--tp", "0"], 2, "tensor_parallel_size must be at least 1"),
        (["--gpu", "l4", "--quantization", "gptq"], 2, "quantization must be one of"),
        (["--gpu", "none.json"], 2, "cannot read hardware profile"),
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
    executor = LocalExecutor(config)
    try:
        assert executor.load_model() == layer_specs(config.model)
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
        plan_engine(config, 4 * PARAMETERS, [1])


def test_the_table_of_devices_is_plausible() -> None:
    for name, device in profiles().items():
        assert name == name.lower() == device.name
        assert 10e9 < device.memory < 1e12
        assert 30e9 < device.bandwidth < 2e13
        assert 10 < device.peaks["float16"] / device.bandwidth < 1000 or device.kind == "cpu", name


def test_matrices_that_expand_prompts_are_counted_beside_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU they are kept by default, elsewhere by `mla_prompt`."""
    config = deepseek_v3(num_hidden_layers=2, qk_nope_head_dim=4, v_head_dim=8).config
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(tmp_path)
    extra = 2 * config.num_attention_heads * (4 + 8) * config.kv_lora_rank
    here = ["--memory", "64MiB"]
    for flags, has_extra in (
        (here, False),
        ([*here, "--mla-prompt", "expanded"], True),
        (["--gpu", "h200"], True),
        (["--gpu", "h200", "--mla-prompt", "absorbed"], False),
        (["--gpu", "h200", "--tp", "2"], True),
    ):
        found = plan_json(capsys, str(tmp_path), "--dtype", "float32", *flags)
        assert found["weight_bytes"] == 4 * (found["num_parameters"] + extra * has_extra), flags
    assert found["weight_bytes_per_device"] == found["weight_bytes"] / 2


def test_heads_as_large_as_latents_are_not_expanded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = deepseek_v3(num_hidden_layers=2, v_head_dim=80).config
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(tmp_path)
    found = plan_json(capsys, str(tmp_path), "--dtype", "float32", "--gpu", "h200")
    assert found["weight_bytes"] == 4 * found["num_parameters"]
    assert main(["plan", str(tmp_path), "--gpu", "h200", "--mla-prompt", "expanded"]) == 2
    assert "has heads as large as its latents: nothing would be saved" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "bytes_per_weight"), [("int8", 1 + 4 / 64), ("w8a8", 1 + 4 / 64), ("int4", 0.625), ("w4a8", 0.625)]
)
def test_quantised_weights_are_counted_as_they_are_stored(
    model: str, method: str, bytes_per_weight: float, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan_json(capsys, model, "--memory", "64MiB", "--quantization", method)
    tables = 2 * 1000 * 64
    assert found["weight_bytes"] == int(tables + (PARAMETERS - tables) * bytes_per_weight)
    assert main(["plan", model, "--memory", "64MiB", "--quantization", method]) == 0
    assert f"as {method}" in capsys.readouterr().out


def test_a_table_narrower_than_the_layers_is_counted_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 1000, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"architectures": ["OPTForCausalLM"], **sizes, "word_embed_proj_dim": 32, "max_position_embeddings": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plan_json(capsys, str(tmp_path), "--memory", "64MiB", "--quantization", "int8")
    rest = found["num_parameters"] - 1000 * 32
    assert found["weight_bytes"] == int(1000 * 32 + rest * (1 + 4 / 64))


def test_a_model_whose_layers_keep_a_state_is_planned_and_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6}
    sizes |= {"intermediate_size": 96, "moe_intermediate_size": 32, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3NextForCausalLM"], **sizes}))
    found = plan_json(capsys, str(tmp_path), "--gpu", "h100")
    assert [group["kind"] for group in found["kv_groups"]] == ["state", "state", "state", "full"]
    state, full = found["kv_groups"][0], found["kv_groups"][-1]
    assert state["block_size"] % full["block_size"] == 0
    assert max(state["page_bytes"], full["page_bytes"]) <= found["kv_page_bytes"]
    assert 0 <= found["kv_padding"] <= 0.12
    assert main(["plan", str(tmp_path), "--gpu", "h100"]) == 0
    assert "KV padding" in capsys.readouterr().out
    simulation = ["--workload", "alpaca", "--rate", "1", "--num-requests", "3"]
    assert main(["simulate", "--model", str(tmp_path), "--gpu", "h100", *simulation]) == 0
    assert "KV blocks" in capsys.readouterr().out


def test_what_of_the_pool_no_layer_can_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--kv-waste"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| gemma-3-27b | 52 sliding, 10 full | sliding 16, full 16 | 11.4 | 11.4 | 5.8 | 0.6 |" in lines
    documented = Path(__file__).parents[2] / "docs" / "kv-cache.md"
    assert "\n<!-- kv waste -->\n" in documented.read_text(), "where the site has the table (docs/conf.py)"
    assert "Gemma-3-27B wastes most, 11.4 %" in documented.read_text()
    assert main(["plan", "--kv-waste", "--tp", "8", "--state-snapshot-interval", "2000", "qwen3-next-80b-a3b"]) == 0
    (line,) = capsys.readouterr().out.splitlines()[2:]
    assert line.startswith("| qwen3-next-80b-a3b | 36 state, 12 full | state 3,712, full 464 |")


def test_a_gguf_file_is_counted_as_its_weights_are_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without native kernels all of it is made floating point. The bound on the speed reads the same bytes."""
    writer, _ = to_gguf(llama(**WIDE | {"vocab_size": 128}), "llama", dict.fromkeys(NAMES.values(), "Q8_0"))
    path = str(writer.write(tmp_path / "model.gguf"))
    flags = ["--memory", "1GiB", "--max-model-len", "64", "--bandwidth", "1GB"]
    found = plan_json(capsys, path, *flags)
    norms = 5 * 256
    assert found["weight_bytes"] == (found["num_parameters"] - norms) // 32 * 34 + 4 * norms
    alone = found["speed"][0]["decoding"][0]["step_seconds"]
    assert alone == pytest.approx(found["weight_bytes"] / 1e9, rel=0.1)
    assert main(["plan", path, *flags]) == 0
    assert "as the file's blocks, packed (float32" in capsys.readouterr().out
    config = resolve(EngineOptions(model=path, device="cpu", attention_backend="torch"))
    assert plan_engine(config, GIB, [64]).weight_bytes == 4 * found["num_parameters"]


def test_a_gpu_widens_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the dtype that the engine takes there, keys and values as well."""
    writer, _ = to_gguf(llama(**WIDE | {"vocab_size": 128}), "llama", dict.fromkeys(NAMES.values(), "Q8_0"))
    path = str(writer.write(tmp_path / "model.gguf"))
    flags = ["--gpu", "h100", "--max-model-len", "64"]
    wide, narrow = plan_json(capsys, path, *flags), plan_json(capsys, path, *flags, "--dtype", "bfloat16")
    model = triton_model(EngineOptions(model=path), resolve(EngineOptions(model=path)).model)
    assert model.dtype == model.kv_cache_dtype == "float32"
    assert wide["weight_bytes"] == 4 * wide["num_parameters"] == 2 * narrow["weight_bytes"]
    assert wide["kv_bytes_per_token"] == 2 * narrow["kv_bytes_per_token"]
