from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from quire.errors import UserError

if TYPE_CHECKING:
    from quire.outputs import CompletionOutput

MAX_ANSWER_BYTES = 64 * 2**20
LOGPROB_BYTES = 64
"""Bytes of an alternative at one position in JSON."""
TOKEN_BYTES = 8
"""Bytes of a token's text or id."""


def num_alternatives(wanted: int, vocab_size: int) -> int:
    """Number of a token's alternatives in log-probabilities; -1 means the whole vocabulary."""
    return vocab_size if wanted == -1 else min(wanted, vocab_size)


class AnswerSize:
    """Approximate size of an answer in bytes: `prompt` and `planned` before it runs, `generated` as tokens of a request
    without max_tokens come. Each raises UserError beyond MAX_ANSWER_BYTES. logprobs: alternatives of each token besides
    the chosen one; None: no log-probabilities. is_streamed: output is sent and dropped, and does not count."""

    def __init__(self, *, logprobs: int | None, return_token_ids: bool, is_streamed: bool, num_listed: int = 0) -> None:
        self._bytes_per_token = TOKEN_BYTES * (1 + return_token_ids)
        self._has_logprobs = logprobs is not None
        if logprobs is not None:
            self._bytes_per_token += LOGPROB_BYTES * (logprobs + 1 + num_listed)
        self._is_streamed = is_streamed
        self._known = 0
        self._generated = 0

    def prompt(self, num_tokens: int, num_copies: int, *, num_texts: int, num_entries: int) -> None:
        """Count the prompts' part: `num_copies` choices repeat `num_tokens`, each with `num_texts` texts or ids and
        `num_entries` log-probabilities."""
        self._known += num_copies * num_tokens * (num_texts * TOKEN_BYTES + num_entries * LOGPROB_BYTES)
        if self._known > MAX_ANSWER_BYTES:
            raise _too_heavy(
                self._known,
                f"{num_tokens} prompt tokens x {num_copies} times x ({num_entries} logprobs of {LOGPROB_BYTES} bytes + "
                f"{num_texts} texts or ids of {TOKEN_BYTES} bytes)",
                "fewer prompts, n or alternatives",
            )

    def planned(self, num_sequences: int, max_tokens: int) -> None:
        """Count the most tokens that `num_sequences` may generate, `max_tokens` each. Raises UserError."""
        if self._is_streamed:
            return
        total = self._known + num_sequences * max_tokens * self._bytes_per_token
        if total > MAX_ANSWER_BYTES:
            before = f"{self._known} of the prompts + " if self._known else ""
            raise _too_heavy(
                total,
                f"{before}{num_sequences} sequences x {max_tokens} tokens x {self._bytes_per_token} bytes",
                "a smaller max_tokens, fewer sequences or alternatives, or stream",
            )

    def generated(self, completions: Iterable[CompletionOutput]) -> None:
        """Count generated tokens of a request without max_tokens. Raises UserError."""
        if self._is_streamed:
            return
        self._generated += sum(len(completion.token_ids) for completion in completions) * self._bytes_per_token
        if self._known + self._generated > MAX_ANSWER_BYTES:
            raise _too_heavy(
                self._known + self._generated,
                f"{self._known} of the prompts + {self._generated} generated so far",
                "max_tokens, fewer alternatives, or stream",
            )


def _too_heavy(num_bytes: int, arithmetic: str, remedy: str) -> UserError:
    return UserError(
        f"the answer would have about {num_bytes} bytes, and may have {MAX_ANSWER_BYTES}: {arithmetic}; ask for "
        f"{remedy}",
        param=None,
    )
