"""Parsing: one type that can only be valid, or an error that names the field."""

from __future__ import annotations

import re
import threading
from typing import Any

import msgspec
import pytest

from quire.errors import UserError, nearest_name
from quire.server import body as body_module
from quire.server import fields as fields_module
from quire.server import reading
from quire.server.body import parse_body
from quire.server.errors import ApiError
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completion import NO_PROMPT, CompletionRequest
from quire.server.protocol.tokenize import TokenizeRequest
from tests.server.conftest import Served

USER = '{"role": "user", "content": "hi"}'


def failure(body: str | bytes, kind: type = CompletionRequest, *, strict: bool = False) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(body.encode() if isinstance(body, str) else body, kind, strict=strict)
    assert caught.value.status == 400
    return caught.value


def test_null_counts_as_absent() -> None:
    body = b'{"prompt": "a", "n": null, "suffix": null, "stream": null, "logit_bias": null, "nonsense": null}'
    assert parse_body(body, CompletionRequest) == (CompletionRequest(prompt="a"), [])


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'"prompt"', "invalid_json"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_json"),
        (b'{"prompt": "\xff\xfe"}', "invalid_utf8"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a":' * 100_000, "invalid_json"),
    ],
)
def test_what_is_not_a_json_object(body: bytes, code: str) -> None:
    assert failure(body).detail.code == code


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"n": "two"', "n"),
        ('"n": 1.5', "n"),
        ('"n": true', "n"),
        ('"n": 99999999999999999999', "n"),
        ('"temperature": "hot"', "temperature"),
        ('"stop": ["a", 3]', "stop[1]"),
        ('"stop_token_ids": [-1]', "stop_token_ids[0]"),
        ('"logit_bias": {"a": 1}', "logit_bias"),
        ('"logit_bias": {"1": "much"}', "logit_bias"),
        ('"stream_options": {"include_usage": 2}', "stream_options.include_usage"),
        ('"stream_options": {"include_usages": true}', "stream_options.include_usages"),
        ('"request_id": "two words"', "request_id"),
        ('"request_id": "line\\nbreak"', "request_id"),
        ('"request_id": "' + "x" * 129 + '"', "request_id"),
        ('"cache_salt": ""', "cache_salt"),
        ('"best_of": 2, "stream": true', "stream"),
        ('"beam_width": 2', "beam_width"),
        ('"use_beam_search": true, "beam_width": 2, "best_of": 3', "best_of"),
        ('"use_beam_search": true, "n": 2, "stream": true', "stream"),
        ('"use_beam_search": true, "n": 2, "max_tokens": 0, "echo": true', "max_tokens"),
        ('"best_of": 5000', "best_of"),
        ('"max_tokens": 0', "max_tokens"),
        ('"stream_options": {"include_usage": true}', "stream_options"),
        ('"stream_options": {"include_usage": null}', "stream_options"),
        ('"prompt": []', "prompt"),
        ('"prompt": [1, "a"]', "prompt"),
        ('"prompt": [[1], "a"]', "prompt"),
        ('"prompt": {"text": "a"}', "prompt"),
        ('"prompt": [-1]', "prompt[0]"),
        ('"prompt": [' + ",".join(['"a"'] * 1025) + "]", "prompt"),
        ('"n": 256, "prompt": [' + ",".join(['"a"'] * 17) + "]", "n"),
    ],
)
def test_wrong_values_name_their_field(fields: str, param: str) -> None:
    prompt = "" if '"prompt"' in fields else ', "prompt": "a"'
    error = failure("{" + fields + prompt + "}")
    assert error.detail.param == param
    assert error.detail.type == "BadRequestError"
    assert "\n" not in error.detail.message


def test_keys_that_are_no_numbers_are_named() -> None:
    error = failure('{"prompt": "a", "logit_bias": {"5": 1, "bad1": 2, "bad2": 3}}')
    assert "'bad1', 'bad2'" in error.detail.message
    assert "'5'" not in error.detail.message


def test_missing_prompt() -> None:
    error = failure('{"n": 1}')
    assert (error.detail.param, error.detail.message) == ("prompt", NO_PROMPT)


def test_unknown_fields_suggest_the_nearest_name() -> None:
    error = failure('{"prompt": "a", "temprature": 1}')
    assert error.detail.param == "temprature"
    assert "did you mean 'temperature'?" in error.detail.message
    nested = failure('{"messages": [{"role": "user", "contents": "a"}]}', ChatRequest)
    assert nested.detail.param == "messages[0].contents"
    assert "did you mean 'content'?" in nested.detail.message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("{}", "messages[1].role"),
        ('{"role": "asistant", "content": "4"}', "messages[1].role"),
        ('{"role": "", "content": "4"}', "messages[1].role"),
        ('{"role": "user"}', "messages[1].content"),
        ('{"role": "user", "content": null}', "messages[1].content"),
        ('{"role": "assistant", "content": "a", "tool_calls": [{}]}', "messages[1].tool_calls[0].function"),
        (
            '{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}',
            "messages[1].tool_calls[0].type",
        ),
        ('{"role": "user", "content": 3}', "messages[1].content"),
        ('{"role": "user", "content": [{"type": "text", "text": "a", "file": {}}]}', "messages[1].content[0].file"),
        ("3", "messages[1]"),
    ],
)
def test_wrong_messages_name_their_place(message: str, param: str) -> None:
    assert failure('{"messages": [' + USER + "," + message + "]}", ChatRequest).detail.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"messages": []', "messages"),
        ('"messages": "hi"', "messages"),
        ('"messages": [' + USER + '], "top_logprobs": 1', "top_logprobs"),
        ('"messages": [' + USER + '], "continue_final_message": true', "continue_final_message"),
        (
            '"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": true,'
            ' "add_generation_prompt": true',
            "continue_final_message",
        ),
    ],
)
def test_contradictions_of_a_conversation(fields: str, param: str) -> None:
    assert failure("{" + fields + "}", ChatRequest).detail.param == param


def test_sampling_errors_carry_the_clients_own_name() -> None:
    body = parse_body(b'{"messages": [' + USER.encode() + b'], "max_completion_tokens": -1}', ChatRequest)[0]
    with pytest.raises(UserError) as caught:
        body.to_sampling_params()
    assert caught.value.param == "max_completion_tokens"
    assert str(caught.value).startswith("max_completion_tokens must be")
    asked = b'"logprobs": true, "top_logprobs": 1048577'
    body = parse_body(b'{"messages": [' + USER.encode() + b"], " + asked + b"}", ChatRequest)[0]
    with pytest.raises(UserError) as caught:
        body.to_sampling_params()
    assert caught.value.param == "top_logprobs"
    assert str(caught.value).startswith("top_logprobs must be")


def test_tokenize_takes_a_prompt_or_messages() -> None:
    assert failure("{}", TokenizeRequest).detail.param == "prompt"
    assert failure('{"prompt": "a", "messages": [' + USER + "]}", TokenizeRequest).detail.param == "prompt"
    assert failure('{"prompt": "a", "continue_final_message": true}', TokenizeRequest).detail.param == (
        "continue_final_message"
    )


class Spy:
    """A compiled pattern that notes how many characters it is given."""

    def __init__(self, pattern: re.Pattern[str], seen: list[int]) -> None:
        self._pattern, self._seen = pattern, seen

    def __getattr__(self, name: str) -> Any:
        def call(text: str, *more: Any) -> Any:
            self._seen.append(len(text))
            return getattr(self._pattern, name)(text, *more)

        return call


LONG_KEY = " - at `$" * 30_000


@pytest.mark.parametrize("key", [LONG_KEY, LONG_KEY + "\\n", "\\u0000" * 50_000, "`" * 100_000, "x" * 200_000])
@pytest.mark.parametrize("place", ['"stream_options": {"%s": 1}', '"%s": 1', '"logit_bias": {"%s": 1}'])
def test_no_pattern_is_matched_with_a_long_name_of_the_client(
    key: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    for module in (body_module, fields_module):
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                monkeypatch.setattr(module, name, Spy(value, seen))
    error = failure('{"prompt": "a", ' + place % key + "}", strict=True)
    assert max(seen, default=0) <= 100
    assert len(error.detail.message) <= 1000
    assert len(error.detail.param or "") <= 200


@pytest.mark.parametrize("name", ["a", "a - at `$.n`", "a\n", "`", "x - at `key` in `$.logit_bias`"])
def test_an_unknown_name_is_reported_as_it_is(name: str) -> None:
    body = msgspec.json.encode({"prompt": "a", "stream": True, "stream_options": {name: 1}})
    assert failure(body, strict=True).detail.param == f"stream_options.{name}"
    assert parse_body(body, CompletionRequest)[1] == [f"stream_options.{name}"]


@pytest.mark.parametrize("request_id", ["abc\n", "\nabc", "abc\n\n", "a\nb"])
def test_a_request_id_has_no_line_feeds(request_id: str) -> None:
    assert failure(msgspec.json.encode({"prompt": "a", "request_id": request_id})).detail.param == "request_id"


def test_long_names_are_not_compared() -> None:
    names = iter(("x" * 101,))
    assert nearest_name("x" * 101, names) == ""


def test_a_large_request_has_a_bounded_number_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted before one of them is made; brackets within strings do not count."""
    options = {"a": [1] * 60, "b": [{"c": [{}] * 18}] * 2, "text": '\\"[{' * 100}
    body = {"messages": [{"role": "user", "content": "[" * 100}], "chat_template_kwargs": options}
    for module in (body_module, fields_module):
        monkeypatch.setattr(module, "MAX_CONTAINERS", 50)
    assert parse_body(msgspec.json.encode(body), ChatRequest)[1] == []
    options["d"] = [[]] * 10
    decoded: list[object] = []
    monkeypatch.setattr(msgspec.json, "decode", decoded.append)
    error = failure(msgspec.json.encode(body), ChatRequest)
    assert error.detail.param == "chat_template_kwargs"
    assert "more than 50 objects and lists" in error.detail.message
    assert not decoded


@pytest.mark.parametrize(
    "text", [b'{"a": "' + b'\\"' * 300, b'{"a": ' + b"[" * 100, b"[" * 300 + b"]" * 300, b'"[' * 300]
)
def test_what_is_no_object_is_refused_as_that(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = failure(text, ChatRequest).detail
    for module in (body_module, fields_module):
        monkeypatch.setattr(module, "MAX_CONTAINERS", 50)
    found = failure(text, ChatRequest).detail
    assert found.code == expected.code == "invalid_json"


def test_a_request_has_a_bounded_number_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields_module, "MAX_ENTRIES", 5)
    parts = ",".join(['""'] * 2)
    message = '{"role": "user", "content": [' + parts + "]}"
    assert parse_body(('{"messages": [' + message + "]}").encode(), ChatRequest)[1] == []
    error = failure('{"messages": [' + message + "," + message + "]}", ChatRequest)
    assert error.detail.param == "messages[1].content"
    assert "more than 5 entries" in error.detail.message


async def test_only_short_bodies_are_parsed_on_the_event_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    parse = body_module.parse_body

    def note(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return parse(*arguments, **options)

    monkeypatch.setattr(reading, "parse_body", note)
    for length in (10, 2**16):
        message = {"role": "user", "content": "a" * length}
        answer = await served.client.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 1})
        assert (answer.status_code == 200) == (length == 10)
    assert threads == [True, False]
