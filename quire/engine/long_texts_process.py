"""The process that tokenises long texts and reads large request bodies. Started by LongTexts (long_texts.py); it ends
with its parent."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Iterator

import msgspec

from quire.engine.long_texts import MAX_REPLY_BYTES, READ_SECONDS, Bytes, Encoded, NotEncoded, Read, Setup, Text, packed
from quire.errors import QuireError, UserError
from quire.tokenization.template_messages import encode_frame, read_frame
from quire.tokenization.tokenizer import Tokenizer, open_tokenizer
from quire.utils.child_process import watch_parent


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return  # the parent ended before it had said what to do
    setup = msgspec.json.decode(line, type=Setup)
    # The parent decides what a signal to all processes of a service means, and ends this one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch_parent(lambda: None)
    connection = socket.socket(fileno=setup.fd)
    tokenizer = open_tokenizer(setup.options, setup.vocab_size)
    assert tokenizer is not None, "the parent has one"
    decoder = msgspec.msgpack.Decoder(Text | Bytes)
    try:
        while (frame := read_frame(connection, MAX_REPLY_BYTES)) is not None:
            connection.sendall(encode_frame(_answer(tokenizer, decoder.decode(frame))))
    except ConnectionError:
        pass  # the parent has ended
    os._exit(0)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Let the system end this process (SIGPROF) once the work has taken `seconds` of processor time. No garbage is
    collected meanwhile: what is made of JSON has no cycles, and each collection would look through all of it."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(tokenizer: Tokenizer, work: Text | Bytes) -> Encoded | Read | NotEncoded:
    try:
        if isinstance(work, Bytes):
            module, _, name = work.reader.partition(":")
            read = getattr(importlib.import_module(module), name)
            with _limited(READ_SECONDS):
                return Read(read(work.argument, work.content))
        with _limited(work.seconds):
            return Encoded(packed(tokenizer.encode(work.text, work.add_special_tokens)))
    except QuireError as error:
        return NotEncoded(str(error), isinstance(error, UserError))
