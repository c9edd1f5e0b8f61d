from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.utils.sse import EventParser


def parse(*chunks: bytes) -> list[bytes]:
    parser = EventParser()
    return [data for chunk in chunks for data in parser.feed(chunk)]


def test_plain_events() -> None:
    assert parse(b"data: a\n\ndata: b\n\n") == [b"a", b"b"]


def test_an_event_is_complete_only_after_the_blank_line() -> None:
    parser = EventParser()
    assert list(parser.feed(b"data: a\n")) == []
    assert list(parser.feed(b"\n")) == [b"a"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_endings(end: bytes) -> None:
    stream = end.join([b"data: a", b"", b"data: b", b"", b": bye", b""])
    assert parse(stream) == [b"a", b"b"]


def test_comments_other_fields_and_empty_events_are_skipped() -> None:
    assert parse(b": ping\n\nevent: x\nid: 1\ndata:a\nretry: 3\n\nevent: y\n\n") == [b"a"]


def test_data_lines_are_joined_and_one_space_is_removed() -> None:
    assert parse(b"data: a\ndata:  b\ndata\n\n") == [b"a\n b\n"]


@given(
    payloads=st.lists(st.text(alphabet='aé漢🚀 :"{}', min_size=1), max_size=5),
    cuts=st.lists(st.integers(min_value=0, max_value=200), max_size=20),
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
def test_any_split_gives_the_same_events(payloads: list[str], cuts: list[int], end: bytes) -> None:
    stream = b"".join(b"data: " + text.encode() + end * 2 for text in payloads) + b":" + end
    stream += b"\n" if end == b"\r" else b""
    borders = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[low:high] for low, high in itertools.pairwise(borders)]
    assert [data.decode() for data in parse(*chunks)] == payloads


def test_a_line_ending_split_in_two_is_one_line_ending() -> None:
    assert parse(b"data: a\r", b"\ndata: b\r\n\r\n") == [b"a\nb"]
