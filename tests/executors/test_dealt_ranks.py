"""Ranks as processes that hold the same key head, and keep a part of a sequence's tokens each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.clock import SystemClock
from quire.engine.core import EngineCore
from quire.errors import ConfigError
from quire.executors.choice import make_executor
from tests.executors.test_multiprocess import configured, everything, run
from tests.fakes.masks import AllowedByPosition
from tests.long import all_but_long
from tests.models.families import FAMILIES, llama, qwen2_moe
from tests.models.harness import randomize, save

ALIKE = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "two steps in flight": {**ALIKE, "queue_depth": 2},
    "in runs of four": {**ALIKE, "cp_kv_cache_interleave_size": 4},
    "drafts": {**ALIKE, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "swapped": {**ALIKE, "preemption_mode": "swap", "swap_space": "16MiB"},
    "four ranks": {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
    "four ranks of one key head": {"tensor_parallel_size": 4, "decode_context_parallel_size": 4, "block_size": 4},
    "stages": {**ALIKE, "pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1}
    return save(randomize(llama(**sizes)), tmp_path_factory.mktemp("one-key-head"))


def make_core(path: Path, **options: Any) -> EngineCore:
    config = configured(path, **{"block_size": 8, **options})
    return EngineCore(config, make_executor(config), SystemClock(), masks=AllowedByPosition())


@pytest.mark.parametrize("layout", all_but_long(LAYOUTS, ["two steps in flight"]))
def test_the_tokens_of_one_rank(model_path: Path, layout: str) -> None:
    """With prefix hits, preemption and an abort; bits depend on no schedule. A block has the bytes of one part."""
    options = LAYOUTS[layout]
    alone = make_core(model_path, block_size=16)
    expected, block_bytes = run(alone), alone.stats().block_bytes
    alone.shutdown()
    core = make_core(model_path, **options)
    try:
        assert run(core) == expected
        assert core.stats().preemptions_total > 0
        assert core.stats().prefix_cache_hits_total > 0
        assert core.ready.block_size == alone.ready.block_size
        if "pipeline_parallel_size" not in options:  # a block then has the pages of a stage
            assert core.stats().block_bytes == block_bytes // options["decode_context_parallel_size"]
        preempted = everything(core)
    finally:
        core.shutdown()
    if layout == "two steps in flight":
        core = make_core(model_path, **ALIKE, max_prefill_chunk=7, num_blocks_override=300)
        try:
            assert everything(core) == preempted
        finally:
            core.shutdown()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no divisor": (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 3},
        "decode_context_parallel_size=3 must divide tensor_parallel_size=2",
    ),
    "runs": ({**ALIKE, "cp_kv_cache_interleave_size": 3}, "cp_kv_cache_interleave_size=3 must divide block_size=16"),
    "plain torch": ({**ALIKE, "attention_backend": "torch"}, "attention_backend='torch' attends to the tokens of one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(model_path: Path, case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        configured(model_path, **options)


def test_models_that_are_refused(tmp_path: Path) -> None:
    """A key head for each rank; windows; states. The sizes that divide are said."""
    for name, size, message in (
        ("qwen2-moe", 2, "leaves no key head on two ranks: .* has 2"),
        ("gpt-oss", 2, "full attention alone, and .* has others"),
        ("qwen3-next", 2, "full attention alone, and .* has others"),
    ):
        make = qwen2_moe if name == "qwen2-moe" else FAMILIES[name]
        path = save(randomize(make()), tmp_path / name)
        with pytest.raises(ConfigError, match=f"decode_context_parallel_size={size} is not possible: .*{message}"):
            configured(path, tensor_parallel_size=2, decode_context_parallel_size=size)
    path = save(randomize(llama(num_attention_heads=8, hidden_size=64, num_key_value_heads=2)), tmp_path / "two")
    with pytest.raises(ConfigError, match="2 of 4 ranks hold the same key head, which 4 does not divide: choose 2"):
        configured(path, tensor_parallel_size=4, decode_context_parallel_size=4)
