"""The host's copy of a device's texts: it learns a step's tokens when as many others were launched behind as may be in
flight, and follows no row whose tokens it lacks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from quire.worker.finders import NoFinder
from quire.worker.platform.device_text_drafts import HostTexts, SampledTexts, path_length


class Heard(NoFinder):
    """A finder that notes the texts that end."""

    def __init__(self) -> None:
        self.ended: list[list[int]] = []

    def end_text(self, row: int, token_ids: np.ndarray) -> None:
        self.ended.append(token_ids.tolist())


def texts_of(num_unknown: int, *, follows_all: bool = True) -> tuple[HostTexts, Heard]:
    finder = Heard()
    texts = HostTexts(3, 9, finder, num_unknown, follows_all=follows_all)
    begin(texts, 1, [5, 6, 7])
    return texts, finder


def begin(texts: HostTexts, row: int, token_ids: Sequence[int], prediction: Sequence[int] = ()) -> None:
    texts.forget(row)
    texts.write_tokens(row, 0, token_ids)
    texts.begin_text(row, len(token_ids), "", prediction)


def sampled(texts: HostTexts, row: int, tokens: Sequence[int] | None) -> SampledTexts:
    """A step that has sampled `tokens` in a row (None: its result was not read)."""
    step = SampledTexts([0], np.array([row]), texts.owners[[row]], [0, 1], [0])
    step.tokens = None if tokens is None else [tokens]
    return step


def text(texts: HostTexts, row: int) -> list[int]:
    found: list[int] = texts.table[row, : texts.known[row]].tolist()
    return found


@pytest.mark.parametrize("num_unknown", [0, 1, 2])
def test_tokens_come_when_their_step_is_surely_read(num_unknown: int) -> None:
    texts, finder = texts_of(num_unknown)
    lengths = [3, 4, 6, 7]
    for number, tokens in enumerate(([8], [9, 10], [11])):
        texts.unread.append(sampled(texts, 1, tokens))
        texts.learn()
        assert text(texts, 1) == [5, 6, 7, 8, 9, 10, 11][: lengths[max(0, number + 1 - num_unknown)]]
    texts.unread.append(None)  # the next step; the sequence has ended by then
    texts.end_text(1, 7)
    assert finder.ended == [[5, 6, 7, 8, 9, 10, 11][: 7 - max(0, num_unknown - 1)]]
    assert not texts.are_followed[1]


def test_a_row_of_another_sequence_keeps_its_own() -> None:
    texts, _ = texts_of(0)
    texts.unread.append(sampled(texts, 1, [8]))
    begin(texts, 1, [1, 2])
    texts.learn()
    assert text(texts, 1) == [1, 2]
    assert texts.are_followed[1]


def test_rows_with_unknown_tokens_are_not_followed() -> None:
    texts, finder = texts_of(0)
    texts.write_tokens(1, 5, [1])  # tokens 3 and 4 are unknown
    assert not texts.are_followed[1]
    assert text(texts, 1) == [5, 6, 7]
    begin(texts, 0, [1, 2])
    texts.unread.append(sampled(texts, 0, [3]))
    texts.write_tokens(0, 2, [4])  # a beam's token, in place of the sampled one
    assert not texts.are_followed[0]
    texts.learn()
    begin(texts, 0, [1, 2])
    texts.unread.append(sampled(texts, 0, None))
    texts.learn()
    assert not texts.are_followed[0]
    begin(texts, 0, [1] * 8)
    texts.unread.append(sampled(texts, 0, [2, 3]))  # one more than the table holds
    texts.learn()
    assert not texts.are_followed[0]
    texts.end_text(0, 10)
    assert not finder.ended


def test_children_have_the_tokens_that_are_known() -> None:
    texts, _ = texts_of(1)
    texts.unread.append(sampled(texts, 1, [8]))
    for child, count in ((0, 3), (2, 4)):
        texts.forget(child)
        texts.copy_tokens(1, child, count)
        texts.copy_text(1, child, count)
        assert text(texts, child) == [5, 6, 7]
    assert texts.are_followed.tolist() == [True, True, False]
    texts.write_tokens(0, 2, [4])  # forced in place of the last one
    assert text(texts, 0) == [5, 6, 4]


def test_rows_with_a_prediction_alone() -> None:
    texts, _ = texts_of(0, follows_all=False)
    assert not texts.are_followed[1]
    begin(texts, 0, [1], [7, 8])
    assert texts.are_followed[0]


def test_a_path_reaches_behind_the_steps_in_flight() -> None:
    assert [path_length(3, depth) for depth in (1, 2, 4)] == [3, 7, 15]
