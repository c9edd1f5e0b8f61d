"""A fork server whose mask process is interrupted for a moment in each mask."""

from __future__ import annotations

import time

from quire.structured_output.fork_server import serve
from quire.structured_output.sequence_state import SequenceState
from quire.tokenization.tokenizer import open_tokenizer

MOMENT = 0.01


def main() -> None:
    write_mask = SequenceState.write_mask

    def late(self: SequenceState, memory: memoryview, address: int) -> None:
        time.sleep(MOMENT)
        write_mask(self, memory, address)

    SequenceState.write_mask = late  # type: ignore[method-assign]
    serve(open_tokenizer)
