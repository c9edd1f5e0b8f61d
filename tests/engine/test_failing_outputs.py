"""A request whose output cannot be processed ends alone."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine import output_processor
from quire.engine.messages import Abort
from quire.errors import InternalError
from quire.outputs import CompletionOutput, SequenceUpdate
from quire.step import TokenLogprobs
from quire.tokenization.tokenizer import Tokenizer
from tests.engine.test_output_processor import TOKENIZER, Desk, update
from tests.fakes.panic import Panic


class PanickingTokenizer(Tokenizer):
    """Fails, as a native extension does, at one token."""

    BAD = 77

    def token_text(self, token_id: int) -> str:
        if token_id == self.BAD:
            raise Panic("index out of bounds")
        return super().token_text(token_id)


@pytest.fixture
def panicking() -> Desk:
    desk = Desk(PanickingTokenizer(TOKENIZER.backend))
    for name in ("a", "b", "c"):
        desk.add(name, logprobs=1, n=2, delta=True)
    return desk


def scored(token_id: int, request_id: str, index: int = 0, **fields: Any) -> SequenceUpdate:
    return update([token_id], request_id, index, logprobs=[TokenLogprobs([token_id], [-1.0], 1)], **fields)


def test_a_request_whose_output_cannot_be_processed_ends_alone(panicking: Desk) -> None:
    bad = PanickingTokenizer.BAD
    panicking.feed(scored(65, "b"))
    processed = panicking.feed(scored(66, "a"), scored(67, "b"), scored(bad, "b", 1), scored(68, "b"), scored(69, "c"))
    assert [output.request_id for output in processed.outputs] == ["a", "c"]
    assert processed.aborts == [Abort("b")]
    [failed] = processed.failures
    assert failed.request_id == "b"
    assert "'b' could not be processed: Panic: index out of bounds" in str(failed.error)
    assert "Panic" not in failed.error.summary
    assert isinstance(failed.error.__cause__, Panic)
    assert failed.last.finished
    assert [(each.index, each.token_ids, each.finish_reason) for each in failed.last.outputs] == [
        (0, [], "error"),
        (1, [], "error"),
    ]
    assert panicking.processor.num_unfinished == 2
    assert panicking.feed(scored(66, "b")).outputs == []
    assert panicking.one(scored(66, "a")).outputs[0].token_ids == [66]


def panic(*_arguments: object) -> None:
    raise Panic("index out of bounds")


def test_an_output_that_cannot_be_made_ends_its_request_alone(panicking: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    victims = panicking.processor._requests["a"].sequences
    original = output_processor._SequenceState.delta

    def delta(self: output_processor._SequenceState) -> CompletionOutput:
        if self in victims:
            panic()
        return original(self)

    monkeypatch.setattr(output_processor._SequenceState, "delta", delta)
    processed = panicking.feed(scored(66, "a"), scored(66, "c"))
    assert [output.request_id for output in processed.outputs] == ["c"]
    assert [failed.request_id for failed in processed.failures] == ["a"]


def test_an_abort_whose_output_cannot_be_made_lets_go_all_the_same(
    panicking: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_processor._SequenceState, "mark_finished", panic)
    with pytest.raises(InternalError, match="'a' could not be processed"):
        panicking.processor.abort("a")
    assert panicking.processor.num_unfinished == 2


def test_an_interrupt_is_no_failure_of_a_request(panicking: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(output_processor._RequestState, "take_update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        panicking.feed(scored(66, "a"))
