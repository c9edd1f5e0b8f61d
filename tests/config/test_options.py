"""EngineOptions: names and types are checked at once, each option is explained."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from quire.config.option import GROUPS, options_of
from quire.config.options import BUNDLED_MODEL, EngineOptions
from quire.errors import ConfigError
from quire.server.settings import ServerSettings


@pytest.mark.parametrize("struct", [EngineOptions, ServerSettings])
def test_every_option_has_a_record(struct: type[msgspec.Struct]) -> None:
    options = options_of(struct)
    assert tuple(options) == struct.__struct_fields__
    assert all(option.help and "\n" not in option.help and len(option.help) <= 140 for option in options.values())
    assert {option.group for option in options.values()} <= set(GROUPS)


def test_defaults_need_nothing_from_the_user() -> None:
    assert EngineOptions.from_keywords({}) == EngineOptions()
    assert EngineOptions().model == BUNDLED_MODEL


def test_keywords_become_fields() -> None:
    options = EngineOptions.from_keywords({"model": Path("models") / "x", "block_size": 8, "kv_cache_memory": "4GiB"})
    assert (options.model, options.block_size, options.kv_cache_memory) == (str(Path("models/x")), 8, "4GiB")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("blocksize", "block_size"), ("max_num_sequences", "max_num_seqs"), ("tensor_parallel", "tensor_parallel_size")],
)
def test_unknown_names_are_refused_with_the_nearest_one(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown engine option '{name}'; did you mean '{suggestion}'\?") as caught:
        EngineOptions.from_keywords({name: 1})
    assert caught.value.param == name


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineOptions.from_keywords({"zzzz": 1})
    assert str(caught.value) == "unknown engine option 'zzzz'"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", "16"),
        ("block_size", 16.5),
        ("enable_prefix_caching", "yes"),
        ("dtype", 32),
        ("kv_cache_memory", [1]),
        ("max_model_len", "long"),
    ],
)
def test_wrong_types_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineOptions.from_keywords({name: value})


@pytest.mark.parametrize("name", ["block_size", "seed", "dtype"])
def test_none_is_the_default_where_vllm_takes_it(name: str) -> None:
    assert EngineOptions.from_keywords({name: None}) == EngineOptions()


def test_options_are_frozen_and_cross_the_wire() -> None:
    options = EngineOptions(model="x", max_num_seqs=4, kv_cache_memory="1GiB")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=EngineOptions) == options
    with pytest.raises(AttributeError):
        options.seed = 3  # type: ignore[misc]
