"""A fork server whose mask process takes every sequence for a slow one."""

from __future__ import annotations

from quire.structured_output import mask_process
from quire.structured_output.fork_server import serve
from quire.tokenization.tokenizer import open_tokenizer


def main() -> None:
    mask_process.SLOW_SECONDS = -1.0
    serve(open_tokenizer)
