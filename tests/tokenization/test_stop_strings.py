"""Stop strings in streamed text: found wherever token borders fall, and never shown in part."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from quire.tokenization.stop_strings import StopStrings, StopTable

letters = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=5)


def naive(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the match that ends first, the longest if several end there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def cut(text: str, borders: list[int]) -> list[str]:
    points = [0, *sorted(min(border, len(text)) for border in borders), len(text)]
    return [text[a:b] for a, b in pairwise(points)]


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What is shown after each piece, and the stop found. Without one, what `finish` releases is the last."""
    matcher, shown = StopStrings(StopTable(stops), include), []
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.flush()], None


@given(text=letters, stops=stop_lists, borders=st.lists(st.integers(0, 30), max_size=10), include=st.booleans())
def test_equals_the_search_in_the_full_text(text: str, stops: list[str], borders: list[int], include: bool) -> None:
    shown, stop = run(stops, cut(text, borders), include)
    expected = naive(text, stops)
    if expected is None:
        assert (stop, "".join(shown)) == (None, text)
    else:
        end, matched = expected
        assert stop == matched
        assert "".join(shown) == text[: end if include else end - len(matched)]


@given(text=letters, stops=stop_lists, borders=st.lists(st.integers(0, 30), max_size=10))
def test_holds_back_no_more_than_a_possible_beginning(text: str, stops: list[str], borders: list[int]) -> None:
    pieces = cut(text, borders)
    matcher, seen, shown = StopStrings(StopTable(stops)), "", ""
    for piece in pieces:
        safe, stop = matcher.push(piece)
        seen, shown = seen + piece, shown + safe
        if stop is not None:
            return
        held = seen[len(shown) :]
        assert held == "" or any(name.startswith(held) and name != held for name in stops)


def test_a_stop_over_three_tokens() -> None:
    assert run(["\n\nUser:"], ["Hello", "\n", "\nUs", "er: hi"]) == (["Hello", "", "", ""], "\n\nUser:")


def test_a_false_alarm_is_released() -> None:
    assert run(["\n\nUser:"], ["Hello\n", "\nUsed"]) == (["Hello", "\n\nUsed", ""], None)


def test_held_text_comes_out_at_the_end() -> None:
    assert run(["###"], ["a##"]) == (["a", "##"], None)


def test_the_stop_can_be_shown() -> None:
    assert run(["END"], ["x E", "ND y"], include=True) == (["x ", "END"], "END")


def test_the_first_to_be_complete_wins() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], "bc")
    assert run(["abcd", "bc"], ["a", "b", "c", "d"]) == (["", "", "a"], "bc")


def test_the_longest_of_those_that_end_together_wins() -> None:
    assert run(["c", "abc", "bc"], ["xabc"]) == (["x"], "abc")


def test_one_table_serves_independent_sequences() -> None:
    table = StopTable(["ab"])
    first, second = StopStrings(table), StopStrings(table)
    assert first.push("a") == ("", None)
    assert second.push("b") == ("b", None)
    assert first.push("b") == ("", "ab")
