"""Threads of the mask process: which one does what is left."""

from __future__ import annotations

import math
import socket

import msgspec
import pytest

from quire.structured_output import mask_process
from quire.structured_output.mask_memory import BOARD_BYTES, Busy, MaskMemory, MaskScratch, make_memory
from quire.structured_output.mask_process import SLOW_SECONDS, SLOW_THREAD, Compiled, MaskProcess, consume_here
from quire.structured_output.messages import Advance, Done, Grammar, MaskWork, MatcherAnswer, New
from quire.structured_output.sequence_state import MaskShape, SequenceState
from quire.structured_output.vocabulary import make_vocabulary
from quire.tokenization.tokenizer import load_tokenizer
from quire.utils.frames import HEADER, encode_frame
from tests.structured_output.services import ENDS, VOCAB_SIZE

LONG = 1e-3
"""Seconds of a mask that answers do not wait for."""


def test_a_thread_that_was_overtaken_makes_the_mask_while_the_other_one_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that took over waits for a message, and the engine core for the mask: no message comes."""
    monkeypatch.setattr(mask_process, "IDLE_SECONDS", math.inf)  # no thread falls asleep, which no other one would wake
    core, end = socket.socketpair()
    shape = MaskShape.of(VOCAB_SIZE, ENDS)
    vocabulary = make_vocabulary(load_tokenizer("bundled"), VOCAB_SIZE, ENDS)
    process = MaskProcess(end, MaskMemory(make_memory(), VOCAB_SIZE), vocabulary, shape)
    scratch = MaskScratch(shape.num_written)
    grammar = Grammar(0, 'start: "a" /[a-z ]{1,50}/', 0.0, LONG)
    news = [New(0, 1, 0, 0, [], [], False, None)]
    core.sendall(encode_frame(MaskWork(4, [], [], [grammar], [], news, [])))
    process._turn(0, scratch)
    process._leader = 1  # it took over while this one was held up, and reads
    for _ in range(2):
        process._turn(0, scratch)
    core.settimeout(10)
    data, decoder = b"", msgspec.msgpack.Decoder(Done)
    found: list[Done] = []
    while not any(done.masks for done in found):
        data += core.recv(2**16)
        while len(data) >= HEADER.size and len(data) >= HEADER.size + HEADER.unpack_from(data)[0]:
            size = HEADER.size + HEADER.unpack_from(data)[0]
            found.append(decoder.decode(data[HEADER.size : size]))
            data = data[size:]
    assert [answer.error for done in found for answer in done.answers] == [""]
    core.close()
    end.close()


@pytest.mark.parametrize(
    ("mark", "drafts", "count"),
    [
        ([], "bca", 3),
        ([], "bxa", 1),  # a draft that does not follow
        ([], "bcad", 3),  # one that ends the text
        (["a", "b"], "bbca", 4),  # the constraint begins behind the first draft
    ],
)
def test_masks_behind_drafts(mark: list[str], drafts: str, count: int) -> None:
    """They are those that the sequence gets when it has these tokens; the sequence itself stays where it is."""
    tokenizer = load_tokenizer("bundled")
    core, end = socket.socketpair()
    shape, memory = MaskShape.of(VOCAB_SIZE, ENDS), MaskMemory(make_memory(), VOCAB_SIZE)
    process = MaskProcess(end, memory, make_vocabulary(tokenizer, VOCAB_SIZE, ENDS), shape)
    scratch = MaskScratch(shape.num_written)
    ids = [tokenizer.encode(each)[-1] for each in ("a", *drafts)]
    grammar = Grammar(0, "start: /[abc]{2,4}d?/" if mark else "start: /[abc]{4}d/", 0.0, 0.0)
    new = New(0, 1, 0, 0, [], [tokenizer.encode(each)[-1] for each in mark], False, None)
    advance = Advance(0, 2, ids[:1], 0, True, ids[1:], [5, 6, 7, 8][: len(drafts)])
    core.sendall(encode_frame(MaskWork(16, [], [], [grammar], [], [new], [advance])))
    while not process._slots or process._firsts or process._masks:
        process._turn(0, scratch)
    core.settimeout(10)
    found = list[Done]()
    while not any(answer.serial == 2 for done in found for answer in done.answers):
        data = core.recv(2**16)
        while data:
            size = HEADER.size + HEADER.unpack_from(data)[0]
            found.append(msgspec.msgpack.decode(data[HEADER.size : size], type=Done))
            data = data[size:]
    [answer] = [answer for done in found for answer in done.answers if answer.serial == 2]
    assert (answer.num_accepted, answer.num_draft_masks) == (1, count)
    state = SequenceState(Compiled(grammar).start(process._vocabulary), shape, new.mark)
    state.accept(ids[:1], consume_here)
    for token_id, slot in zip(ids[1 : 1 + count], (5, 6, 7, 8), strict=False):
        state.accept([token_id], consume_here)
        state.write_mask(scratch.view, scratch.address)
        assert memory.read(slot, shape.num_bytes) == bytes(scratch.view[: shape.num_bytes])
    core.close()
    end.close()


@pytest.mark.parametrize("num_messages", [1, 2])
@pytest.mark.parametrize("grammar", ["start: /[abc]{2,4}/", "start: nothing"])
def test_tokens_wait_for_a_matcher_that_starts_slowly(grammar: str, num_messages: int) -> None:
    """A process that replaces another gets both at once; a grammar that fails gives its own reason."""
    tokenizer = load_tokenizer("bundled")
    core, end = socket.socketpair()
    shape, memory = MaskShape.of(VOCAB_SIZE, ENDS), MaskMemory(make_memory(), VOCAB_SIZE)
    process = MaskProcess(end, memory, make_vocabulary(tokenizer, VOCAB_SIZE, ENDS), shape)
    scratch = MaskScratch(shape.num_written)
    news = [New(0, 1, 0, 0, [], [], False, None)]
    advances = [Advance(0, 2, [tokenizer.encode("b")[-1]], 0, False, [], [])]
    work = MaskWork(4, [], [], [Grammar(0, grammar, 10 * SLOW_SECONDS, 0.0)], [], news, [])
    if num_messages == 1:
        work.advances = advances
        core.sendall(encode_frame(work))
    else:
        core.sendall(encode_frame(work) + encode_frame(MaskWork(4, [], [], [], [], [], advances)))
    process._turn(0, scratch)
    assert not process._firsts
    assert not process._masks
    for _ in range(2):
        process._slow_turn(SLOW_THREAD, scratch)
    core.settimeout(10)
    answers = list[MatcherAnswer]()
    data = b""
    while len(answers) < 2:
        data += core.recv(2**16)
        while data:
            size = HEADER.size + HEADER.unpack_from(data)[0]
            answers += msgspec.msgpack.decode(data[HEADER.size : size], type=Done).answers
            data = data[size:]
    assert [answer.serial for answer in answers] == [1, 2]
    if grammar == "start: nothing":
        assert "nothing" in answers[0].error
        assert answers[1].error == answers[0].error
    else:
        assert [(answer.error, answer.num_accepted) for answer in answers] == [("", 0), ("", 1)]
    core.close()
    end.close()


def test_work_on_the_board_is_one_word() -> None:
    """The engine core reads it at any time: a beginning of other work would make it a hang."""
    board = MaskMemory(make_memory(), VOCAB_SIZE)
    before = board._map[:BOARD_BYTES]
    board.note_work(1, 5, 12.5)
    assert {place // 8 for place in range(BOARD_BYTES) if board._map[place] != before[place]} == {1}
    assert board.busy(3) == [Busy(5, 12.5)]
    board.note_work(1, -1, 0.0)
    assert board.busy(3) == []
    assert board._map[:BOARD_BYTES] == before
    board.close()
