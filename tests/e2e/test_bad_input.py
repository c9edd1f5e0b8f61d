"""Every kind of bad input gets one clear error, and the engine lives on. (HTTP's share is in tests/server/.)"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams, UserError
from quire.errors import ConfigError, InsufficientMemoryError, ModelLoadError, PromptTooLongError

SMALL = {"num_threads": 1, "num_blocks_override": 64}


@pytest.fixture
def copy_of_bundled(bundled_model_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundled_model_path, tmp_path / "model"))


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_unknown_model_path() -> None:
    with pytest.raises(ModelLoadError, match="no/such/model"):
        LLM("./no/such/model", **SMALL)


def test_truncated_safetensors(copy_of_bundled: Path) -> None:
    weights = copy_of_bundled / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 2**20])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        LLM(str(copy_of_bundled), **SMALL)


def test_corrupt_safetensors(copy_of_bundled: Path) -> None:
    weights = copy_of_bundled / "model.safetensors"
    weights.write_bytes(b"\xff" * 64 + weights.read_bytes()[64:])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        LLM(str(copy_of_bundled), **SMALL)


def test_missing_weights(copy_of_bundled: Path) -> None:
    (copy_of_bundled / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError):
        LLM(str(copy_of_bundled), **SMALL)


def test_missing_tokenizer(copy_of_bundled: Path) -> None:
    (copy_of_bundled / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        LLM(str(copy_of_bundled), **SMALL)


def test_unknown_architecture_says_which_are_known(copy_of_bundled: Path) -> None:
    edit_config(copy_of_bundled, architectures=["LlamaForCausalLn"])
    with pytest.raises(ModelLoadError, match=r"LlamaForCausalLn.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        LLM(str(copy_of_bundled), **SMALL)


def test_max_model_len_beyond_the_models(bundled_model_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len") as raised:
        LLM(str(bundled_model_path), max_model_len=10**6, **SMALL)
    assert raised.value.param == "max_model_len"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"blok_size": 16}, "blok_size"),
        ({"block_size": 24}, "block_size"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size"),
        ({"quantization": "int3"}, "quantization"),
        ({"quantization": "gptq"}, "quantization"),
        ({"quantization": "int8", "attention_backend": "torch"}, "quantization"),
        ({"kv_cache_dtype": "int8", "attention_backend": "torch"}, "kv_cache_dtype"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory"),
        ({"dtype": "float8"}, "dtype"),
    ],
)
def test_wrong_engine_options(options: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError) as raised:
        LLM(**options)
    assert raised.value.param == param


def test_no_memory_for_one_block() -> None:
    with pytest.raises(InsufficientMemoryError, match="one block"):
        LLM(kv_cache_memory=1000, num_threads=1)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_threads=1, num_blocks_override=40) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", {}, UserError),
        ({"prompt_token_ids": []}, {}, UserError),
        ({"prompt_token_ids": [1, 4096]}, {}, UserError),
        ({"prompt_token_ids": [-1]}, {}, UserError),
        ({"prompt_token_ids": ["a"]}, {}, UserError),
        ("\ud800", {}, UserError),
        ({"prompt_token_ids": [5] * 5000}, {}, PromptTooLongError),
        ("x", {"n": 30, "max_tokens": 100}, UserError),
        ("x", {"logit_bias": {4096: 1.0}}, UserError),
        ("x", {"stop_token_ids": [99999]}, UserError),
        ("x", {"allowed_token_ids": [99999]}, UserError),
    ],
    ids=str,
)
def test_bad_requests_leave_the_engine_working(
    llm: LLM, prompt: object, params: dict[str, object], error: type[UserError]
) -> None:
    good = SamplingParams(max_tokens=4, temperature=0.0)
    with pytest.raises(error):
        llm.generate(["import os", prompt], [good, SamplingParams(**params)], use_tqdm=False)  # type: ignore[list-item]
    (output,) = llm.generate("import os", good, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    stats = llm.stats()
    assert stats["num_running"] == stats["num_waiting"] == stats["num_used_blocks"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": float("nan")},
        {"top_k": -2},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"min_tokens": 9, "max_tokens": 3},
        {"n": 0},
        {"logprobs": -2},
        {"logprobs": 2**20 + 1},
        {"stop": [""]},
        {"seed": "x"},
    ],
    ids=str,
)
def test_bad_sampling_values_name_the_field(options: dict[str, object]) -> None:
    with pytest.raises(UserError) as raised:
        SamplingParams(**options)  # type: ignore[arg-type]
    assert raised.value.param == next(iter(options))
