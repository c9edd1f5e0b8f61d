"""Tokens of texts for models that pool: pairs in one prompt, and cuts that keep the special tokens."""

from __future__ import annotations

from typing import NamedTuple

from quire.errors import UserError, panics_are_errors
from quire.tokenization.tokenizer import Tokenizer, check_unicode


class PooledTokens(NamedTuple):
    """second_segment: where the tokens of the second type begin; 0: all are of the first."""

    token_ids: list[int]
    second_segment: int


def encode_pooled(tokenizer: Tokenizer, text: str, second: str | None, limit: int | None) -> PooledTokens:
    """The tokens of a text, or of a pair, with the special tokens that the tokenizer puts around them.

    limit: most tokens in all; longer texts lose their ends, of a pair the longer one first (Transformers'
    "longest_first"). None: nothing is cut. Raises UserError for a limit that the special tokens alone exceed.
    """
    if second is None and limit is None:
        return PooledTokens(tokenizer.encode(text), 0)
    texts = [text] if second is None else [text, second]
    for each in texts:
        check_unicode(each)
    backend = tokenizer.backend
    with panics_are_errors("the tokenizer"):
        encodings = backend.encode_batch(texts, add_special_tokens=False)
        if limit is not None:
            room = limit - backend.num_special_tokens_to_add(second is not None)
            if room < 1:
                raise UserError(
                    f"truncate_prompt_tokens ({limit}) leaves no room for the text beside the special tokens",
                    param="truncate_prompt_tokens",
                )
            for encoding, length in zip(encodings, _cut([len(each.ids) for each in encodings], room), strict=True):
                encoding.truncate(length)
        joined = backend.post_process(encodings[0], None if second is None else encodings[1], True)
    types = joined.type_ids
    boundary = types.index(1) if 1 in types else 0
    if boundary and types != [0] * boundary + [1] * (len(types) - boundary):
        raise UserError(f"{tokenizer.name} mixes the types of a pair's tokens, which is not supported", param="prompt")
    return PooledTokens(joined.ids, boundary)


def _cut(lengths: list[int], room: int) -> list[int]:
    """How many tokens of each text are kept: the longer of a pair is cut first, then both alike."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    shorter = min(lengths)
    kept = [shorter, room - shorter]
    if kept[1] < shorter:
        kept = [room // 2, room - room // 2]
    return kept if lengths[0] <= lengths[1] else kept[::-1]
