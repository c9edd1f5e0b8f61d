"""Engine core's constraints and matchers, computed by the mask process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.decoding.masks import ConstraintSpec, mask_of
from quire.errors import UserError
from quire.structured_output.messages import Advance, Masked, MatcherAnswer, New, Outcome
from quire.structured_output.sequence_state import NO_TOKEN

if TYPE_CHECKING:
    from quire.structured_output.mask_client import MaskClient
    from quire.structured_output.service import ConstraintService

WORK_SECONDS = 5.0
TOKEN_SECONDS = 0.001
"""Processor seconds of a request's tokens and masks: WORK_SECONDS, plus this for each token."""
NO_SLOT = -1
NUM_PLACES = 1024
UNKNOWN, GOES_ON, STOPS = 0, 1, 4


class ConstraintText:
    """Constraint (grammar's text) that live requests share. The last request's end cancels its rehearsal."""

    def __init__(self, service: ConstraintService, text: str, behind: bytearray | None = None) -> None:
        """behind: earlier requests' record of tokens that stop."""
        self._service = service
        self.text = text
        self.outcome: Outcome | None = None
        """None before the rehearsal."""
        self.job = 0
        """Number of the text's rehearsal; 0: none begun."""
        self.behind = bytearray(NUM_PLACES) if behind is None else behind
        """Byte per token id modulo NUM_PLACES: UNKNOWN at first; STOPS if the last such token ended a sequence or
        forced others, less one per later one that did not, at least GOES_ON."""

    def note(self, token_id: int, *, stops: bool) -> None:
        """Record a sampled token in `behind`. stops: the token ended a sequence, or forced others."""
        place = token_id % NUM_PLACES
        self.behind[place] = STOPS if stops else max(self.behind[place] - 1, GOES_ON)

    def __del__(self) -> None:
        if self.job and self.outcome is None:
            self._service.forgotten_jobs.append(self.job)


class RemoteConstraint:
    def __init__(self, service: ConstraintService, text: ConstraintText, client: str, charge: int) -> None:
        self.service = service
        self.text = text
        self.client = client
        self.charge = charge
        self._seconds_left = WORK_SECONDS

    def matcher(self, spec: ConstraintSpec, token_ids: Sequence[int]) -> RemoteMatcher:
        matcher = RemoteMatcher(self.service.masks, self, spec, token_ids)
        self.service.begin(matcher)
        return matcher

    def note_work(self, seconds: float, num_tokens: int) -> None:
        self._seconds_left += TOKEN_SECONDS * num_tokens - seconds

    @property
    def is_exhausted(self) -> bool:
        return self._seconds_left < 0


class RemoteMatcher:
    def __init__(
        self, masks: MaskClient, constraint: RemoteConstraint, spec: ConstraintSpec, token_ids: Sequence[int]
    ) -> None:
        self._masks = masks
        self.constraint = constraint
        self.spec = spec
        self.slot = NO_SLOT
        self.serial = masks.next_serial()
        """Number of the last `advance`, unique among all matchers."""
        self.is_held = True
        """True while the mask process does not know this matcher."""
        self.is_made = False
        """True once the mask process can copy this matcher."""
        self.tokens = list(token_ids)
        """Followed tokens, as far as answered."""
        self.unanswered: tuple[Sequence[int], int, bool, Sequence[int], Sequence[int]] | None = None
        """Arguments of the last `advance`, until it is answered."""
        self._is_answered = self.has_mask = self._is_free = False
        self._only = NO_TOKEN
        self._mask_error: UserError | None = None
        self._own_mask: bytes | None = None
        """Mask of a copy whose original had one."""
        self._draft_slots: list[int] = []
        self._num_draft_masks = 0
        """Number of masks after drafts that are there."""
        self.is_ready = self.is_slow = False
        self.error: UserError | None = None
        self.num_accepted = 0
        self.forced: Sequence[int] = ()
        self.is_finished = self.ends_in_text = False

    def __del__(self) -> None:
        if self.slot != NO_SLOT:
            self._masks.ended_slots.append(self.slot)
        self._masks.ended_slots.extend(self._draft_slots)

    def advance(
        self, token_ids: Sequence[int], num_forced: int, *, with_mask: bool = False, drafts: Sequence[int] = ()
    ) -> None:
        self.serial = self._masks.next_serial()
        places: Sequence[int] = ()
        if drafts:
            while len(self._draft_slots) < len(drafts):
                self._draft_slots.append(self._masks.take_slot(self))
            places = self._draft_slots[: len(drafts)]
        self.unanswered = (token_ids, num_forced, with_mask, drafts, places)
        self.is_ready = self._is_answered = False
        self._forget_mask()
        self._masks.advance(self)

    def goes_on_behind(self, token_id: int) -> bool:
        return self.constraint.text.behind[token_id % NUM_PLACES] == GOES_ON

    def mask(self) -> bytes | None:
        if not self.has_mask:
            self.constraint.service.await_mask(self)
        error = self.error or self._mask_error
        if error is not None:
            raise error
        if self._is_free:
            return None
        if self._only != NO_TOKEN:
            return self.mask_of(self._only)
        return self._own_mask or self._masks.read(self.slot)

    def draft_masks(self) -> list[bytes]:
        return [self._masks.read(slot) for slot in self._draft_slots[: self._num_draft_masks]]

    def mask_of(self, *token_ids: int) -> bytes:
        return mask_of(token_ids, self._masks.num_mask_bytes)

    def copy(self) -> RemoteMatcher:
        found = RemoteMatcher(self._masks, self.constraint, self.spec, self.tokens)
        found.is_ready = found._is_answered = True
        found.is_slow, found.error, found._mask_error = self.is_slow, self.error, self._mask_error
        found.num_accepted, found.forced = self.num_accepted, self.forced
        found.is_finished, found.ends_in_text = self.is_finished, self.ends_in_text
        found._is_free, found._only = self._is_free, self._only
        found.has_mask = self.has_mask
        if self.has_mask and not self._is_free and self._only == NO_TOKEN and not (self.error or self._mask_error):
            found._own_mask = self._own_mask or self._masks.read(self.slot)
        if self.error is None:
            self._masks.copy(found, self, wants_mask=not found.has_all)
        return found

    @property
    def has_all(self) -> bool:
        return self.has_mask and (self._is_answered or self.error is not None)

    def settle(self) -> None:
        self.is_ready = (self._is_answered and not self.is_slow) or self.has_all

    def fail(self, error: UserError) -> None:
        self.error = error
        self.has_mask = True

    def new(self, grammar: int) -> New:
        """Message that makes this matcher in a mask process or its successor. grammar: number there."""
        spec, serial = self.spec, self.serial if self.unanswered is None else 0
        options = spec.start_after, spec.ignore_eos, spec.allowed_token_ids
        return New(self.slot, serial, grammar, self.constraint.charge, self.tokens, *options)

    def advanced(self) -> Advance | None:
        return None if self.unanswered is None else Advance(self.slot, self.serial, *self.unanswered)

    def start_again(self, *, is_suspect: bool) -> None:
        """Forget the masks of a mask process that is gone. is_suspect: this matcher may have ended it."""
        self.is_held, self.is_made = True, False
        if self._own_mask is None:
            self._forget_mask()
        else:
            self._num_draft_masks = 0  # those drafts are not accepted
        if is_suspect:
            self.is_slow = True  # until the mask has come

    def take_answer(self, answer: MatcherAnswer) -> None:
        self.is_made = True
        if not self._is_answered:
            self._is_answered = True
            self.num_accepted, self.forced = answer.num_accepted, answer.forced
            self.is_finished, self.ends_in_text = answer.is_finished, answer.ends_in_text
            if self.unanswered is not None:
                asked = self.unanswered[0]
                self.tokens += asked[: answer.num_accepted]
                self.tokens += answer.forced
                self.unanswered = None
                stops = bool(answer.forced) or answer.is_finished or bool(answer.error)
                self.constraint.text.note(asked[-1], stops=stops)
        self._is_free, self._only = answer.is_free, answer.only
        self.has_mask, self._num_draft_masks = answer.num_draft_masks >= 0, max(0, answer.num_draft_masks)
        self.is_slow = answer.is_slow
        self.constraint.note_work(answer.seconds, answer.num_accepted + len(answer.forced))
        if answer.error:
            self.fail(UserError(answer.error, param="structured_outputs"))
        if answer.mask_error:
            self._fail_mask(answer.mask_error, answer.mask_param)

    def take_mask(self, masked: Masked) -> None:
        self.constraint.note_work(masked.seconds, 0)
        self.has_mask, self._num_draft_masks = True, masked.num_draft_masks
        if masked.error:
            self._fail_mask(masked.error, masked.param)

    def _fail_mask(self, error: str, param: str) -> None:
        self._mask_error = UserError(error, param=param or "structured_outputs")

    def _forget_mask(self) -> None:
        self.has_mask = self._is_free = False
        self._num_draft_masks, self._only = 0, NO_TOKEN
        self._mask_error = self._own_mask = None


def too_much_work() -> UserError:
    return UserError(
        f"the constraint takes too much work: its tokens took more than {WORK_SECONDS:g} s of processor time, "
        "make it simpler",
        param="structured_outputs",
    )
