"""A fork server whose mask process ends at once."""

from __future__ import annotations

import os

from quire.structured_output import fork_server
from quire.tokenization.tokenizer import open_tokenizer


def main() -> None:
    vars(fork_server)["serve_masks"] = lambda *_: os._exit(1)
    fork_server.serve(open_tokenizer)
