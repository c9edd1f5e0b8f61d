"""Cached blocks outlive the engine, on disk, and change nothing but how much is computed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.worker.kv_connector import offload as offload_worker
from tests.e2e.conftest import GREEDY, Variant, exact, generate
from tests.long import all_but_long
from tests.models.harness import random_prompts

VARIANTS = [
    Variant("llama"),
    Variant("qwen3-window"),
    Variant("gpt2"),  # heads of 12: plain operators
    Variant("deepseek-v3.2"),
    Variant("llama-wide", {"dtype": "bfloat16", "num_threads": 2}),
    Variant("llama-wide", {"quantization": "w8a8", "kv_cache_dtype": "int8"}),
]
PROMPTS = random_prompts([75, 60, 33, 70, 90], 97, seed=11)
SHORT = msgspec.structs.replace(GREEDY, max_tokens=12)


@pytest.fixture(scope="module", params=all_but_long(VARIANTS, [VARIANTS[1], *VARIANTS[3:]]), ids=str)
def model(request, saved_model) -> Variant:  # type: ignore[no-untyped-def]
    variant: Variant = request.param
    return replace(variant, directory=str(saved_model(variant.family).directory))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that ends writes all that it has ordered, however busy the machine is."""
    monkeypatch.setattr(offload_worker, "CLOSE_SECONDS", 200.0)


@pytest.fixture
def llama(saved_model) -> str:  # type: ignore[no-untyped-def]
    return str(saved_model("llama-wide").directory)


def offload(directory: Path, **options: object) -> dict[str, object]:
    return {"kv_offload_dir": directory, "kv_offload_size": "64MiB", "swap_space": "4MiB", **options}


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_restart_hits_and_changes_no_bit(model: Variant, tmp_path: Path, queue_depth: int) -> None:
    computed, _ = generate(model, PROMPTS, SHORT, enable_prefix_caching=False)
    options = offload(tmp_path, queue_depth=queue_depth)
    stored, _ = generate(model, PROMPTS, SHORT, **options)
    assert exact(stored) == exact(computed)
    # The engine counts a block at the first step after its file is written, which may be none: its end waits for files.
    num_files = len(list(tmp_path.rglob("*-[0-9]")))
    loaded, stats = generate(model, PROMPTS, SHORT, **options)
    assert exact(loaded) == exact(computed)
    assert [output.num_cached_tokens for output in loaded] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert stats["num_offloaded_blocks"] == num_files > 0
    assert stats["disk_cache_hit_blocks_total"] > 0
    assert stats["offload_loaded_blocks_total"] >= stats["disk_cache_hit_blocks_total"]
    assert stats["offload_stored_blocks_total"] == stats["offload_load_failures_total"] == 0


def test_chunks_of_attention_are_stored_too(saved_model, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Llama 4, whose earlier chunks are given back while a sequence grows."""
    variant = replace(Variant("llama4"), directory=str(saved_model("llama4").directory))
    test_a_restart_hits_and_changes_no_bit(variant, tmp_path, 2)


def test_generated_tokens_are_kept_too(llama: str, tmp_path: Path) -> None:
    (first,), _ = generate(llama, PROMPTS[:1], msgspec.structs.replace(GREEDY, max_tokens=60), **offload(tmp_path))
    longer = [*PROMPTS[0], *first.outputs[0].token_ids, 5]
    (second,), _ = generate(llama, [longer], SHORT, **offload(tmp_path))
    # The last token of an answer has no keys and values: no step ran behind it.
    assert second.num_cached_tokens == (len(longer) - 2) // 16 * 16


@pytest.mark.parametrize(
    "change",
    [
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "w8a8"},
        {"dtype": "bfloat16"},
        {"block_size": 32},
        {"attention_backend": "torch"},
    ],
    ids=str,
)
def test_what_would_change_a_bit_is_not_hit(llama: str, tmp_path: Path, change: dict[str, object]) -> None:
    generate(llama, PROMPTS[:1], SHORT, **offload(tmp_path))
    reference, _ = generate(llama, PROMPTS[:1], SHORT, **change, enable_prefix_caching=False)
    outputs, stats = generate(llama, PROMPTS[:1], SHORT, **offload(tmp_path, **change))
    assert outputs[0].num_cached_tokens == 0
    assert stats["offload_loaded_blocks_total"] == 0
    assert exact(outputs) == exact(reference)


def test_what_changes_no_bit_is_hit(saved_model, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Another place, another number of threads, another length, another depth."""
    first = saved_model("llama-wide").directory
    generate(str(first), PROMPTS[:1], SHORT, **offload(tmp_path / "kv"))
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in Path(first).iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    outputs, _ = generate(
        str(moved), PROMPTS[:1], SHORT, **offload(tmp_path / "kv", num_threads=2, max_model_len=128, queue_depth=2)
    )
    assert outputs[0].num_cached_tokens == (len(PROMPTS[0]) - 1) // 16 * 16


def test_other_weights_at_the_same_place_are_not_hit(saved_model, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(saved_model("llama-wide").directory).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    generate(str(model), PROMPTS[:1], SHORT, **offload(tmp_path / "kv"))
    weights = next(model.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1  # the last element
    weights.write_bytes(content)
    outputs, _ = generate(str(model), PROMPTS[:1], SHORT, **offload(tmp_path / "kv"))
    assert outputs[0].num_cached_tokens == 0


def test_corrupt_files_are_computed(llama: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    computed, _ = generate(llama, PROMPTS, SHORT, **offload(tmp_path))
    for number, path in enumerate(sorted(tmp_path.rglob("*-0"))):
        content = bytearray(path.read_bytes())
        if number % 3 == 0:
            content[number * 7 % len(content)] ^= 0x40
        elif number % 3 == 1:
            del content[number * 11 % len(content) :]
        path.write_bytes(content)
    outputs, stats = generate(llama, PROMPTS, SHORT, **offload(tmp_path))
    assert exact(outputs) == exact(computed)
    assert stats["offload_load_failures_total"] > 0
    assert len([record for record in caplog.records if "not used" in record.message]) == 1


def test_a_pool_too_small_for_all(model: Variant, tmp_path: Path) -> None:
    """Blocks leave the device and come back from the host and from disk, with preemptions between."""
    computed, _ = generate(model, PROMPTS, SHORT, enable_prefix_caching=False)
    groups = 2 if model.family == "qwen3-window" else 1
    options = offload(tmp_path, num_blocks_override=14 * groups, preemption_mode="swap")
    options = {"num_threads": 1, "skip_tokenizer_init": True, **model.options, **options}
    with LLM(model.directory, **options) as llm:  # type: ignore[arg-type]
        for _ in range(3):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], SHORT, use_tqdm=False)
            assert exact(outputs) == exact(computed)
        stats = llm.stats()
    assert stats["evictions_total"] > 0
    assert stats["host_cache_hit_blocks_total"] > 0


def test_tenants_do_not_share(llama: str, tmp_path: Path) -> None:
    for expected in (0, 64):
        with LLM(llama, num_blocks_override=100, skip_tokenizer_init=True, **offload(tmp_path)) as llm:  # type: ignore[arg-type]
            params = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
            outputs = [
                llm.generate([{"prompt_token_ids": PROMPTS[0], "cache_salt": salt}], params, use_tqdm=False)[0]
                for salt in ("one", "two")
            ]
            assert [output.num_cached_tokens for output in outputs] == [expected, expected]


_ENGINE = """
import sys
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], num_blocks_override=100, num_threads=1, skip_tokenizer_init=True, kv_offload_dir=sys.argv[2],
          kv_offload_size="64MiB", swap_space="4MiB")
prompt = [int(word) for word in sys.argv[3].split(",")]
llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=1, detokenize=False),
             use_tqdm=False)
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_kill_minus_nine_loses_nothing_that_was_written(llama: str, tmp_path: Path) -> None:
    """The blocks of a request that has ended are stored without a further call, or an orderly end."""
    prompt = ",".join(map(str, PROMPTS[0]))
    engine = subprocess.Popen(
        [sys.executable, "-c", _ENGINE, llama, str(tmp_path), prompt], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert engine.stdout is not None
    try:
        assert engine.stdout.readline() == b"done\n"
        for _ in range(6000):
            if len(list(tmp_path.rglob("*-0"))) == len(PROMPTS[0]) // 16:
                break
            time.sleep(0.01)
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.communicate()
    outputs, _ = generate(llama, PROMPTS[:1], SHORT, **offload(tmp_path))
    assert outputs[0].num_cached_tokens == len(PROMPTS[0]) // 16 * 16


def test_two_engines_share_a_directory(llama: str, tmp_path: Path) -> None:
    computed, _ = generate(llama, PROMPTS, SHORT)
    options = {"num_blocks_override": 100, "num_threads": 1, "skip_tokenizer_init": True, **offload(tmp_path)}
    with LLM(llama, **options) as first, LLM(llama, **options) as second:  # type: ignore[arg-type]
        for llm in (first, second, first):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], SHORT, use_tqdm=False)
            assert exact(outputs) == exact(computed)
    assert not list(tmp_path.rglob(".new-*"))


def test_a_directory_that_cannot_be_used_is_refused_at_the_start(llama: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_offload_dir") as caught:
        LLM(llama, kv_offload_dir=tmp_path / "file", num_blocks_override=20, skip_tokenizer_init=True)
    assert caught.value.param == "kv_offload_dir"
