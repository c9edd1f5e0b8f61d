"""Masks: which tokens a constrained request may have next.

The engine core gets a `Constraint` from its `MaskSource` when a request comes. While that is being compiled the request
waits (`quire.scheduler.gates.ConstraintGate`). Then each of its sequences has a `Matcher`, which follows its tokens one
by one. When all tokens before the one to be sampled are known, the core asks it for a mask and sends that to the
workers, whose forward pass may run already (`SamplingInputs` in quire/step.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from quire.errors import UserError
from quire.request import Sequence


class ConstraintSpec(NamedTuple):
    """What of a request decides its masks, besides the constraint's text."""

    start_after: SequenceOf[int] = ()
    """The constraint begins behind these generated tokens; empty: at once."""
    ignore_eos: bool = False
    """Tokens that end a text are masked while anything else is allowed."""
    allowed_token_ids: SequenceOf[int] | None = None
    """The sampler allows no others: a mask without any of these leaves no token."""


class Matcher(Protocol):
    """The state of one sequence under its constraint. It belongs to the sequence, and outlives a preemption."""

    is_finished: bool
    """Whether nothing may follow: the sequence ends with reason "stop"."""
    ends_in_text: bool
    """Whether it is finished by a token of the text, and not by one that ends a text."""

    def accept(self, token_id: int) -> bool:
        """Go on by the next token of the sequence. False: the constraint does not allow it, and the token must not
        become the sequence's."""
        ...

    def forced_token(self) -> int | None:
        """The only token that may come next, where that is known without a mask. None: ask for the mask."""
        ...

    def mask(self) -> bytes | None:
        """The tokens that may come next: packed bits, [ceil(vocab size / 32)] little-endian uint32, token t at bit
        t % 32 of word t // 32. None: all. Raises UserError when none may, or when it takes too much work to tell."""
        ...

    def mask_of(self, *token_ids: int) -> bytes:
        """A mask that allows these tokens."""
        ...

    def copy(self) -> Matcher:
        """For another sequence with the same tokens."""
        ...


class Constraint(Protocol):
    """A constraint that is compiled, or is being compiled."""

    @property
    def is_ready(self) -> bool:
        """Whether `matcher` answers at once. Constant time."""
        ...

    def matcher(self, spec: ConstraintSpec, token_ids: SequenceOf[int]) -> Matcher:
        """For a new sequence, which has generated these tokens already. Raises UserError for a constraint that cannot
        be compiled."""
        ...


class MaskSource(Protocol):
    """Knows the constraints that requests name (`EngineRequest.constraint`)."""

    def constraint(self, text: str) -> Constraint:
        """Begin to compile a constraint; returns at once. Raises UserError when a request may not name it."""
        ...

    def prepare(self) -> None:
        """Begin what the first constraint would wait for, while the engine has nothing else to do; returns at once."""
        ...

    def close(self) -> None:
        """Compile nothing more. Idempotent."""
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


def take_forced(sequence: Sequence) -> list[int]:
    """Append the tokens that a sequence's constraint forces behind its last one, which its matcher has accepted, up to
    one that ends the sequence; returns them. No step need sample them: the next one computes them all
    (`StepPlan.appended`). But a step that is in flight and has begun to compute the sequence's last token samples the
    first of them (`Sequence.foreseen`).

    None where the request asks for log-probabilities.
    """
    request, matcher, found = sequence.request, sequence.matcher, list[int]()
    params = request.params
    if matcher is None or params.logprobs is not None or params.ranks_samples:
        return found
    room = sequence.max_total_tokens - len(sequence.token_ids)
    last = sequence.token_ids[-1]
    while len(found) < room and not matcher.is_finished and last not in request.end_token_ids:
        token_id = matcher.forced_token()
        if token_id is None or not matcher.accept(token_id):
            break
        found.append(token_id)
        last = token_id
    if not found:
        return found
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
    """An engine without constraints."""

    def constraint(self, text: str) -> Constraint:
        raise UserError("this engine has no constraints on tokens", param="constraint")

    def prepare(self) -> None:
        """Nothing is prepared."""

    def close(self) -> None:
        """Nothing is compiled."""


NO_MASKS = NoMasks()
