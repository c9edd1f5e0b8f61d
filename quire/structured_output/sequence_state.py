"""State of one sequence under its constraint, in the mask process."""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.errors import UserError
from quire.structured_output.mask_memory import num_mask_bytes, num_slot_bytes
from quire.structured_output.rehearsal import in_one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

    Consume = Callable[[LLMatcher, int], bool]

NO_TOKEN = -1
NOT_ALLOWED = re.compile(r"""Parser Error: token "(?:[^"\\]|\\.)*" doesn't satisfy the grammar; """)
"""Beginning of the library's message for a token not allowed. There is no code for it; `validate_tokens` takes as long
as the token."""
TOKENS_A_MASK = 8
"""Tokens without a mask after which one is made."""


class MaskShape(NamedTuple):
    """Shape of a model's masks. num_bytes: bytes of a mask. num_written: bytes that the library writes, perhaps a word
    more. end_bits: tokens that end a text, as bits of an integer. end_places: (byte in a mask, bit) of each."""

    num_bytes: int
    num_written: int
    end_bits: int
    end_places: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, vocab_size: int, end_ids: Sequence[int]) -> MaskShape:
        """end_ids: the model's end tokens; without one, a token after its vocabulary ends texts (`make_vocabulary`)."""
        num_bytes = num_mask_bytes(vocab_size)
        places = [(each // 8, 1 << each % 8) for each in end_ids]
        return cls(num_bytes, num_bytes if end_ids else num_slot_bytes(vocab_size), bits(end_ids), places)


class SequenceState:
    """Follows one sequence's tokens in its grammar. Results depend on the tokens alone, not on their grouping."""

    def __init__(
        self,
        state: LLMatcher,
        shape: MaskShape,
        mark: Sequence[int] = (),
        ignore_eos: bool = False,
        allowed: Sequence[int] | None = None,
    ) -> None:
        """state: at the grammar's start, owned by this object. Others: see ConstraintSpec."""
        self._state = state
        self._shape = shape
        self._mark = list(mark)
        self._recent: deque[int] = deque(maxlen=len(self._mark))
        self._held_back = shape.end_bits if ignore_eos else 0
        self._allowed = None if allowed is None else bits(allowed)
        self._certain: deque[int] = deque()
        """Only tokens that may follow."""
        self._is_certainty_known = False
        self._num_unmasked = TOKENS_A_MASK
        self.is_finished = self.ends_in_text = False

    @property
    def is_free(self) -> bool:
        """True before the constraint begins: every token is allowed."""
        return bool(self._mark)

    @property
    def failure(self) -> str:
        """Reason why the library has failed; empty: it has not, or the last token was not allowed."""
        reason = self._state.get_error() if self._state.is_error() else ""
        return "" if NOT_ALLOWED.match(reason) else in_one_line(reason)

    def accept(self, token_ids: Sequence[int], consume: Consume) -> int:
        """Follow tokens as far as allowed; returns their number."""
        for number, token_id in enumerate(token_ids):
            if not self._accept_one(token_id, consume):
                return number
        return len(token_ids)

    def take_forced(self, limit: int, consume: Consume) -> list[int]:
        """Follow and return at most `limit` forced tokens."""
        found: list[int] = []
        while len(found) < limit and (token_id := self.certain_token()) != NO_TOKEN:
            if not self.may_take(token_id):
                break
            if not self._accept_one(token_id, consume):
                break
            found.append(token_id)
        return found

    def certain_token(self) -> int:
        """Only possible next token; NO_TOKEN: there are several, or the mask decides."""
        if self._mark or self.is_finished:
            return NO_TOKEN
        if not self._certain and not self._is_certainty_known:
            self._certain.extend(self._state.compute_ff_tokens())
            self._is_certainty_known = True
        return self._certain[0] if self._certain else NO_TOKEN

    def write_mask(self, memory: memoryview, address: int) -> None:
        """Write the next token's mask to `memory`, which is at `address`. Raises UserError."""
        state, shape = self._state, self._shape
        if self.is_free:
            memory[: shape.num_bytes] = b"\xff" * shape.num_bytes
            return
        if (token_id := self.certain_token()) != NO_TOKEN:
            memory[: shape.num_bytes] = self._narrowed(1 << token_id).to_bytes(shape.num_bytes, "little")
            return
        state.unsafe_compute_mask_ptr(address, shape.num_written)
        self._num_unmasked = 0
        if state.is_error():
            raise unusable(state.get_error())
        if self._allowed is not None or (self._held_back and self._allows_end(memory)):
            mask = self._narrowed(int.from_bytes(memory[: shape.num_bytes], "little"))
            memory[: shape.num_bytes] = mask.to_bytes(shape.num_bytes, "little")

    def _allows_end(self, memory: memoryview) -> bool:
        return any(memory[place] & bit for place, bit in self._shape.end_places)

    def may_take(self, token_id: int) -> bool:
        return self._allowed is None or bool(self._allowed >> token_id & 1)

    def _narrowed(self, mask: int) -> int:
        """Mask restricted by the request's other fields. Raises UserError if no token is left."""
        mask = mask & ~self._held_back or mask
        if self._allowed is not None and not mask & self._allowed:
            raise UserError(
                "no token of allowed_token_ids can come next under the constraint of structured_outputs",
                param="allowed_token_ids",
            )
        return mask

    def copy(self) -> SequenceState:
        found = copy.copy(self)
        found._state = self._state.deep_copy()
        found._recent, found._certain = self._recent.copy(), self._certain.copy()
        return found

    def _accept_one(self, token_id: int, consume: Consume) -> bool:
        if self._mark:
            self._recent.append(token_id)
            if list(self._recent) == self._mark:
                self._mark = []
            return True
        if self.is_finished:
            return False
        certain = self.certain_token()
        self._num_unmasked += 1
        if certain == NO_TOKEN and self._num_unmasked > TOKENS_A_MASK:
            self._state.compute_bitmask()  # which gives the lexer STEP_FUEL
            self._num_unmasked = 0
        if not consume(self._state, token_id):
            return False
        if certain == token_id:
            self._certain.popleft()
            self._is_certainty_known = bool(self._certain)
        else:
            self._certain.clear()
            self._is_certainty_known = False
        state = self._state
        if state.is_stopped() and not state.is_error():
            self.is_finished, self.ends_in_text = True, state.stop_reason() != "EndOfSentence"
        return True


def bits(token_ids: Sequence[int]) -> int:
    found = bytearray(max(token_ids, default=0) // 8 + 1)
    for token_id in token_ids:
        found[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(found, "little")


def unusable(reason: str) -> UserError:
    return UserError(
        f"the constraint of structured_outputs cannot be followed: {in_one_line(reason)}", param="structured_outputs"
    )
