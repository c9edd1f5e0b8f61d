"""Conversion of the engine's log-probabilities to the API's shapes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quire.outputs import Logprob
from quire.server.protocol.chat import ChatLogprob, ChatLogprobs, TopLogprob
from quire.server.protocol.common import PromptLogprob, PromptLogprobs
from quire.server.protocol.completion import CompletionLogprobs
from quire.tokenization.tokenizer import Tokenizer

LOWEST = -9999.0
"""Substitute for minus infinity, which JSON lacks."""

ID_MARK = "token_id:"

Entry = dict[int, Logprob]


class CompletionColumns:
    """Writer of a completion's log-probabilities, four columns, in token order: echoed prompt, then completion, each
    after `begin_text`."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        """as_ids: name tokens by their ids."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._detokenizer = tokenizer.detokenizer()
        self._offset = 0

    def begin_text(self, skip_special_tokens: bool, token_ids_before: Sequence[int]) -> None:
        """skip_special_tokens: setting of the text with the character offsets. token_ids_before: prompt of a
        completion."""
        self._detokenizer = self._tokenizer.detokenizer(skip_special_tokens, token_ids_before)

    def append_tokens(self, token_ids: Sequence[int], entries: Sequence[Entry | None]) -> CompletionLogprobs:
        """Columns of these tokens. An entry is None for a prompt's first token, and for prompt tokens that were not
        computed."""
        columns = CompletionLogprobs()
        for token_id, entry in zip(token_ids, entries, strict=True):
            columns.tokens.append(id_name(token_id) if self._as_ids else self._tokenizer.token_text(token_id))
            columns.token_logprobs.append(None if entry is None else _finite(entry[token_id]))
            columns.top_logprobs.append(None if entry is None else _by_name(entry, self._as_ids))
            columns.text_offset.append(self._offset)
            self._offset += len(self._detokenizer.push(token_id))
        return columns


def chat_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entry],
    num_top: int | None,
    tokenizer: Tokenizer,
    *,
    listed: Collection[int] = (),
    as_ids: bool = False,
) -> ChatLogprobs:
    """Entries of each token: the chosen one, and the `num_top` likeliest (None: all) or the `listed` ones. as_ids: name
    tokens by their ids."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if listed:
            alternatives = {token_id, *listed}
        else:
            alternatives = {alternative for alternative, logprob in entry.items() if logprob.rank is not None}
        told = sorted(alternatives, key=lambda alternative: -entry[alternative].logprob)[: None if listed else num_top]
        top = [TopLogprob(*_chat_fields(alternative, entry, tokenizer, as_ids)) for alternative in told]
        content.append(ChatLogprob(*_chat_fields(token_id, entry, tokenizer, as_ids), top))
    return ChatLogprobs(content)


def limited(entries: Sequence[Entry | None] | None, num_top: int) -> list[Entry | None]:
    """Limit entries to the chosen token (the first) and the `num_top` likeliest (-1: all)."""
    return [
        None
        if entry is None
        else {
            token_id: logprob
            for number, (token_id, logprob) in enumerate(entry.items())
            if number == 0 or num_top == -1 or (logprob.rank or 0) <= num_top
        }
        for entry in entries or ()
    ]


def prompt_logprobs(entries: Sequence[Entry | None] | None) -> PromptLogprobs | None:
    """vLLM's shape: a table for each prompt token, from token id to log-probability, rank and text; null for the first.
    None: not asked."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            token_id: PromptLogprob(_finite(logprob), logprob.rank, logprob.decoded_token)
            for token_id, logprob in entry.items()
        }
        for entry in entries
    ]


def id_name(token_id: int) -> str:
    """vLLM's name of a token that its text may not identify."""
    return f"{ID_MARK}{token_id}"


def _by_name(entry: Entry, as_ids: bool) -> dict[str, float]:
    """Chosen token (the entry's first), then the likeliest. Of tokens with equal text (pieces of a character), the
    likelier counts."""
    table: dict[str, float] = {}
    chosen, *others = entry.items()
    for token_id, logprob in (chosen, *sorted(others, key=lambda pair: -pair[1].logprob)):
        name = id_name(token_id) if as_ids else _text(logprob)
        table[name] = max(table.get(name, LOWEST), _finite(logprob))
    return table


def _text(logprob: Logprob) -> str:
    return logprob.decoded_token or ""


def _chat_fields(token_id: int, entry: Entry, tokenizer: Tokenizer, as_ids: bool) -> tuple[str, float, list[int]]:
    """Return name, log-probability and bytes: only bytes can show a part of a character."""
    name = id_name(token_id) if as_ids else _text(entry[token_id])
    return name, _finite(entry[token_id]), list(tokenizer.token_bytes(token_id))


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)
