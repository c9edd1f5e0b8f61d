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


def by_batch_size(*ranges: list[int]) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": list(ranges)}


def suffix(**keys: Any) -> dict[str, Any]:
    return {"method": "suffix", **{f"suffix_decoding_{name}": value for name, value in keys.items()}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (suffix(), SpeculationConfig(24, suffix=SuffixConfig(24, 10_000, 1.0, 0.1))),
        (suffix(max_tree_depth=64), SpeculationConfig(31, suffix=SuffixConfig(64))),
        (
            suffix(max_cached_requests=0, max_spec_factor=2, min_token_prob=0.5) | {"num_speculative_tokens": 4},
            SpeculationConfig(4, suffix=SuffixConfig(24, 0, 2.0, 0.5)),
        ),
        (
            {"method": "custom_class", "model": "my.drafts.Class", "num_speculative_tokens": 4},
            SpeculationConfig(4, custom_class="my.drafts:Class"),
        ),
    ],
)
def test_other_methods(given: dict[str, Any], expected: SpeculationConfig) -> None:
    assert resolve(EngineOptions(speculative_config=given)).speculation == expected


@pytest.mark.parametrize("method", [{"method": "suffix"}, {"method": "custom_class", "model": "a.B"}], ids=str)
def test_methods_of_a_cpu(method: dict[str, Any]) -> None:
    given = {"num_speculative_tokens": 2, **method}
    with pytest.raises(ConfigError, match="make drafts on a CPU"):
        resolve(EngineOptions(attention_backend="triton", speculative_config=given))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "method"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        (
            {"method": "eagle", "num_speculative_tokens": 2},
            r"method must be one of ngram, ngram_gpu, suffix, .*, not 'eagle'",
        ),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be from 1 to 31, not 0"),
        ({"method": "ngram", "num_speculative_tokens": 2, "model": "x"}, "model is of method custom_class, not ngram"),
        ({"method": "ngram", "num_speculative_tokens": 2, "mode": "x"}, "speculative_config has no 'mode'"),
        (suffix(max_tree_depth=2), "suffix_decoding_max_tree_depth must be from 3 to 64, not 2"),
        (suffix(max_cached_requests=-1), "suffix_decoding_max_cached_requests must be from 0 to"),
        (suffix(max_spec_factor=-1.0), "suffix_decoding_max_spec_factor must be from 0 to 64"),
        (suffix(min_token_prob=1.5), "suffix_decoding_min_token_prob must be from 0 to 1, not 1.5"),
        (
            suffix(min_token_prob=0.5) | {"method": "ngram", "num_speculative_tokens": 2},
            "suffix_decoding_min_token_prob is of method suffix, not ngram",
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
