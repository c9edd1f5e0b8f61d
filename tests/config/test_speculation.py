"""The option of drafts: vLLM's names, their defaults, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.config.speculation import SpeculationConfig, SuffixConfig
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("lookup", "expected"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_lookup(lookup: dict[str, int], expected: tuple[int, int]) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 4, **lookup}
    options = EngineOptions.from_keywords({"speculative_config": given})
    assert resolve(options).speculation == SpeculationConfig(4, *expected)


def test_the_number_of_drafts() -> None:
    given = {"method": "ngram_gpu", "num_speculative_tokens": 4, "adaptive": False}
    given["num_speculative_tokens_per_batch_size"] = [[1, 4, 4], [5, 16, 2], [17, 64, 0]]
    found = resolve(EngineOptions.from_keywords({"speculative_config": given})).speculation
    assert found == SpeculationConfig(4, by_batch_size=((4, 4), (16, 2), (64, 0)), adapts=False)


def test_none() -> None:
    assert resolve(EngineOptions()).speculation.max_drafts == 0


def by_model(**keys: Any) -> dict[str, Any]:
    return {"model": "bundled", "num_speculative_tokens": 2, **keys}


def by_batch_size(*ranges: list[int]) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": list(ranges)}


def suffix(**keys: Any) -> dict[str, Any]:
    return {"method": "suffix", **{f"suffix_decoding_{name}": value for name, value in keys.items()}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (suffix(), SpeculationConfig(24, method="suffix", suffix=SuffixConfig(24, 10_000, 1.0, 0.1))),
        (suffix(max_tree_depth=64), SpeculationConfig(31, method="suffix", suffix=SuffixConfig(64))),
        (
            suffix(max_cached_requests=0, max_spec_factor=2, min_token_prob=0.5) | {"num_speculative_tokens": 4},
            SpeculationConfig(4, method="suffix", suffix=SuffixConfig(24, 0, 2.0, 0.5)),
        ),
        (
            {"method": "custom_class", "model": "my.drafts.Class", "num_speculative_tokens": 4},
            SpeculationConfig(4, method="custom_class", custom_class="my.drafts:Class"),
        ),
    ],
)
def test_other_methods(given: dict[str, Any], expected: SpeculationConfig) -> None:
    assert resolve(EngineOptions(speculative_config=given)).speculation == expected


@pytest.mark.parametrize("method", [{"method": "suffix"}, {"method": "custom_class", "model": "a.B"}], ids=str)
def test_methods_of_texts_run_on_a_device(method: dict[str, Any]) -> None:
    given = {"num_speculative_tokens": 2, **method}
    found = resolve(EngineOptions(attention_backend="triton", speculative_config=given))
    assert found.speculation.method == method["method"]
    assert found.takes_predictions == (method["method"] == "suffix")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"num_speculative_tokens": 2}, "method must be one of"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 2, "oracle": 1.5}, "oracle must be from 0 to 1, not 1.5"),
        (
            {"method": "egale", "num_speculative_tokens": 2},
            r"method must be one of ngram, ngram_gpu, suffix, .*, not 'egale'",
        ),
        ({"method": "eagle3", "num_speculative_tokens": 2}, "model must name the model that makes the drafts"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be from 1 to 31, not 0"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "model": "x"},
            "has no 'model' for method 'ngram': it is of custom_class, draft_model",
        ),
        ({"method": "medusa", "num_speculative_tokens": 2}, "'medusa' is not supported"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "model must name the model that makes the drafts"),
        (by_model(prompt_lookup_max=3), "has no 'prompt_lookup_max' for method 'draft_model'"),
        (by_model(model="/nowhere"), "speculative_config.model: .*nowhere"),
        (by_model(max_model_len=0), "max_model_len must be at least 1"),
        (by_model(max_model_len=10**6), "speculative_config.model: max_model_len"),
        (by_model(quantization="int3"), "speculative_config.model: quantization"),
        (by_model(draft_tensor_parallel_size=2), "draft_tensor_parallel_size must be 1 or that of the model, 1, not 2"),
        (by_model(tensor_parallel_size=2), "tensor_parallel_size cannot be 2: the key is draft_tensor_parallel_size"),
        (by_model(use_heterogeneous_vocab=True), "use_heterogeneous_vocab cannot be True"),
        (by_model(parallel_drafting=True), "config.json of bundled has neither pard_token nor ptd_token_id"),
        (by_model(method="eagle3", parallel_drafting=True), "parallel_drafting cannot be True: a head"),
        (by_model(draft_sample_method="probabilistic"), "draft_sample_method cannot be 'probabilistic'"),
        (by_model(kv_cache_dtype="fp8"), "kv_cache_dtype cannot be 'fp8'"),
        (by_model(rejection_sample_method="synthetic"), "rejection_sample_method must be one of standard, block"),
        ({"method": "ngram", "num_speculative_tokens": 2, "mode": "x"}, "speculative_config has no 'mode'"),
        (suffix(max_tree_depth=2), "suffix_decoding_max_tree_depth must be from 3 to 64, not 2"),
        (suffix(max_cached_requests=-1), "suffix_decoding_max_cached_requests must be from 0 to"),
        (suffix(max_spec_factor=-1.0), "suffix_decoding_max_spec_factor must be from 0 to 64"),
        (suffix(min_token_prob=1.5), "suffix_decoding_min_token_prob must be from 0 to 1, not 1.5"),
        (
            suffix(min_token_prob=0.5) | {"method": "ngram", "num_speculative_tokens": 2},
            "has no 'suffix_decoding_min_token_prob' for method 'ngram': it is of suffix",
        ),
        ({"method": "custom_class", "num_speculative_tokens": 2}, "model must name a class, as module.Class, not None"),
        ({"method": "custom_class", "num_speculative_tokens": 2, "model": "x"}, "model must name a class"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min must be from 1 to 3, not 4",
        ),
        ({"method": "ngram", "num_speculative_tokens": "2"}, "speculative_config: .*int"),
        (by_batch_size([2, 4, 2]), r"follow one another from 1 on, not \[2, 4, 2\] where one from 1 on is due"),
        (by_batch_size([1, 4, 2], [6, 8, 1]), "where one from 5 on is due"),
        (by_batch_size([1, 0, 2]), "where one from 1 on is due"),
        (by_batch_size([1, 4, 3]), "may ask for 0 to 2 drafts"),
    ],
)
def test_what_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve(EngineOptions(speculative_config=given))
    assert caught.value.param == "speculative_config"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{}, {"architectures": ["MistralForCausalLM"], "sliding_window": 16}], ids=str)
def test_on_a_gpu_layers_of_all_kinds_have_drafts(model: str, changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 2}
    path = Path(model) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    options = EngineOptions(model=model, load_format="dummy", attention_backend="triton", speculative_config=given)
    assert resolve(options).speculation.max_drafts == 2


def test_a_model_that_makes_drafts(model: str, caplog: pytest.LogCaptureFixture) -> None:
    """`method` follows from `model`; keys without effect are logged."""
    path = Path(model) / "config.json"
    config = json.loads(path.read_text())
    options = EngineOptions(
        model=model,
        load_format="dummy",
        dtype="bfloat16",
        kv_cache_dtype="float32",
        speculative_config=by_model(model=model, max_model_len=64, enforce_eager=True, quantization="int8"),
    )
    found = resolve(options)
    chosen = found.speculation.draft_model
    assert chosen is not None
    assert chosen.model is not None
    assert (chosen.num_ranks, chosen.model.max_model_len, chosen.model.kv_cache_dtype) == (1, 64, "float32")
    assert chosen.model.quantization is not None
    assert found.model.quantization is None
    assert "enforce_eager has no effect" in caplog.text
    path.write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1025}))
    with pytest.raises(ConfigError, match="may differ by padding alone, which is at most 1024 rows"):
        resolve(EngineOptions(speculative_config=by_model(model=model), load_format="dummy"))


def test_a_model_makes_drafts_on_a_device(model: str) -> None:
    """Its prompts are never expanded there: the host does not know where they begin."""
    options = EngineOptions(
        model=model, load_format="dummy", speculative_config=by_model(model=model), attention_backend="triton"
    )
    own = resolve(options).speculation.draft
    assert own is not None
    assert own.kv_cache_dtype == resolve(options).model.kv_cache_dtype
    assert not own.expands_prompts
