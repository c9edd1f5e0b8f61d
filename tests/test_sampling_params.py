"""SamplingParams refuses every value that cannot be honoured, and says which field is wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.beam_search_params import BeamSearchParams
from quire.errors import UserError
from quire.sampling_params import (
    MAX_INTEGER,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_TIMEOUT_SECONDS,
    MIN_SEED,
    MOST_LOGPROBS,
    PYTHON_ONLY,
    RepetitionDetectionParams,
    SamplingParams,
)
from quire.structured_outputs_params import StructuredOutputsParams

NAN, INFINITY = float("nan"), float("inf")

NUMBERS = {
    # name: (accepted values, refused values)
    "temperature": ((0, 0.0, 1e-3, 100.0), (-0.1, 100.1, 10**400)),
    "top_p": ((1e-6, 0.5, 1), (0.0, -0.1, 1.0001)),
    "min_p": ((0.0, 1.0), (-0.1, 1.1)),
    "presence_penalty": ((-2.0, 0, 2.0), (-2.01, 2.01)),
    "frequency_penalty": ((-2.0, 0, 2.0), (-2.01, 2.01)),
    "length_penalty": ((1, 1.0), (-10.01, 10.01)),
    "timeout_s": ((1e-6, 1, 0.5, MAX_TIMEOUT_SECONDS), (0, 0.0, -1.0, 1.1 * MAX_TIMEOUT_SECONDS)),
    "repetition_penalty": ((0.01, 1.0, 100.0), (0.0, 1e-45, 0.0099, -1.0, 100.5)),
}
INTEGERS = {
    "n": ((1, MAX_N), (0, -1, MAX_N + 1)),
    "best_of": ((1, MAX_N), (0, -1, MAX_N + 1)),
    "top_k": ((-1, 0, 1, 10**6, MAX_INTEGER), (-2, MAX_INTEGER + 1)),
    "seed": ((MIN_SEED, 0, MAX_SEED), (MAX_SEED + 1, MIN_SEED - 1)),
    "max_tokens": ((1, 10**9, MAX_INTEGER), (0, -5, 2**64)),
    "min_tokens": ((0, 16), (-1, 2**70)),
    "logprobs": ((-1, 0, MOST_LOGPROBS), (-2, MOST_LOGPROBS + 1)),
    "prompt_logprobs": ((-1, 0, MOST_LOGPROBS), (-2, MOST_LOGPROBS + 1)),
    "truncate_prompt_tokens": ((-1, 1, 100), (0, -2, MAX_INTEGER + 1)),
}
OPTIONAL = ("best_of", "timeout_s", "seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
FLAGS = ("use_beam_search", "include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids")


def pairs(table: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]], column: int) -> list[tuple[str, Any]]:
    return [(name, value) for name, columns in table.items() for value in columns[column]]


def refused(name: str, value: object, **others: object) -> str:
    """The message of the UserError that `name=value` raises."""
    with pytest.raises(UserError) as caught:
        SamplingParams.from_options({name: value, **others})
    assert caught.value.param == name
    assert name in caught.value.message or name == "stop"
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(("name", "value"), pairs(NUMBERS, 0) + pairs(INTEGERS, 0))
def test_values_up_to_the_limits_are_kept(name: str, value: object) -> None:
    assert getattr(SamplingParams.from_options({name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), pairs(NUMBERS, 1) + pairs(INTEGERS, 1))
def test_values_beyond_the_limits_are_refused(name: str, value: object) -> None:
    assert str(value) in refused(name, value)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY, "0.5", None, True, [1.0], 1 + 2j])
def test_numbers_must_be_finite_numbers(name: str, value: object) -> None:
    if value is None and name in OPTIONAL:
        assert SamplingParams.from_options({name: value}) == SamplingParams()
        return
    assert "finite number" in refused(name, value)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.0, "1", True, [1], NAN])
def test_integers_must_be_integers(name: str, value: object) -> None:
    assert "integer" in refused(name, value)


@pytest.mark.parametrize("name", INTEGERS)
def test_none_means_unset_where_that_has_a_meaning(name: str) -> None:
    if name in OPTIONAL:
        assert getattr(SamplingParams.from_options({name: None}), name) is None
    else:
        assert "integer" in refused(name, None)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_flags_are_true_or_false(name: str, value: object) -> None:
    assert "true or false" in refused(name, value)


@pytest.mark.parametrize("name", TOKEN_LISTS)
@pytest.mark.parametrize("value", [[-1], ["a"], [1.5], [True], "12", 7, {3: 4}, [[1]]])
def test_token_lists_hold_token_ids(name: str, value: object) -> None:
    refused(name, value)


def test_allowed_tokens_must_leave_a_token() -> None:
    assert "at least one" in refused("allowed_token_ids", [])


@pytest.mark.parametrize("value", [[""], [1], ["a", None], 5, b"x", "", {"a": 1}])
def test_stop_is_a_string_or_a_list_of_them(value: object) -> None:
    assert "non-empty strings" in refused("stop", value)


def test_one_stop_string_becomes_a_list() -> None:
    assert SamplingParams(stop="END").stop == ["END"]
    assert SamplingParams(stop=["a", "b"]).stop_strings == ["a", "b"]
    assert SamplingParams().stop_strings == []


def test_stop_strings_are_counted() -> None:
    strings = [str(number) for number in range(MAX_STOP_STRINGS)]
    assert SamplingParams(stop=strings).stop == strings
    assert str(MAX_STOP_STRINGS) in refused("stop", [*strings, "more"])


def test_stop_strings_need_text_to_look_at() -> None:
    assert "detokenize" in refused("stop", "END", detokenize=False)
    assert SamplingParams(detokenize=False, stop_token_ids=[3]).stop_token_ids == [3]


@pytest.mark.parametrize("value", [[""], "word", [3]])
def test_bad_words_are_non_empty_strings(value: object) -> None:
    refused("bad_words", value)


@pytest.mark.parametrize("value", [{-1: 1.0}, {"a": 1.0}, {1: NAN}, {1: 100.5}, {1: "2"}, [1, 2], 3])
def test_logit_bias_maps_token_ids_to_limited_numbers(value: object) -> None:
    refused("logit_bias", value)


def test_logit_bias_is_limited_in_size() -> None:
    largest = dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)
    assert SamplingParams(logit_bias=largest).logit_bias == largest
    assert str(MAX_LOGIT_BIAS) in refused("logit_bias", largest | {MAX_LOGIT_BIAS: 1.0})


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert "max_tokens (4)" in refused("min_tokens", 5, max_tokens=4)
    assert SamplingParams(min_tokens=99, max_tokens=None).min_tokens == 99


def test_unknown_names_are_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match="did you mean 'temperature'") as caught:
        SamplingParams.from_options({"temprature": 0.5})
    assert caught.value.param == "temprature"


def test_greedy_means_temperature_zero() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(use_beam_search=True).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_every_field_is_covered_here() -> None:
    covered = {*NUMBERS, *INTEGERS, *FLAGS, *TOKEN_LISTS, "stop", "bad_words", "logit_bias", "early_stopping"}
    covered |= {"truncation_side", "thinking_token_budget", "num_speculative_tokens", *PYTHON_ONLY}
    assert covered == set(SamplingParams.__struct_fields__)


def test_structured_outputs_are_params_or_their_fields() -> None:
    schema = {"type": "object"}
    params = SamplingParams.from_options({"structured_outputs": {"json": schema}}).structured_outputs
    assert params == StructuredOutputsParams(json=schema)
    assert "StructuredOutputsParams" in refused("structured_outputs", 5)
    assert "not json and regex" in refused("structured_outputs", {"json": schema, "regex": "a"})
    assert "got none" in refused("structured_outputs", {})
    for wrong in (
        {"json": 5},
        {"regex": ["a"]},
        {"choice": []},
        {"choice": "ab"},
        {"choice": ["a"] * 5000},
        {"json_object": 1},
        {"grammar": "a", "whitespace_pattern": 3},
        {"regex": "a", "start_after_token_ids": [-1]},
        {"regex": "a", "preamble": {"format": {"type": "any_text"}}},
        {"regex": "a", "start_after_token_ids": list(range(100))},
    ):
        with pytest.raises(UserError) as caught:
            SamplingParams.from_options({"structured_outputs": wrong})
        assert caught.value.param == "structured_outputs"
    with pytest.raises(UserError, match="did you mean 'regex'"):
        SamplingParams.from_options({"structured_outputs": {"regx": "a"}})


def test_sides_and_repetitions() -> None:
    assert SamplingParams(truncation_side="right").truncation_side == "right"
    assert "middle" in refused("truncation_side", "middle")
    fields = {"max_pattern_size": 4, "min_count": 2}
    params = SamplingParams.from_options({"repetition_detection": fields}).repetition_detection
    assert params == RepetitionDetectionParams(**fields)
    assert "RepetitionDetectionParams" in refused("repetition_detection", 5)
    assert "min_count" in refused("repetition_detection", {"max_pattern_size": 4})
    with pytest.raises(UserError, match="did you mean 'min_count'"):
        SamplingParams.from_options({"repetition_detection": {"mincount": 4}})


def test_fields_can_be_set_to_what_is_valid() -> None:
    params = SamplingParams()
    params.max_tokens = 7
    params.stop = "x"
    params.logprob_token_ids = [3, 3]
    assert params == SamplingParams(max_tokens=7, stop=["x"], logprob_token_ids=[3])
    assert params.logprobs == 0
    with pytest.raises(UserError, match="min_tokens"):
        params.min_tokens = 8
    with pytest.raises(AttributeError, match="did you mean 'max_tokens'"):
        params.max_token = 8  # type: ignore[attr-defined]
    assert params == SamplingParams(max_tokens=7, stop=["x"], logprob_token_ids=[3])


ANY_VALUE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)


@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), ANY_VALUE, max_size=4))
def test_anything_is_either_refused_clearly_or_survives_the_wire(options: dict[str, Any]) -> None:
    outcome = attempt(options)
    if isinstance(outcome, UserError):
        assert outcome.param in SamplingParams.__struct_fields__
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(outcome), type=SamplingParams) == outcome


def attempt(options: dict[str, Any]) -> SamplingParams | UserError:
    try:
        return SamplingParams.from_options(options)
    except UserError as error:
        return error


def test_best_of() -> None:
    assert SamplingParams(n=3).num_sequences == 3
    assert not SamplingParams(n=3, best_of=3).answers_at_end
    params = SamplingParams(n=2, best_of=5)
    assert params.num_sequences == 5
    assert params.ranks_samples
    assert params.answers_at_end


def test_beam_search() -> None:
    params = SamplingParams(n=2, best_of=5, use_beam_search=True, early_stopping="never", length_penalty=-2)
    assert params.num_sequences == 5
    assert params.answers_at_end
    assert not params.ranks_samples


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 257}, "best_of"),
        ({"best_of": 1.5}, "best_of"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"use_beam_search": True, "n": 33}, "n"),
        ({"use_beam_search": True, "best_of": 33}, "best_of"),
        ({"use_beam_search": True, "length_penalty": 11.0}, "length_penalty"),
        ({"use_beam_search": True, "length_penalty": float("nan")}, "length_penalty"),
        ({"use_beam_search": True, "early_stopping": "maybe"}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": 1}, "early_stopping"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "top_p": 0.9}, "top_p"),
        ({"use_beam_search": True, "top_k": 5}, "top_k"),
        ({"use_beam_search": True, "min_p": 0.1}, "min_p"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "stop_token_ids": list(range(33))}, "stop_token_ids"),
    ],
)
def test_what_is_refused_around_beam_search(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UserError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


def test_beam_search_params() -> None:
    """vLLM's names and defaults."""
    params = BeamSearchParams(beam_width=4, max_tokens=9)
    assert params.to_sampling_params() == SamplingParams(n=4, max_tokens=9, use_beam_search=True, temperature=0.0)
    assert (params.ignore_eos, params.temperature, params.length_penalty) == (False, 0.0, 1.0)
    assert params.include_stop_str_in_output is params.early_stopping is False
    for fields, param in [({"beam_width": 0}, "beam_width"), ({"beam_width": 33}, "beam_width"),
                          ({"max_tokens": 0}, "max_tokens"), ({"temperature": 0.5}, "temperature")]:  # fmt: skip
        with pytest.raises(UserError, match=param) as caught:
            BeamSearchParams(**{"beam_width": 4, "max_tokens": 9, **fields})
        assert caught.value.param == param
