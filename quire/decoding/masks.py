"""Masks: the tokens that a constrained request may have next. A `MaskSource` makes a `Constraint` per request, which
makes a `Matcher` per sequence. Matchers run in another process: `advance` sends tokens, the answer comes later
(`Matcher.is_ready`). A request waits for its first answers at `ConstraintGate`; a running sequence without one stays
out of steps."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from quire.decoding.sequence import Sequence
from quire.errors import UserError


class ConstraintSpec(NamedTuple):
    """Fields of a request that decide its masks, besides the constraint's text. For making a matcher."""

    start_after: SequenceOf[int] = ()
    """The constraint begins after these generated tokens; empty: at once."""
    ignore_eos: bool = False
    """Mask tokens that end a text while anything else is allowed."""
    allowed_token_ids: SequenceOf[int] | None = None
    """Tokens that the sampler allows: a mask without any of them leaves no token."""


class Matcher(Protocol):
    """State of one sequence under its constraint (grammar or thinking budget), kept through preemptions.

    Attributes describe the last answer and are valid while `is_ready`.
    """

    @property
    def is_ready(self) -> bool:
        """True if the last `advance` is answered. Only `MaskSource.wait` changes it."""
        ...

    @property
    def is_slow(self) -> bool:
        """True if its masks take too long for a step to wait for."""
        ...

    @property
    def error(self) -> UserError | None:
        """Reason why the sequence cannot go on: the constraint does not compile, or takes too much work; None: it can.
        The sequence then ends."""
        ...

    @property
    def num_accepted(self) -> int:
        """Number of leading tokens of the last `advance` that the constraint allows. If fewer than all, the sequence
        ends before the next one."""
        ...

    @property
    def forced(self) -> SequenceOf[int]:
        """Tokens accepted after those of the last `advance`, each the only one that the grammar allowed."""
        ...

    @property
    def is_finished(self) -> bool:
        """True if nothing may follow: the sequence ends with reason "stop"."""
        ...

    @property
    def ends_in_text(self) -> bool:
        """True if a token of the text finished it, not an end token."""
        ...

    def advance(
        self,
        token_ids: SequenceOf[int],
        num_forced: int,
        *,
        with_mask: bool = False,
        drafts: SequenceOf[int] = (),
    ) -> None:
        """Advance by the next tokens of the sequence; `MaskSource.flush` sends them. Only while `is_ready`.

        num_forced: most forced tokens that the matcher may accept after them. with_mask: the answer may wait for the
        mask. drafts: guesses of the tokens after `token_ids`; the matcher makes a mask after each.
        """
        ...

    def goes_on_behind(self, token_id: int) -> bool:
        """True if the token occurred in sequences of this constraint and neither ended one nor forced further tokens.
        May be called at any time. The next step need not wait then."""
        ...

    @property
    def has_mask(self) -> bool:
        """True if the mask has come: `mask` and `draft_masks` return at once."""
        ...

    def mask(self) -> bytes | None:
        """Tokens that may come next: packed bits, [ceil(vocab size / 32)] little-endian uint32, token t at bit t % 32
        of word t // 32; None: all. Waits, briefly unless `is_slow`, for a mask that has not come. Raises UserError if
        no token may follow."""
        ...

    def draft_masks(self) -> list[bytes]:
        """Masks after the first drafts that remain after `forced` (`drafts_behind`), in the format of `mask`, empty for
        all tokens. They stop at a draft that violates the constraint, ends the text, or has no mask. Only while
        `has_mask`."""
        ...

    def mask_of(self, *token_ids: int) -> bytes:
        """Packed mask (one bit per token id) that allows exactly these tokens."""
        ...

    def copy(self) -> Matcher:
        """Matcher with the same answer for another sequence with the same tokens. Only while `is_ready`. For forks."""
        ...


class Constraint(Protocol):
    """Constraint of one request, whose matchers share a limit of work. Compiled when first asked for a matcher, and
    dropped with its last matcher."""

    def matcher(self, spec: ConstraintSpec, token_ids: SequenceOf[int]) -> Matcher:
        """Matcher of a new sequence that already has these generated tokens; returns at once. `flush` sends it. It
        `is_ready` when the constraint is compiled and the tokens are followed."""
        ...


class MaskSource(Protocol):
    """Source of the constraints that requests name (`EngineRequest.constraint`). The engine core owns one."""

    def constraint(self, text: str, client: str = "") -> Constraint:
        """Constraint of one request; returns at once. client: clients take turns in compilation. Raises UserError for a
        constraint known to be invalid."""
        ...

    def flush(self) -> None:
        """Send the requests to matchers since the last call. Once a step."""
        ...

    def wait(self, matchers: Iterable[Matcher], seconds: float) -> None:
        """Receive answers until all these matchers are ready, for at most `seconds`. 0: only answers that have come."""
        ...

    def wait_answer(self, seconds: float) -> None:
        """Receive answers until one has come, for at most `seconds`."""
        ...

    def idle(self) -> None:
        """Prepare for the first constraint, and drop constraints not used lately. Called repeatedly while the engine is
        idle; returns at once."""
        ...

    def close(self) -> None:
        """Stop compilation and end its processes. Idempotent."""
        ...


class Foreseen(NamedTuple):
    """Token that a started step will sample, because its mask allows no other. Reported before its sample comes."""

    token_id: int
    mask: bytes


def mask_of(token_ids: Iterable[int], num_bytes: int) -> bytes:
    mask = bytearray(num_bytes)
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


def drafts_behind(forced: SequenceOf[int], drafts: SequenceOf[int]) -> list[int]:
    """The drafts left after the `forced` tokens, which they must begin with; else none."""
    count = len(forced)
    return list(drafts[count:]) if list(drafts[:count]) == list(forced) else []


def num_forceable(sequence: Sequence) -> int:
    """Tokens that a sequence's constraint may force after its last one: 0 if that token ends the sequence, or if the
    request asks for log-probabilities, which only sampled tokens have."""
    params = sequence.request.params
    ends = sequence.token_ids[-1] in sequence.request.end_token_ids
    if ends or params.logprobs is not None or params.ranks_samples:
        return 0
    return sequence.max_total_tokens - len(sequence.token_ids)


def take_forced(sequence: Sequence) -> list[int]:
    """Append and return the tokens that a sequence's matcher has forced, up to one that ends the sequence.

    The next step computes them all (`StepPlan.appended`).
    """
    request, matcher = sequence.request, sequence.matcher
    if matcher is None or not matcher.forced:
        return []
    found = list(matcher.forced)
    for index, token_id in enumerate(found):
        if token_id in request.end_token_ids:
            del found[index + 1 :]
            break
    num_unsent = len(found)
    if sequence.num_pending_tokens:
        assert sequence.num_pending_tokens == 1, "no step is planned before the token before its last one is known"
        sequence.num_pending_tokens = 0
        sequence.foreseen = Foreseen(found[0], matcher.mask_of(found[0]))
        num_unsent -= 1
    sequence.token_ids += found
    if sequence.blocks is not None:  # a preempted sequence sends all its tokens to the workers
        sequence.num_unsent_tokens = num_unsent
    return found


class NoMasks:
    """Mask source of an engine without constraints."""

    def constraint(self, text: str, client: str = "") -> Constraint:
        raise UserError("this engine has no constraints on tokens", param="constraint")

    def flush(self) -> None:
        """Do nothing: there are no matchers."""

    def wait(self, matchers: Iterable[Matcher], seconds: float) -> None:
        """Do nothing: matchers of thinking budgets are always ready."""

    def wait_answer(self, seconds: float) -> None:
        """Do nothing: no answers come."""

    def idle(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


NO_MASKS = NoMasks()
