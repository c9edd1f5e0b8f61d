"""Tokens of short steps are sent together: never a first token or an end late, never a token longer than the window."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.clock import VirtualClock
from quire.engine.messages import CallResult, EngineOutputs, RequestRejected
from quire.engine.output_window import FEW_SEQUENCES_SHARE, MANY_SEQUENCES, STATS_SECONDS, OutputWindow
from quire.outputs import RequestTiming, SequenceUpdate
from quire.request import FinishReason
from quire.step import PromptLogprobs, TokenLogprobs

SECONDS = 0.008
STEP_SECONDS = 0.003


def step(number: int, num_sequences: int = MANY_SEQUENCES) -> EngineOutputs:
    """Sequence i gets the token 100 * i + number."""
    return EngineOutputs([SequenceUpdate(f"r{i // 2}", i % 2, [100 * i + number]) for i in range(num_sequences)])


class Run:
    """Steps of `seconds` one after the other, behind one that was sent at time 0."""

    def __init__(self, window_seconds: float = SECONDS) -> None:
        self.clock = VirtualClock()
        self.window = OutputWindow(window_seconds, self.clock)
        assert self.window.joined(step(0), goes_on=True) is not None, "how long a step takes is not known yet"

    def take(self, outputs: EngineOutputs, seconds: float = STEP_SECONDS, *, goes_on: bool = True) -> list[list[int]]:
        """The tokens that are sent, by sequence."""
        self.clock.advance(seconds)
        sent = self.window.joined(outputs, goes_on=goes_on)
        return [] if sent is None else [update.new_token_ids for update in sent.updates]


def tokens(*numbers: int, num_sequences: int = MANY_SEQUENCES) -> list[list[int]]:
    return [[100 * i + number for number in numbers] for i in range(num_sequences)]


def test_tokens_wait_no_longer_than_the_window() -> None:
    run = Run()
    # Ends at 3, 6 and 9 ms: that of 3 would have to wait until 12 if it were held again.
    assert [run.take(step(number)) for number in (1, 2, 3)] == [[], [], tokens(1, 2, 3)]
    assert run.take(step(4), 0.009) == tokens(4), "one step takes longer than the window"
    assert run.take(step(5), 0.009) == tokens(5)
    assert run.take(step(6)) == []
    assert run.window.release()[0].new_token_ids == [6]
    assert run.window.release() == []


@pytest.mark.parametrize(
    ("seconds", "num_sequences", "goes_on"),
    [
        (0.0, MANY_SEQUENCES, True),
        (0.0, 1, True),
        (SECONDS, MANY_SEQUENCES - 1, True),
        (SECONDS, MANY_SEQUENCES, False),
        (SECONDS, 0, True),
    ],
)
def test_steps_that_are_sent_at_once(seconds: float, num_sequences: int, goes_on: bool) -> None:
    run = Run(seconds)
    for number in (1, 2):
        sent = run.take(step(number, num_sequences), goes_on=goes_on)
        assert sent == tokens(number, num_sequences=num_sequences)


@pytest.mark.parametrize("num_sequences", [1, MANY_SEQUENCES - 1])
def test_few_sequences_wait_for_a_share_of_the_window(num_sequences: int) -> None:
    run, seconds = Run(), FEW_SEQUENCES_SHARE * SECONDS / 2.5
    # Their ends are 1, 2 and 3 parts of 2.5 apart: the third would come behind the share.
    sent = [run.take(step(number, num_sequences), seconds) for number in (1, 2, 3)]
    assert sent == [[], [], tokens(1, 2, 3, num_sequences=num_sequences)]


def finish(outputs: EngineOutputs) -> None:
    outputs.updates[3].finish_reason, outputs.updates[3].stop_reason = FinishReason.STOP, 7


def first_token(outputs: EngineOutputs) -> None:
    outputs.updates[3].timing = RequestTiming(0.0, 1.0, 2.0)


def prompt_logprobs(outputs: EngineOutputs) -> None:
    outputs.updates[3].prompt_logprobs = PromptLogprobs(1, [])


def rejection(outputs: EngineOutputs) -> None:
    outputs.rejections.append(RequestRejected("x", "no"))


def result(outputs: EngineOutputs) -> None:
    outputs.results.append(CallResult(1))


@pytest.mark.parametrize("change", [finish, first_token, prompt_logprobs, rejection, result])
def test_news_take_what_is_held_along_at_once(change: Callable[[EngineOutputs], None]) -> None:
    run, news = Run(), step(2)
    change(news)
    assert run.take(step(1)) == []
    assert run.take(news) == tokens(1, 2)


def test_what_is_joined_keeps_everything_else() -> None:
    run, last = Run(), step(3)
    logprobs = [TokenLogprobs([number], [-1.0], 1) for number in (1, 2, 3)]
    timing = RequestTiming(0.0, 1.0, 3.0, can_wait=True)
    for number, outputs in ((1, step(1)), (2, step(2)), (3, last)):
        outputs.updates[5].logprobs = [logprobs[number - 1]]
        outputs.updates[5].timing = timing
        outputs.updates[5].drafts = bytes((3, number))
        if number == 3:
            finish(last)
        run.take(outputs)
    assert (last.updates[3].finish_reason, last.updates[3].stop_reason) == (FinishReason.STOP, 7)
    assert last.updates[5].logprobs == logprobs
    assert last.updates[5].timing is timing
    assert last.updates[5].drafts == bytes((3, 1, 3, 2, 3, 3))


def test_other_sequences_come_behind_those_that_are_held() -> None:
    run, other = Run(), step(2, MANY_SEQUENCES + 2)
    other.updates.reverse()
    assert run.take(step(1)) == []
    other.updates[0].finish_reason = FinishReason.LENGTH
    assert run.take(other) == tokens(1) + tokens(2, num_sequences=MANY_SEQUENCES + 2)[::-1]


def test_statistics_go_with_news_and_now_and_then_with_tokens() -> None:
    clock = VirtualClock()
    window = OutputWindow(0.0, clock)
    assert window.wants_stats(step(0))
    told = []
    for number in range(1, 5):
        clock.advance(STATS_SECONDS / 2)
        told.append(window.wants_stats(step(number)))
    assert told == [False, True, False, True]
    ended = step(5)
    ended.updates[-1].finish_reason = FinishReason.LENGTH
    first = step(5)
    first.updates[0].timing = RequestTiming(0.0, 0.0, 0.0)
    for news in (ended, first, EngineOutputs(), EngineOutputs(step(5).updates, results=[CallResult(0)])):
        assert window.wants_stats(news)
        assert not window.wants_stats(step(6))
