"""Answers as they are shown: Markdown in whole blocks, and no character of the model moves the cursor."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from quire.cli.answers import ReplyPiece
from quire.cli.screen import MarkdownScreen, split_blocks, visible


def test_control_characters_are_shown() -> None:
    every = "".join(map(chr, range(0x300))) + "\u2028\u2029\u202e\u2066\u2069"
    shown = visible(every)
    assert all(character.isprintable() or character in "\n\t\xa0\xad" for character in shown)
    assert visible("a\x1b[2Jb\x07\x9b\x7f\u202e") == "a␛[2Jb␇<U+009B>␡<U+202E>"
    kept = "Grüße, 世界 👍\n\tx"
    assert visible(kept) == kept


TEXT = "# A\n\none\ntwo\n\n- x\n\n  more of x\n\n- y\n\n~~~\n```\n\nb\n~~~\n\nend"


def test_a_block_is_whole_when_no_later_text_changes_it() -> None:
    lengths = {split_blocks(TEXT[:end]) for end in range(len(TEXT) + 1)}
    ends = {TEXT[:length] for length in lengths}
    assert ends == {"", "# A\n\n", "# A\n\none\ntwo\n\n", TEXT[: TEXT.index("- y")], TEXT[: TEXT.index("~~~")],
                    TEXT[: TEXT.index("end")]}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_stays_on_the_screen(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.screen.SECONDS_BETWEEN_FRAMES", 0.0)
    file = io.StringIO()
    console = Console(file=file, force_terminal=False, width=40)
    with MarkdownScreen(console) as screen:
        for place in range(0, len("hm, hm"), size):
            screen.write(ReplyPiece("hm, hm"[place : place + size], ""))
        text = "one **two**\n\n```\nx\x1b[1m\n```\n\nthree"
        for place in range(0, len(text), size):
            screen.write(ReplyPiece("", text[place : place + size]))
    lines = [line.strip() for line in file.getvalue().splitlines()]
    assert [line for line in lines if line] == ["hm, hm", "one two", "x␛[1m", "three"]


def test_a_long_end_is_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.screen.SECONDS_BETWEEN_FRAMES", 0.0)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40, height=5, color_system=None)
    with MarkdownScreen(console) as screen:
        for number in range(12):
            screen.write(ReplyPiece("", f"- item {number}\n"))
            drawn = file.getvalue().rpartition("\x1b[2K")[2]
            assert drawn.count("\n") <= 5
    kept = file.getvalue().rpartition("\x1b[2K")[2]
    assert [f"item {number}" in kept for number in range(12)] == [True] * 12, "all of it stays"
