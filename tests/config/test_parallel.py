"""tensor_parallel_size, pipeline_parallel_size and data_parallel_size: what they become, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.load import ExpertBalance
from quire.config.options import EngineOptions
from quire.config.parallel import ParallelConfig, check_stages_fit
from quire.config.resolve import STAGED_CHUNK, STAGED_TOKENS, resolve
from quire.config.speculation import OPTION as SPECULATION
from quire.config.speculation import SpeculationConfig
from quire.errors import ConfigError


def resolved(model: str, **options: Any) -> EngineConfig:
    return resolve(EngineOptions.from_keywords({"model": model, **options}))


def test_one_rank_by_default(model: str) -> None:
    assert resolved(model).parallel == ParallelConfig() == ParallelConfig(1, 1, 1, 1, 1)


def test_ranks_run_on_the_native_kernels_and_share_the_threads(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_NUM_THREADS")
    monkeypatch.setattr("quire.config.resolve.usable_cores", lambda: 6)
    config = resolved(model, tensor_parallel_size=4)
    assert config.parallel == ParallelConfig(tp=4)
    assert config.parallel.num_devices == 4
    assert (config.device.device, config.device.attention_backend) == ("cpu", "native")
    assert (config.device.platform, config.device.collectives) == ("cpu", "shared_memory")
    assert config.device.num_threads == 1
    assert resolved(model, tensor_parallel_size=2).device.num_threads == 3
    assert resolved(model, tensor_parallel_size=2, num_threads=5).device.num_threads == 5


def test_replicas_share_out_threads_and_memory(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_NUM_THREADS")
    monkeypatch.setattr("quire.config.resolve.usable_cores", lambda: 12)
    options = {"kv_cache_memory": "8MiB", "preemption_mode": "swap", "swap_space": "2MiB"}
    config = resolved(model, data_parallel_size=2, tensor_parallel_size=2, **options)
    assert config.parallel == ParallelConfig(tp=2), "the ranks of one replica"
    assert config.device.num_threads == 3
    assert (config.cache.memory, config.cache.swap_space) == (4 * 2**20, 2**20)
    assert config.cache.num_replicas == 2
    assert resolved(model, data_parallel_size=24).device.num_threads == 1
    assert resolved(model, data_parallel_size=2, num_threads=5).device.num_threads == 5
    assert resolved(model, data_parallel_size=2, num_blocks_override=7).cache.num_blocks_override == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 0}, "must be at least 1"),
        ({"data_parallel_size": 65}, "data_parallel_size must be at most 64, not 65"),
        ({"data_parallel_size": 2, "device": "cuda"}, "data_parallel_size=2 runs on a CPU so far: start one server"),
    ],
    ids=str,
)
def test_replicas_that_cannot_be_had_are_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(
        "quire.config.resolve.choose_device", lambda options: (options.device, options.device == "cuda")
    )
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(model, **options)
    assert caught.value.param == "data_parallel_size"


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size", "must be at least 1"),
        ({"tensor_parallel_size": 128}, "tensor_parallel_size", "must be at most 64"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size", "does not divide the model's 4 heads"),
        ({"attention_backend": "torch", "quantization": "int8"}, "quantization", "needs the native CPU kernels"),
        ({"pipeline_parallel_size": 64}, "tensor_parallel_size", "must be at most 64, not 128"),
    ],
    ids=str,
)
def test_what_is_not_there_yet_is_refused(model: str, options: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(model, **{"tensor_parallel_size": 2, **options})
    assert caught.value.param == param


def test_experts_are_dealt_whole(model: str) -> None:
    path = Path(model) / "config.json"
    asked = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts") as caught:
        resolved(model, **asked)
    assert caught.value.param == "enable_expert_parallel"
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "decoder_sparse_step": 1}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "mlp_only_layers": []}
    path.write_text(json.dumps({**json.loads(path.read_text()), **experts, **names}))
    config = resolved(model, **asked)
    assert (config.parallel.ep, config.load.expert_placement) == (2, "linear")
    config = resolved(model, **asked, expert_placement_strategy="round_robin")
    assert config.load.expert_placement == "round_robin"
    config = resolved(model, enable_expert_parallel=True)
    assert (config.parallel.ep, config.load.expert_placement) == (1, None)
    assert resolved(model, tensor_parallel_size=2).parallel.ep == 1
    for options, message in (
        (
            {"data_parallel_size": 4},
            "the model's 6 experts are fewer than tensor_parallel_size=2 times data_parallel_size=4",
        ),
        ({"expert_placement_strategy": "random"}, "must be one of"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolved(model, **{**asked, **options})
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_experts": 1, "num_experts_per_tok": 1}))
    with pytest.raises(ConfigError, match="the model's 1 experts are fewer than tensor_parallel_size=2"):
        resolved(model, **asked)


def test_experts_that_replicas_share(model: str) -> None:
    path = Path(model) / "config.json"
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "decoder_sparse_step": 1}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "mlp_only_layers": []}
    path.write_text(json.dumps({**json.loads(path.read_text()), **experts, **names}))
    asked = {"data_parallel_size": 3, "enable_expert_parallel": True, "attention_backend": "native"}
    config = resolved(model, **asked)
    assert (config.load.expert_placement, config.parallel.num_devices, config.executor) == ("linear", 1, "uni")
    assert config.replicas is None, "the fleet names them"
    assert resolved(model, **asked, tensor_parallel_size=2, pipeline_parallel_size=2).executor == "mp"
    for options, message in (
        ({"attention_backend": "torch"}, "attention_backend='torch' computes with the experts of one replica"),
        ({"distributed_executor_backend": "ray"}, "ray"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size deals out a replica's own rows"),
        ({"enable_lora": True}, "enable_lora: rows of other replicas come without their adapters"),
        ({"enable_eplb": True, "tensor_parallel_size": 2}, "enable_eplb moves experts among the ranks of one replica"),
        ({"load_draft_head": True}, "a model that makes drafts has other steps"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolved(model, **{**asked, **options})


def test_experts_that_move(model: str) -> None:
    path = Path(model) / "config.json"
    asked = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}
    with pytest.raises(ConfigError, match="has no effect without enable_eplb"):
        resolved(model, eplb_config={"window_size": 7})
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "decoder_sparse_step": 1}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "mlp_only_layers": []}
    path.write_text(json.dumps({**json.loads(path.read_text()), **experts, **names}))
    assert resolved(model).load.balance is None
    load = resolved(model, **asked, eplb_config={"num_redundant_experts": 6, "window_size": 7}).load
    assert load.balance == ExpertBalance(6, 7, 3000)
    assert load.counts_experts
    for options, message in (
        ({"enable_expert_parallel": False}, "needs whole experts on several ranks"),
        ({"tensor_parallel_size": 1}, "needs whole experts on several ranks"),
        ({"eplb_config": {"num_redundant_experts": 7}}, "must be from 0 to 6, not 7: each of 2 ranks holds each of 6"),
        ({"eplb_config": {"num_redundant_experts": -1}}, "must be from 0 to 6, not -1"),
        ({"eplb_config": {"step_interval": 0}}, "eplb_config.step_interval must be at least 1, not 0"),
        ({"eplb_config": {"windows_size": 5}}, "eplb_config has no 'windows_size'"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolved(model, **{**asked, **options})


def test_quantised_checkpoints_are_shared_out(model: str) -> None:
    path = Path(model) / "config.json"
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    quantized = resolved(model, tensor_parallel_size=2).model.quantization
    assert quantized is not None
    assert quantized.method == "int4"


def test_key_and_value_heads_are_shared_out_or_repeated(model: str) -> None:
    path = Path(model) / "config.json"
    heads = {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48}
    path.write_text(json.dumps({**json.loads(path.read_text()), **heads}))
    for size in (3, 6, 12):
        assert resolved(model, tensor_parallel_size=size).parallel.tp == size
    with pytest.raises(ConfigError, match="neither divides the model's 3 key and value heads nor is a multiple"):
        resolved(model, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size", "must be at least 1"),
        ({"pipeline_parallel_size": 65}, "pipeline_parallel_size", "must be at most 64, not 65"),
        ({"pipeline_parallel_size": 9}, "pipeline_parallel_size", "=9 is more than the model's 2 layers"),
        ({"queue_depth": 3}, "queue_depth", "must be from 1 to 2, not 3"),
    ],
    ids=str,
)
def test_stages_that_cannot_be_had_are_refused(model: str, options: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(model, **{"pipeline_parallel_size": 2, **options})
    assert caught.value.param == param


def test_stages(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many plans in flight as stages, of fewer tokens; cores are divided by all ranks."""
    monkeypatch.delenv("QUIRE_NUM_THREADS")
    monkeypatch.setattr("quire.config.resolve.usable_cores", lambda: 6)
    alone, config = resolved(model), resolved(model, pipeline_parallel_size=2)
    assert (config.parallel.pp, config.parallel.num_devices) == (2, 2)
    scheduler = config.scheduler
    assert (scheduler.num_stages, scheduler.queue_depth, scheduler.max_num_batched_tokens) == (2, 2, STAGED_TOKENS)
    assert alone.scheduler.max_num_batched_tokens > STAGED_TOKENS
    assert (alone.scheduler.max_prefill_chunk, scheduler.max_prefill_chunk) == (None, STAGED_CHUNK)
    assert resolved(model, pipeline_parallel_size=2, max_prefill_chunk=64).scheduler.max_prefill_chunk == 64
    with pytest.raises(ConfigError, match="max_prefill_chunk"):
        resolved(model, pipeline_parallel_size=2, max_prefill_chunk=0)
    assert config.device.num_threads == 3
    assert resolved(model, pipeline_parallel_size=2, tensor_parallel_size=2).device.num_threads == 1
    assert resolved(model, pipeline_parallel_size=2, queue_depth=1).scheduler.queue_depth == 1
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    assert resolved(model, pipeline_parallel_size=2, speculative_config=drafts).speculation.max_drafts == 3
    with pytest.raises(ConfigError, match="'mtp' does not go together with pipeline_parallel_size=2 yet") as caught:
        check_stages_fit(EngineOptions(pipeline_parallel_size=2), SpeculationConfig(3, method="mtp"))
    assert caught.value.param == SPECULATION
