"""Threads of the mask process: which one does what is left."""

from __future__ import annotations

import socket

import msgspec

from quire.structured_output.mask_memory import MaskMemory, make_memory
from quire.structured_output.mask_process import MaskProcess, Scratch
from quire.structured_output.messages import Done, Grammar, New, Work
from quire.structured_output.sequence_state import MaskShape
from quire.structured_output.vocabulary import make_vocabulary
from quire.tokenization.tokenizer import load_tokenizer
from quire.utils.frames import HEADER, encode_frame
from tests.structured_output.services import ENDS, VOCAB_SIZE

LONG = 1e-3
"""Seconds of a mask that answers do not wait for."""


def test_a_thread_that_was_overtaken_makes_the_mask_while_the_other_one_reads() -> None:
    """The thread that took over waits for a message, and the engine core for the mask: no message comes."""
    core, end = socket.socketpair()
    shape = MaskShape.of(VOCAB_SIZE, ENDS)
    vocabulary = make_vocabulary(load_tokenizer("bundled"), VOCAB_SIZE, ENDS)
    process = MaskProcess(end, MaskMemory(make_memory(), VOCAB_SIZE), vocabulary, shape)
    scratch = Scratch(shape.num_written)
    grammar = Grammar(0, 'start: "a" /[a-z ]{1,50}/', 0.0, LONG)
    news = [New(0, 1, 0, 0, [], [], False, None)]
    core.sendall(encode_frame(Work(4, [], [], [grammar], [], news, [])))
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
