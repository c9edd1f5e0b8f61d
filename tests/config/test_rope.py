"""RoPE settings that differ by layer, as old and new config.json files have them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma3TextConfig, Olmo3Config, SmolLM3Config

from quire.config.families import FAMILIES, read_shape
from quire.config.hf_json import Fields
from quire.config.rope import RopeConfig, RopeDefaults, read_layer_ropes, read_lengths, read_rope
from quire.errors import ModelLoadError

WINDOWS = (8, None, 8)


def ropes(
    values: dict[str, Any], defaults: RopeDefaults, windows: tuple[int | None, ...] = WINDOWS
) -> tuple[RopeConfig | None, ...]:
    return read_layer_ropes(Fields({"max_position_embeddings": 64, **values}, "config.json"), 16, defaults, windows)


def by_family(name: str, values: dict[str, Any], windows: tuple[int | None, ...] = WINDOWS) -> list[Any]:
    read = ropes(values, FAMILIES[name].rope, windows)
    return [None if rope is None else (rope.theta, rope.rope_type, rope.factor) for rope in read]


def test_old_files_of_gemma_3() -> None:
    local, full = (10_000.0, "default", None), (1_000_000.0, "default", None)
    assert by_family("gemma3_text", {}) == [local, full, local]
    values = {"rope_theta": 5e5, "rope_local_base_freq": 7e3, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    assert by_family("gemma3_text", values) == [(7e3, "default", None), (5e5, "linear", 8.0), (7e3, "default", None)]


def test_old_files_of_olmo_3() -> None:
    values = {"rope_theta": 2e5, "rope_scaling": {"factor": 8.0, "rope_type": "yarn"}}
    assert by_family("olmo3", values) == [(5e5, "default", None), (2e5, "yarn", 8.0), (5e5, "default", None)]


@pytest.mark.parametrize("kind", [Gemma3TextConfig, Olmo3Config])
@pytest.mark.parametrize("pattern", range(1, 7))
def test_what_transformers_writes(kind: type[Any], pattern: int) -> None:
    types = ["full_attention" if layer % pattern == 0 else "sliding_attention" for layer in range(7)]
    sizes = {"num_hidden_layers": 7, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = kind(layer_types=types, sliding_window=8, **sizes)
    config.rope_parameters["full_attention"] = {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0}
    values = config.to_dict()
    windows = read_shape(values).windows
    assert [window is None for window in windows] == [each == "full_attention" for each in types]
    local = config.rope_parameters["sliding_attention"]["rope_theta"]
    expected = {"full_attention": (300.0, "linear", 3.0), "sliding_attention": (local, "default", None)}
    assert by_family(config.model_type, values, windows) == [expected[each] for each in types]


@pytest.mark.parametrize(
    "options", [{}, {"no_rope_layer_interval": 2}, {"no_rope_layers": [0, 1, 1, 0, 0]}], ids=["usual", "every", "list"]
)
@pytest.mark.parametrize("is_written", [True, False])
def test_layers_without_rotation(options: dict[str, Any], is_written: bool) -> None:
    config = SmolLM3Config(num_hidden_layers=5, **options)
    values = config.to_dict() if is_written else options
    read = ropes(values, FAMILIES["smollm3"].rope, (None,) * 5)
    assert [rope is not None for rope in read] == [bool(each) for each in config.no_rope_layers]
    assert {rope.theta for rope in read if rope is not None} == {2_000_000.0}


@pytest.mark.parametrize(
    ("values", "family", "message"),
    [
        ({"no_rope_layers": [1]}, "smollm3", "no_rope_layers must have a 1"),
        ({"no_rope_layers": [1, "x", 0]}, "smollm3", "no_rope_layers must have a 1"),
        ({"no_rope_layer_interval": 0}, "smollm3", "no_rope_layer_interval must be an integer of at least 1"),
        ({"rope_parameters": {"full_attention": {}}}, "llama", "differ by layer are not supported"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": 5}}, "gemma3_text", "must be an object"),
        ({"rope_parameters": 5}, "gemma3_text", "must be an object"),
    ],
)
def test_settings_that_are_wrong(values: dict[str, Any], family: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ropes(values, FAMILIES[family].rope)


@pytest.mark.parametrize(
    ("family", "values", "windows", "lengths"),
    [
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, WINDOWS, (64, 64)),
        ("olmo3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, WINDOWS, (512, 512)),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic", "factor": 2.0}}},
            WINDOWS,
            (64, 64),
        ),
        ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic", "factor": 2.0}}}, (8,), (128, 64)),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, (None,), (128, 64)),
    ],
)
def test_lengths_follow_the_rotations_of_all_layers(
    family: str, values: dict[str, Any], windows: tuple[int | None, ...], lengths: tuple[int, int]
) -> None:
    config = Fields({"max_position_embeddings": 64, **values}, "config.json")
    assert read_lengths(config, 16, FAMILIES[family].rope, windows) == lengths


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ("yarn", 150_000.0, 32.0, 4096, False)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ("linear", 150_000.0, 2.0, 64, True)),
        ({"rope_theta": 70.0, "rope_parameters": {"rope_type": "default"}}, ("default", 70.0, None, 64, True)),
    ],
)
def test_settings_of_gpt_oss(values: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = Fields({"max_position_embeddings": 64, **values}, "config.json")
    rope = read_rope(config, 16, FAMILIES["gpt_oss"].rope)
    read = (rope.rope_type, rope.theta, rope.factor, rope.original_max_position_embeddings, rope.truncate)
    assert read == expected
