from __future__ import annotations

import msgspec
import pytest

from quire.cli.engine_flags import add_engine_flags, engine_options
from quire.cli.parser import Parser, add_struct_flags, given
from quire.config.options import EngineOptions
from quire.errors import ConfigError, UserError
from quire.sampling_params import SamplingParams


class Sample(msgspec.Struct):
    name: str | None = None
    count: int = 3
    limit: int | None = 5
    size: int | str | None = None
    share: float | None = None
    early: bool | str = False
    enabled: bool = True
    stop: list[str] | str | None = None
    ids: list[int] | None = None
    bias: dict[int, float] | None = None
    hidden: int = 1


HELP = {name: f"help of {name}, 100%" for name in Sample.__struct_fields__}


def parse(*arguments: str) -> dict[str, object]:
    parser = Parser(prog="test")
    add_struct_flags(parser, Sample, HELP, title="sample", skip=("hidden",))
    return given(parser.parse(arguments), Sample)


def test_only_what_is_given_is_stored() -> None:
    assert parse() == {}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--name", "x"], {"name": "x"}),
        (["--count=4"], {"count": 4}),
        (["--limit", "none"], {"limit": None}),
        (["--limit", "7"], {"limit": 7}),
        (["--size", "4GiB"], {"size": "4GiB"}),
        (["--share", "0.25"], {"share": 0.25}),
        (["--early", "True"], {"early": True}),
        (["--early", "false"], {"early": False}),
        (["--early", "never"], {"early": "never"}),
        (["--enabled"], {"enabled": True}),
        (["--no-enabled"], {"enabled": False}),
        (["--stop", "a,b", "--stop", "\n"], {"stop": ["a,b", "\n"]}),
        (["--ids", "1,2", "--ids", "3"], {"ids": [1, 2, 3]}),
        (["--bias", "5=-1.5,6=2"], {"bias": {5: -1.5, 6: 2.0}}),
    ],
)
def test_types_come_from_the_annotations(arguments: list[str], expected: dict[str, object]) -> None:
    assert parse(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "x"], "invalid int value: 'x'"),
        (["--count", "none"], "invalid int value: 'none'"),
        (["--cuont", "1"], "unknown option '--cuont'; did you mean '--count'"),
        (["--cou", "1"], "unknown option '--cou'; did you mean '--count'"),
        (["--name"], "expected one argument"),
        (["--bias", "5"], "invalid ID=VALUE list value"),
        (["--ids", "1,x"], "invalid list of integers value"),
        (["--hidden", "1"], "unknown option '--hidden'"),
        (["surplus"], "unexpected argument 'surplus'"),
    ],
)
def test_mistakes_are_user_errors(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(*arguments)
    assert message in str(caught.value)


def test_help_shows_defaults_and_percent_signs() -> None:
    parser = Parser(prog="test")
    add_struct_flags(parser, Sample, HELP, title="sample")
    text = " ".join(parser.format_help().split())
    assert "help of count, 100% (default: 3)" in text
    assert "--enabled, --no-enabled" in text


def test_every_engine_option_is_a_flag() -> None:
    parser = Parser(prog="test")
    add_engine_flags(parser)
    flags = set(parser._option_string_actions)
    assert {"--" + name.replace("_", "-") for name in EngineOptions.__struct_fields__} <= flags


def options(*arguments: str) -> EngineOptions:
    parser = Parser(prog="test")
    add_engine_flags(parser)
    return engine_options(parser.parse(arguments))


def test_engine_options_from_flags() -> None:
    assert options() == EngineOptions()
    made = options("some/model", "--block-size", "8", "--no-enable-prefix-caching", "--kv-cache-memory", "1GiB")
    assert made == EngineOptions(model="some/model", block_size=8, enable_prefix_caching=False, kv_cache_memory="1GiB")


def test_ranks_have_a_short_flag() -> None:
    assert options("-tp", "2").tensor_parallel_size == options("--tensor-parallel-size", "2").tensor_parallel_size == 2


def test_model_may_be_positional_or_a_flag_but_not_two_different_ones() -> None:
    assert options("--model", "a").model == options("a").model == options("a", "--model", "a").model == "a"
    assert options("-hf", "org/repo-GGUF:Q4_K_M").model == "org/repo-GGUF:Q4_K_M"
    with pytest.raises(UserError, match="give one"):
        options("a", "--model", "b")


def test_sampling_fields_have_flags_that_build_them() -> None:
    parser = Parser(prog="test")
    add_struct_flags(parser, SamplingParams, dict.fromkeys(SamplingParams.__struct_fields__, "x"), title="sampling")
    arguments = ["--stop", "a", "--stop", "b", "--stop-token-ids", "1,2", "--logit-bias", "3=1", "--max-tokens", "none"]
    found = given(parser.parse(arguments), SamplingParams)
    assert SamplingParams(**found) == SamplingParams(
        stop=["a", "b"], stop_token_ids=[1, 2], logit_bias={3: 1.0}, max_tokens=None
    )


def test_wrong_values_are_config_errors() -> None:
    with pytest.raises(ConfigError):
        EngineOptions.from_keywords({"block_size": "x"})
