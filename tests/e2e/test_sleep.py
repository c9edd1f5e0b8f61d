"""Sleep and wake over the whole engine: memory goes back to the system, and the same tokens come out afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, AsyncLLM
from quire.errors import EngineAsleepError, UserError
from quire.worker.platform.host_memory import resident_memory
from tests.e2e.conftest import GREEDY, exact
from tests.long import one_in
from tests.models.harness import random_prompts

PROMPTS = [{"prompt_token_ids": ids} for ids in random_prompts([40, 21, 33], 97, seed=5)]
SHORT = msgspec.structs.replace(GREEDY, max_tokens=8)
OPTIONS = {"num_blocks_override": 64, "num_threads": 1, "skip_tokenizer_init": True, "device": "cpu"}
MIB = 2**20


def outputs(llm: LLM) -> list[object]:
    return exact(llm.generate(PROMPTS, SHORT, use_tqdm=False))


SWAPPING = {"queue_depth": 2, "preemption_mode": "swap", "swap_space": "1MiB"}


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ({"attention_backend": "native"}, 1),
        ({"attention_backend": "torch"}, 2),
        ({"attention_backend": "native", **SWAPPING}, 1),
        ({"attention_backend": "native", **SWAPPING}, 2),
    ],
    ids=str,
)
def test_the_same_tokens_after_waking(saved_model, level: int, options: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    with LLM(str(saved_model("llama-wide").directory), **{**OPTIONS, **options}) as llm:
        before = outputs(llm)
        for _ in range(2):
            llm.sleep(level)
            assert llm.is_sleeping()
            assert llm.stats()["num_cached_blocks"] == 0
            with pytest.raises(EngineAsleepError, match="wake it up"):
                outputs(llm)
            llm.wake_up()
            assert not llm.is_sleeping()
            hits = llm.stats()["prefix_cache_hits_total"]
            assert outputs(llm) == before
            assert llm.stats()["prefix_cache_hits_total"] == hits, "nothing was cached"
            assert outputs(llm) == before
            assert llm.stats()["prefix_cache_hits_total"] > hits, "and then it was"


@pytest.mark.parametrize(
    ("family", "level", "backend"),
    one_in(2, [("qwen3.5-small-states", 1), ("deepseek-v3.2", 2)], ["native", "torch"]),
)
def test_states_and_latents_are_computed_anew(saved_model, family: str, level: int, backend: str) -> None:  # type: ignore[no-untyped-def]
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts([150, 40], 97, seed=6)]
    options = {**OPTIONS, "attention_backend": backend, "state_snapshot_interval": 64}
    with LLM(str(saved_model(family).directory), **options) as llm:
        before = exact(llm.generate(prompts, SHORT, use_tqdm=False))
        llm.sleep(level)
        assert llm.stats()["num_cached_blocks"] == 0
        llm.wake_up(tags=["weights"])
        assert llm.is_sleeping()
        llm.wake_up(tags=["kv_cache"])
        hits = llm.stats()["prefix_cache_hits_total"]
        assert exact(llm.generate(prompts, SHORT, use_tqdm=False)) == before
        assert llm.stats()["prefix_cache_hits_total"] == hits, "nothing was cached"
        assert exact(llm.generate(prompts, SHORT, use_tqdm=False)) == before
        assert llm.stats()["prefix_cache_hits_total"] >= hits + 128


def test_blocks_on_disk_stay_there(saved_model, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    disk = {"kv_offload_dir": tmp_path, "kv_offload_size": "16MiB", "swap_space": "1MiB"}
    with LLM(str(saved_model("llama-wide").directory), **OPTIONS, **disk) as llm:
        before = outputs(llm)
        llm.sleep()
        stored = list(tmp_path.rglob("*"))
        llm.wake_up()
        assert outputs(llm) == before
    with LLM(str(saved_model("llama-wide").directory), **OPTIONS, **disk) as llm:
        assert outputs(llm) == before
        assert llm.stats()["disk_cache_hit_blocks_total"] > 0
    assert set(stored) <= set(tmp_path.rglob("*"))


def test_a_level_that_there_is_not(saved_model) -> None:  # type: ignore[no-untyped-def]
    with LLM(str(saved_model("llama-wide").directory), **OPTIONS) as llm:
        with pytest.raises(UserError, match="must be 1 or 2"):
            llm.sleep(3)
        assert not llm.is_sleeping()


@pytest.fixture
def heavy(tmp_path: Path) -> str:
    """A model with 40 MiB of weights and 8 KiB of keys and values a token, of random weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 20_000,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.long
def test_memory_goes_back_to_the_system(heavy: str) -> None:
    with LLM(heavy, load_format="dummy", **{**OPTIONS, "num_blocks_override": 512}) as llm:
        prompt = {"prompt_token_ids": list(range(4000))}
        params = msgspec.structs.replace(SHORT, max_tokens=2)
        before = exact(llm.generate(prompt, params, use_tqdm=False))
        awake = resident()
        llm.sleep(1)
        light = resident()
        assert awake - light > 24 * MIB, "4000 tokens of keys and values"
        llm.sleep(2)
        deep = resident()
        assert light - deep > 32 * MIB, "the weights"
        llm.wake_up()
        assert resident() - deep > 32 * MIB
        assert exact(llm.generate(prompt, params, use_tqdm=False)) == before


def resident() -> int:
    size = resident_memory()
    assert size is not None
    return size


@pytest.mark.long
async def test_the_asynchronous_engine_sleeps_in_its_process(saved_model) -> None:  # type: ignore[no-untyped-def]
    engine = AsyncLLM(model=str(saved_model("llama-wide").directory), **OPTIONS)
    try:

        async def tokens() -> list[int]:
            return [[*each.outputs[0].token_ids] async for each in engine.generate(PROMPTS[0], SHORT)][-1]

        before = await tokens()
        with pytest.raises(UserError, match="must be 1 or 2"):
            await engine.sleep(7)
        await engine.sleep(level=2)
        assert await engine.is_sleeping()
        with pytest.raises(EngineAsleepError):
            await tokens()
        await engine.wake_up()
        assert not await engine.is_sleeping()
        assert await tokens() == before
    finally:
        engine.shutdown()
