"""Constraints for tests: which tokens may come next depends on the token before, so that no mask can be made early."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from quire.clock import VirtualClock
from quire.decoding.masks import ConstraintSpec, Matcher, drafts_behind, mask_of
from quire.errors import UserError
from quire.step import Candidates, SamplingInputs, SequenceSampling, StepPlan, StepResult
from tests.fakes.executor import ContractViolationError, FakeExecutor

VOCAB_SIZE = 97
REFUSED = 1000
"""Larger numbers do not compile."""


class AllowedByPosition:
    """A MaskSource. A constraint is a number: at place p, behind token t, every token of which 31 p p + 17 t + token is
    one of its multiples is allowed."""

    def __init__(self, vocab_size: int = VOCAB_SIZE, clock: VirtualClock | None = None) -> None:
        """clock: of the engine."""
        self.vocab_size = vocab_size
        self._clock = clock or VirtualClock()
        self.num_masks = 0
        self.is_prepared = False
        self.tells_forced = True
        """Whether matchers accept tokens that alone may follow."""
        self.compile_waits = 0
        """How often the engine waits before a new matcher answers for the first time."""
        self.answer_waits: Iterator[int] = itertools.repeat(0)
        """The same for each answer behind that."""
        self.mask_waits: Iterator[int] = itertools.repeat(0)
        """The same for each mask behind an answer."""
        self.takes_time = False
        """Whether the clock goes on while the engine waits."""
        self.goes_on = False
        """Whether sequences go ahead of answers, behind tokens that are no multiple of 3."""
        self.is_slow = False
        self.max_tokens: int | None = None
        """Tokens behind which a constraint allows nothing."""
        self.fails_after: int | None = None
        """Tokens behind which a matcher cannot say what may follow."""
        self.clients: list[str] = []
        """The client of each request with a constraint."""
        self._asked: list[NumberMatcher] = []
        self._sent: list[NumberMatcher] = []

    def constraint(self, text: str, client: str = "") -> NumberConstraint:
        if not text.isdigit():
            raise UserError(f"{text!r} is not a number", param="constraint")
        self.clients.append(client)
        return NumberConstraint(self, text)

    def ask(self, matcher: NumberMatcher) -> None:
        self._asked.append(matcher)

    def flush(self) -> None:
        self._sent += self._asked
        self._asked = []

    def wait(self, matchers: Iterable[Matcher], seconds: float) -> None:
        self.wait_answer(seconds)

    def wait_answer(self, seconds: float) -> None:
        for matcher in self._sent:
            if matcher.num_waits >= 0:
                matcher.num_waits -= 1
            else:
                matcher.num_mask_waits -= 1
        self._sent = [matcher for matcher in self._sent if not matcher.has_mask]
        if self._sent and self.takes_time:
            self._clock.advance(seconds)

    def idle(self) -> None:
        self.is_prepared = True

    def close(self) -> None:
        """Nothing is compiled."""

    def is_allowed(self, constraint: str, token_ids: Sequence[int]) -> np.ndarray:
        """[vocab size] bool: the tokens that may follow."""
        previous = token_ids[-1] if token_ids else 0
        return np.asarray(
            (np.arange(self.vocab_size) + 31 * len(token_ids) ** 2 + 17 * previous) % int(constraint) == 0
        )

    def mask(self, constraint: str, token_ids: Sequence[int]) -> bytes:
        self.num_masks += 1
        bits = np.zeros(-(-self.vocab_size // 32) * 32, np.uint8)
        bits[: self.vocab_size] = self.is_allowed(constraint, token_ids)
        return np.packbits(bits, bitorder="little").tobytes()

    def follows(self, constraint: str, token_ids: Sequence[int]) -> bool:
        """Whether every one of these generated tokens was allowed."""
        return all(self.is_allowed(constraint, token_ids[:place])[token] for place, token in enumerate(token_ids))


class NumberConstraint:
    """A Constraint. Numbers above REFUSED do not compile."""

    def __init__(self, source: AllowedByPosition, text: str) -> None:
        self._source = source
        self._text = text

    def matcher(self, spec: ConstraintSpec, token_ids: Sequence[int]) -> NumberMatcher:
        return NumberMatcher(self._source, self._text, spec, list(token_ids))


class NumberMatcher:
    """A Matcher. It ends behind `source.max_tokens` tokens, and has no mask behind `source.fails_after`. What it says
    is read while it is ready, as the protocol has it, or an assertion fails."""

    def __init__(self, source: AllowedByPosition, text: str, spec: ConstraintSpec, token_ids: list[int]) -> None:
        self.spec = spec
        self.num_waits = source.compile_waits
        self.num_mask_waits = -1
        self._source = source
        self._text = text
        self._token_ids = token_ids
        self._num_accepted = len(token_ids)
        self._forced: list[int] = []
        self._drafts: list[int] = []
        source.ask(self)

    @property
    def is_ready(self) -> bool:
        return self.num_waits < 0

    @property
    def is_slow(self) -> bool:
        return self._source.is_slow

    @property
    def has_mask(self) -> bool:
        return self.num_waits < 0 and self.num_mask_waits < 0

    def goes_on_behind(self, token_id: int) -> bool:
        return self._source.goes_on and token_id % 3 > 0

    @property
    def error(self) -> UserError | None:
        assert self.is_ready
        if int(self._text) <= REFUSED:
            return None
        return UserError(f"{self._text} does not compile", param="structured_outputs")

    @property
    def num_accepted(self) -> int:
        assert self.is_ready
        return self._num_accepted

    @property
    def forced(self) -> list[int]:
        assert self.is_ready
        return self._forced

    @property
    def is_finished(self) -> bool:
        assert self.is_ready
        return len(self._token_ids) == self._source.max_tokens

    @property
    def ends_in_text(self) -> bool:
        return self.is_finished

    def advance(
        self, token_ids: Sequence[int], num_forced: int, *, with_mask: bool = False, drafts: Sequence[int] = ()
    ) -> None:
        assert self.is_ready
        self._num_accepted, self._forced = 0, []
        for token_id in token_ids:
            if not self._source.is_allowed(self._text, self._token_ids)[token_id]:
                break
            self._token_ids.append(token_id)
            self._num_accepted += 1
        while self._source.tells_forced and len(self._forced) < num_forced and not self.is_finished:
            allowed = np.flatnonzero(self._source.is_allowed(self._text, self._token_ids))
            if len(allowed) != 1 or len(self._token_ids) == self._source.fails_after:
                break
            self._forced.append(int(allowed[0]))
            self._token_ids.append(int(allowed[0]))
        self._drafts = drafts_behind(self._forced, drafts)
        self.num_waits, self.num_mask_waits = next(self._source.answer_waits), next(self._source.mask_waits) - 1
        self._source.ask(self)

    def mask(self) -> bytes:
        assert self.is_ready
        if len(self._token_ids) == self._source.fails_after:
            raise UserError("no token can come next", param="structured_outputs")
        return self._source.mask(self._text, self._token_ids)

    def draft_masks(self) -> list[bytes]:
        assert self.has_mask
        tokens, masks = list(self._token_ids), list[bytes]()
        for token_id in self._drafts:
            if not self._source.is_allowed(self._text, tokens)[token_id]:
                break
            tokens.append(token_id)
            if len(tokens) in (self._source.max_tokens, self._source.fails_after):
                break
            masks.append(self._source.mask(self._text, tokens))
        return masks

    def mask_of(self, *token_ids: int) -> bytes:
        return mask_of(token_ids, -(-self._source.vocab_size // 32) * 4)

    def copy(self) -> NumberMatcher:
        assert self.is_ready
        found = copy.copy(self)
        found._token_ids = list(self._token_ids)
        return found


class MaskingExecutor(FakeExecutor):
    """A FakeExecutor that samples a plan with masks when they come, and not a moment before: the next allowed token."""

    def __init__(self, *, vocab_size: int = VOCAB_SIZE, **options: Any) -> None:
        super().__init__(vocab_size=vocab_size, **options)
        self._vocab_size = vocab_size
        self._unsent: tuple[StepPlan, Future[StepResult]] | None = None
        self._masks: dict[int, bytes] = {}
        self._draft_masks: dict[int, list[bytes]] = {}
        self._expected: set[int] = set()
        self.num_discarded = 0
        self.ignores_masks = False
        self.num_late_masks = 0
        """Plans whose inputs came after another result was taken."""

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        if self._unsent is not None:
            raise ContractViolationError(f"step {plan.step_id} comes before the masks of {self._unsent[0].step_id}")
        if not plan.masked_samples:
            return super().execute(plan)
        if set(plan.masked_samples) & set(plan.pooled):
            raise ContractViolationError("a mask for a vector")
        if self._record:
            self.plans.append(plan)
        if self.observe is not None:
            self.observe(plan)
        future: Future[StepResult] = Future()
        self._unsent = plan, future
        return future

    def send_sampling_inputs(self, inputs: SamplingInputs) -> None:
        if self._unsent is None or self._unsent[0].step_id != inputs.step_id:
            raise ContractViolationError(f"step {inputs.step_id} awaits no sampling inputs")
        (plan, future), self._unsent = self._unsent, None
        if not inputs.masks.keys() | inputs.draft_masks.keys() <= set(plan.masked_samples):
            raise ContractViolationError(f"masks that step {plan.step_id} has not announced")
        self._expected = set(plan.masked_samples)
        self._masks = {} if self.ignores_masks else inputs.masks
        self._draft_masks = inputs.draft_masks
        try:
            future.set_result(self._run(plan))
        except Exception as error:
            future.set_exception(error)
        self._masks, self._draft_masks, self._expected = {}, {}, set()
        for index in inputs.discarded:
            row = self._row(plan.sample_seq_ids[index])
            row.token_ids.pop()
            row.num_computed = len(row.token_ids) - 1
            del row.chain[row.num_computed :]
            row.rejected.append((self.num_steps, 1))
            self.num_discarded += 1

    def _candidates(self, index: int, sampling: SequenceSampling, num_generated: int, state: int) -> Candidates:
        mask = self._masks.get(index)
        if mask is None:
            return super()._candidates(index, sampling, num_generated, state)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        every = msgspec.structs.replace(sampling, num_candidates=self._vocab_size)
        ranked = super()._candidates(index, every, num_generated, state)
        allowed = [(token, score) for token, score in zip(ranked.token_ids, ranked.scores, strict=True) if bits[token]]
        chosen = allowed[: sampling.num_candidates]
        return Candidates([token for token, _ in chosen], [score for _, score in chosen])

    def _allowed(self, index: int, place: int, token_id: int) -> int:
        mask = self._masks.get(index)
        if place:
            behind = self._draft_masks.get(index, [])
            if place > len(behind) and index in self._expected:
                return -1
            mask = behind[place - 1] if index in self._expected else None
        if not mask:
            return token_id
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        while token_id >= len(bits) or not bits[token_id]:
            token_id = (token_id + 1) % self._vocab_size
        return token_id
