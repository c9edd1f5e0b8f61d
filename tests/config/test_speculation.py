"""The option of drafts: vLLM's names, their defaults, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.config.speculation import SpeculationConfig
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


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "method"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        ({"method": "eagle", "num_speculative_tokens": 2}, r"method must be one of ngram, ngram_gpu, not 'eagle'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be from 1 to 31, not 0"),
        ({"method": "ngram", "num_speculative_tokens": 2, "model": "x"}, "speculative_config has no 'model'"),
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
