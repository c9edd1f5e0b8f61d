"""Unknown fields, near misses of known ones, numbers written as texts, and what clients send back with the history."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.body import parse_body
from quire.server.errors import ApiError
from quire.server.fields import MAX_UNKNOWN_FIELDS, near_miss
from quire.server.headers import MAX_HEADER_CHARACTERS, header_value
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completion import CompletionRequest
from quire.server.protocol.foreign import CHANGES_ANSWER, MESSAGE_NO_EFFECT, NO_EFFECT
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving

HI = {"role": "user", "content": "hi"}
LETTERS = "abcdefghijklmnopqrstuvwxyz_"


def completion(*, strict: bool = False, **fields: Any) -> tuple[CompletionRequest, list[str]]:
    return parse_body(msgspec.json.encode({"prompt": "a", **fields}), CompletionRequest, strict=strict)


def chat(*, strict: bool = False, **fields: Any) -> tuple[ChatRequest, list[str]]:
    return parse_body(msgspec.json.encode({"messages": [HI], **fields}), ChatRequest, strict=strict)


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, str]:
    """A name, and what one insertion, deletion, substitution or transposition makes of it."""
    name = draw(st.text(LETTERS, min_size=6, max_size=12))
    kind = draw(st.sampled_from(("insert", "delete", "substitute", "transpose")))
    index = draw(st.integers(0, len(name) - 2))
    letter = draw(st.sampled_from(LETTERS))
    rest = {"insert": name[index:], "delete": name[index + 1 :], "substitute": name[index + 1 :]}
    if kind == "transpose":
        return name, name[:index] + name[index + 1] + name[index] + name[index + 2 :]
    return name, name[:index] + ("" if kind == "delete" else letter) + rest[kind]


@given(edits())
def test_one_edit_is_a_near_miss(pair: tuple[str, str]) -> None:
    name, edited = pair
    assert near_miss(edited, [name]) == (None if edited == name else name)


def distance(left: str, right: str) -> int:
    """Insertions, deletions, substitutions and transpositions of neighbours, by the textbook's table."""
    table = [[i + j if i * j == 0 else 0 for j in range(len(right) + 1)] for i in range(len(left) + 1)]
    for i in range(1, len(left) + 1):
        for j in range(1, len(right) + 1):
            cost = left[i - 1] != right[j - 1]
            table[i][j] = min(table[i - 1][j] + 1, table[i][j - 1] + 1, table[i - 1][j - 1] + cost)
            if i > 1 and j > 1 and left[i - 2 : i] == right[j - 2 : j][::-1]:
                table[i][j] = min(table[i][j], table[i - 2][j - 2] + 1)
    return table[-1][-1]


@given(st.text("abc", max_size=8), st.text("abc", min_size=6, max_size=8))
def test_near_misses_are_one_edit_away(name: str, known: str) -> None:
    assert (near_miss(name, [known]) == known) == (distance(name, known) == 1)


def test_short_names_are_no_near_misses() -> None:
    assert near_miss("stap", ["stop"]) is None
    assert completion(stap=1)[1] == ["stap"]


def test_unknown_fields_are_reported_by_their_place() -> None:
    messages = [{**HI, "mood": 1}, {"role": "user", "mood": 2, "content": [{"type": "text", "text": "a", "size": 1}]}]
    body, unknown = chat(messages=messages, colour="red", stream=True, stream_options={"speed": 9})
    assert unknown == ["colour", "messages[].content[].size", "messages[].mood", "stream_options.speed"]
    assert body.messages[1].to_dict() == {"role": "user", "content": [{"type": "text", "text": "a"}]}


@pytest.mark.parametrize("fields", [{"colour": 1}, {"n": "4"}, {"n": 4.0}, {"messages": [{**HI, "mood": 1}]}])
def test_strict_fields(fields: dict[str, Any]) -> None:
    chat(**fields)
    with pytest.raises(ApiError) as caught:
        chat(strict=True, **fields)
    assert caught.value.status == 400


def test_a_request_has_few_unknown_fields() -> None:
    many = {f"field_{index:03}": 1 for index in range(MAX_UNKNOWN_FIELDS)}
    assert len(completion(**many)[1]) == MAX_UNKNOWN_FIELDS
    with pytest.raises(ApiError, match="unknown fields"):
        completion(**many, one_more=1)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("max_tokens", 4.0, 4),
        ("max_tokens", "4", 4),
        ("max_tokens", " 4.0 ", 4),
        ("temperature", "0.5", 0.5),
        ("temperature", "1", 1.0),
        ("temperature", 1, 1.0),
        ("stream", "true", True),
        ("stream", "off", False),
        ("echo", 1, True),
        ("stop_token_ids", ["5", 6.0], [5, 6]),
        ("logit_bias", {"5": "1.5"}, {5: 1.5}),
        ("prompt", "4", "4"),
        ("stop", "4", "4"),
    ],
)
def test_numbers_as_texts(name: str, given: Any, value: Any) -> None:
    assert getattr(completion(**{name: given})[0], name) == value


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("n", 4.5),
        ("n", "four"),
        ("n", "null"),
        ("n", ""),
        ("n", True),
        ("n", "1_0"),
        ("n", [1]),
        ("temperature", "nan"),
    ],
)
def test_what_is_no_number(name: str, given: Any) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**{name: given})
    assert caught.value.detail.param == name


def test_a_coerced_field_leaves_texts_alone() -> None:
    body, _ = chat(n="2", messages=[{"role": "user", "content": "null"}, {"role": "user", "content": ["4"]}])
    assert [message.content for message in body.messages] == ["null", ["4"]]


OF_CHATS = ("media_io_kwargs", "mm_processor_kwargs", "prediction")


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_bookkeeping_has_no_effect(name: str) -> None:
    for value in ("x", {"a": "b"}, True):
        assert completion(**{name: value}) == completion()
        if name not in OF_CHATS:  # which conversations alone have
            assert chat(**{name: value}) == chat()


@pytest.mark.parametrize("name", sorted(CHANGES_ANSWER))
def test_fields_of_other_servers_that_change_the_answer(name: str) -> None:
    for parse in (completion, chat):
        with pytest.raises(ApiError) as caught:
            parse(**{name: {"x": 1}})
        assert (caught.value.detail.param, caught.value.detail.code) == (name, "unsupported_parameter")
        for harmless in CHANGES_ANSWER[name]:
            assert parse(**{name: harmless}) == parse()


@pytest.mark.parametrize("name", sorted(MESSAGE_NO_EFFECT))
def test_what_servers_add_to_answers_may_come_back(name: str) -> None:
    message = {"role": "assistant", "content": None, name: [{"x": 1}]}
    body, unknown = chat(messages=[HI, message, HI])
    assert unknown == []
    assert body.messages[1].to_dict() == {"role": "assistant", "content": None}


@given(st.lists(st.text(max_size=200), min_size=1, max_size=MAX_UNKNOWN_FIELDS))
def test_the_header_is_safe_and_short(names: list[str]) -> None:
    value = header_value(names)
    assert value.isascii()
    assert value.isprintable()
    assert len(value) <= MAX_HEADER_CHARACTERS + 70 * 2


@pytest.fixture
async def strict(model_path: Path) -> AsyncIterator[Served]:
    async with serving(model_path, ServerSettings(strict_fields=True)) as served:
        yield served


async def test_the_header_and_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "a", "max_tokens": 1, "colour": "red", "größe": 1}
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "quire.server"):
            response = await served.client.post("/v1/completions", json=body)
        assert response.status_code == 200
        assert response.headers["x-quire-ignored"] == "colour, gr??e"
    assert [record.getMessage() for record in caplog.records if "colour" in record.getMessage()] == [
        "/v1/completions: the field 'colour' of a request has no effect (logged once)"
    ]
    refused = await served.client.post("/v1/completions", json={**body, "n": 0})
    assert (refused.status_code, refused.headers["x-quire-ignored"]) == (400, "colour, gr??e")
    plain = await served.client.post("/tokenize", json={"prompt": "a", "metadata": {"a": "b"}})
    assert (plain.status_code, plain.headers.get("x-quire-ignored")) == (200, None)


async def test_a_strict_server(strict: Served) -> None:
    response = await strict.client.post("/v1/completions", json={"prompt": "a", "colour": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "colour"
