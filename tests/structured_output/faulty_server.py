"""A fork server whose mask process crashes or hangs at certain tokens of the bundled tokenizer, as a bug of the native
library would have it. Rehearsals see nothing of it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

from quire.structured_output.fork_server import serve
from quire.structured_output.sequence_state import SequenceState
from quire.tokenization.tokenizer import load_tokenizer, open_tokenizer


@cache
def token_of(text: str) -> int:
    [token] = load_tokenizer("bundled").encode(text, add_special_tokens=False)
    return token


def main() -> None:
    """At "!" in the middle of a text the process crashes, at "?" it hangs; behind "#" the mask crashes."""
    crash, hang, crash_at_mask = map(token_of, "!?#")
    accept, write_mask = SequenceState.accept, SequenceState.write_mask
    last: dict[int, int] = {}

    def faulty_accept(self: SequenceState, token_ids: Sequence[int], consume: Any) -> int:
        if crash in token_ids:
            ctypes.string_at(0)
        if hang in token_ids:
            threading.Event().wait()
        last[id(self)] = token_ids[-1] if token_ids else -1
        return accept(self, token_ids, consume)

    def faulty_mask(self: SequenceState, memory: memoryview, address: int) -> None:
        if last.get(id(self)) == crash_at_mask:
            ctypes.string_at(0)
        write_mask(self, memory, address)

    SequenceState.accept = faulty_accept  # type: ignore[method-assign]
    SequenceState.write_mask = faulty_mask  # type: ignore[method-assign]
    serve(open_tokenizer)
