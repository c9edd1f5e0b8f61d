"""Marks of images in prompts: token ids are those of the text that has an image's tokens written out."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from quire.multimodal.marks import ImageMarks

MARKS = ("<boi>", "<eoi>", "<image>")
MOST_LINES = 5
"""Newlines of the longest token."""


class Lines:
    """A tokenizer with a token for each of the first numbers of newlines."""

    def __init__(self) -> None:
        words = {f"w{number}": number for number in range(20)}
        self._tokenizer = Tokenizer(models.WordLevel(words, "w0"))
        self._tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        lines = ["\n" * count for count in range(1, MOST_LINES + 1)]
        self._tokenizer.add_tokens([AddedToken(each, normalized=False) for each in (*MARKS, *lines)])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return found


@pytest.mark.parametrize(
    "text",
    [
        "<boi>",
        "w1 w2<boi>w3",
        "w1\n<boi>\n\nw3\n\nw4",
        "\n\n\n\n<boi><boi>\n<boi>w1",
        "w1\n\n\n\n\n\n\n<boi>w2\n\n\n\n\n\n\n\n\n\n\nw3",
        "w1\n\nw2",
    ],
)
def test_tokens_of_the_text_with_images(text: str) -> None:
    tokenizer = Lines()
    begin, end, image = (tokenizer.encode(mark)[0] for mark in MARKS)
    marks = ImageMarks.of(begin, end, tokenizer)
    assert len(marks.lines) == MOST_LINES
    counts = [3 + index for index in range(text.count("<boi>"))]
    whole, *rest = text.split("<boi>")
    for count, part in zip(counts, rest, strict=True):
        whole += "\n\n<boi>" + "<image>" * count + "<eoi>\n\n" + part
    assert marks.written(tokenizer.encode(text), image, counts) == tokenizer.encode(whole)


def test_without_newlines_in_the_vocabulary() -> None:
    assert ImageMarks.of(7, 8, None).written([1, 7, 2], 9, [2]) == [1, 7, 9, 9, 8, 2]
