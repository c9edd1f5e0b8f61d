"""Masks: which tokens a constrained request may have next.

The engine core gets a `Constraint` from its `MaskSource` when a request comes, and a `Matcher` of it for each sequence.
Matchers run outside of the core: `advance` sends tokens, the answer comes later (`Matcher.is_ready`). A request waits
at a gate until its matchers have answered for the first time (`quire.scheduler.gates.ConstraintGate`); a running
sequence whose matcher has not answered stays out of the next step. The core sends masks to the workers, whose forward
pass may run already (`SamplingInputs` in quire/step.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from quire.decoding.sequence import Sequence
from quire.errors import UserError


class ConstraintSpec(NamedTuple):
    """Fields of a request that decide its masks, besides the constraint's text."""

    start_after: SequenceOf[int] = ()
    """The constraint begins behind these generated tokens; empty: at once."""
    ignore_eos: bool = False
    """Tokens that end a text are masked while anything else is allowed."""
    allowed_token_ids: SequenceOf[int] | None = None
    """The sampler allows no others: a mask without any of these leaves no token."""


class Matcher(Protocol):
    """The state of one sequence under its constraint. It belongs to the sequence, and outlives a preemption. It costs
    memory elsewhere until the last reference to it is gone.

    All attributes tell about the last answer, and are valid while `is_ready`.
    """

    @property
    def is_ready(self) -> bool:
        """The last `advance` is answered. Changes in `MaskSource.wait` alone."""
        ...

    @property
    def is_slow(self) -> bool:
        """Its masks take so long that no step waits for it."""
        ...

    @property
    def error(self) -> UserError | None:
        """Why the sequence cannot go on: the constraint does not compile, or takes too much work."""
        ...

    @property
    def num_accepted(self) -> int:
        """Tokens of the last `advance` that the constraint allows, from its first one on. Where that is not all of
        them, the next one must not become the sequence's, and the sequence ends."""
        ...

    @property
    def forced(self) -> SequenceOf[int]:
        """Tokens behind those of the last `advance` that alone may follow, which the matcher has accepted."""
        ...

    @property
    def is_finished(self) -> bool:
        """Nothing may follow: the sequence ends with reason "stop"."""
        ...

    @property
    def ends_in_text(self) -> bool:
        """It is finished by a token of the text, and not by one that ends a text."""
        ...

    def advance(
        self,
        token_ids: SequenceOf[int],
        num_forced: int,
        *,
        with_mask: bool = False,
        drafts: SequenceOf[int] = (),
    ) -> None:
        """Go on by the next tokens of the sequence; `MaskSource.flush` sends them. Only while `is_ready`.

        num_forced: forced tokens that the matcher may accept behind them, at most. with_mask: the answer may wait for
        the mask. drafts: guesses of what comes behind `token_ids`: masks behind each are asked for.
        """
        ...

    def goes_on_behind(self, token_id: int) -> bool:
        """Where the constraint's sequences had this token before, nothing was forced behind it and it ended none. May
        be asked at any time."""
        ...

    @property
    def has_mask(self) -> bool:
        """`mask` and `draft_masks` answer at once. False also while its memory of this is behind: ask again after
        `MaskSource.wait`."""
        ...

    def mask(self) -> bytes | None:
        """The tokens that may come next: packed bits, [ceil(vocab size / 32)] little-endian uint32, token t at bit
        t % 32 of word t // 32. None: all. Waits where the mask has not come yet, which is short unless `is_slow`, and
        then `is_ready` tells. Raises UserError when none may, or when it takes too much work to tell."""
        ...

    def draft_masks(self) -> list[bytes]:
        """The masks behind the first drafts that are left behind `forced` (`drafts_behind`), as `mask` has them, empty
        for all tokens: up to the one that does not follow the constraint or ends the text, or for which the matcher has
        no mask. Only while `has_mask`."""
        ...

    def mask_of(self, *token_ids: int) -> bytes:
        """A mask that allows these tokens."""
        ...

    def copy(self) -> Matcher:
        """A matcher for another sequence with the same tokens, with the same answer. Only while `is_ready`."""
        ...


class Constraint(Protocol):
    """The constraint of one request, whose matchers share a limit of work. It is compiled once a matcher is asked
    for, and no longer when it and its matchers are gone."""

    def matcher(self, spec: ConstraintSpec, token_ids: SequenceOf[int]) -> Matcher:
        """A matcher for a new sequence, which has generated these tokens already; returns at once. `flush` sends it. It
        `is_ready` when the constraint is compiled and the tokens are followed."""
        ...


class MaskSource(Protocol):
    """Knows the constraints that requests name (`EngineRequest.constraint`)."""

    def constraint(self, text: str, client: str = "") -> Constraint:
        """The constraint of one request; returns at once. client: constraints of different clients are compiled in
        turns. Raises UserError where it is known that a request may not name it."""
        ...

    def flush(self) -> None:
        """Send what matchers were asked since the last call. Once a step."""
        ...

    def wait(self, matchers: Iterable[Matcher], seconds: float) -> None:
        """Take answers, until all of these matchers are ready, and at most for `seconds`. 0: take those that have
        come."""
        ...

    def wait_answer(self, seconds: float) -> None:
        """Take answers, until one has come, and at most for `seconds`."""
        ...

    def idle(self) -> None:
        """Begin what the first constraint would wait for, and drop what was not used for a while. Called again and
        again while the engine has nothing else to do; returns at once."""
        ...

    def close(self) -> None:
        """Compile nothing more, and end all that runs for it. Idempotent."""
        ...


class Foreseen(NamedTuple):
    """The token that a step in flight will sample, because its mask allows no other."""

    token_id: int
    mask: bytes


def mask_of(token_ids: Iterable[int], num_bytes: int) -> bytes:
    mask = bytearray(num_bytes)
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


def drafts_behind(forced: SequenceOf[int], drafts: SequenceOf[int]) -> list[int]:
    """What is left of drafts behind tokens that are certain: none, where these are others."""
    count = len(forced)
    return list(drafts[count:]) if list(drafts[:count]) == list(forced) else []


def num_forceable(sequence: Sequence) -> int:
    """Tokens that a sequence's constraint may force behind its last one: none where the request asks for
    log-probabilities, which only sampled tokens have, or where that token ends the sequence."""
    params = sequence.request.params
    ends = sequence.token_ids[-1] in sequence.request.end_token_ids
    if ends or params.logprobs is not None or params.ranks_samples:
        return 0
    return sequence.max_total_tokens - len(sequence.token_ids)


def take_forced(sequence: Sequence) -> list[int]:
    """Append the tokens that a sequence's matcher has accepted as the only ones that may follow, up to one that ends
    the sequence; returns them. No step need sample them: the next one computes them all (`StepPlan.appended`). But a
    step that is in flight and has begun to compute the sequence's last token samples the first of them
    (`Sequence.foreseen`).
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
    if sequence.blocks is not None:  # else it was preempted: the workers get all its tokens
        sequence.num_unsent_tokens = num_unsent
    return found


class NoMasks:
    """The mask source of an engine without constraints."""

    def constraint(self, text: str, client: str = "") -> Constraint:
        raise UserError("this engine has no constraints on tokens", param="constraint")

    def flush(self) -> None:
        """There are no matchers."""

    def wait(self, matchers: Iterable[Matcher], seconds: float) -> None:
        """Every matcher (of a thinking budget alone) is ready."""

    def wait_answer(self, seconds: float) -> None:
        """No answers come."""

    def idle(self) -> None:
        """Nothing is prepared or kept."""

    def close(self) -> None:
        """Nothing is compiled."""


NO_MASKS = NoMasks()
