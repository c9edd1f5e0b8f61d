"""Limit on a model's thoughts: at it, their end mark is forced. A constraint (quire/decoding/masks.py) around the
request's own, if any.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence

from quire.decoding.masks import Constraint, ConstraintSpec, Matcher, drafts_behind, mask_of
from quire.errors import UserError
from quire.sampling_params import ThinkingBudget


class BudgetConstraint:
    """Constraint of a request with a limit of thinking tokens, around its own constraint. inner: request's own; None:
    it has none."""

    def __init__(self, inner: Constraint | None, budget: ThinkingBudget, vocab_size: int) -> None:
        self._inner = inner
        self._budget = budget
        self._num_bytes = 4 * -(-vocab_size // 32)

    def matcher(self, spec: ConstraintSpec, token_ids: Sequence[int]) -> BudgetMatcher:
        inner = None if self._inner is None else self._inner.matcher(spec, token_ids)
        matcher = BudgetMatcher(inner, self._budget, self._num_bytes)
        for token_id in token_ids:
            matcher.follow(token_id)
        return matcher


class BudgetMatcher:
    """Matcher that forces the end of a sequence's thoughts once they have a number of tokens."""

    def __init__(self, inner: Matcher | None, budget: ThinkingBudget, num_bytes: int) -> None:
        """Matcher around the request's constraint (None: none). num_bytes: size of a mask."""
        self._inner = inner
        self._budget = budget
        self._num_bytes = num_bytes
        self._is_thinking = budget.is_open
        self._num_thought = 0
        self._recent: deque[int] = deque(maxlen=max(map(len, budget.starts + budget.ends)))
        self._forced: list[int] = []
        """Rest of the end mark, once the budget is used up."""
        self._num_asked = 0
        """Number of tokens that the last `advance` was given."""
        self._own: list[int] = []
        """End mark's tokens forced behind those."""
        self._num_followed = 0
        """Tokens forced by the inner matcher after those, which count for the budget."""
        self._drafts: list[int] = []
        """Drafts to be masked behind the forced tokens."""
        self._check()

    @property
    def is_ready(self) -> bool:
        return self._inner is None or self._inner.is_ready

    @property
    def is_slow(self) -> bool:
        return self._inner is not None and self._inner.is_slow

    @property
    def error(self) -> UserError | None:
        return None if self._inner is None else self._inner.error

    @property
    def num_accepted(self) -> int:
        return self._num_asked if self._inner is None else min(self._inner.num_accepted, self._num_asked)

    @property
    def forced(self) -> Sequence[int]:
        self._follow_inner()
        return self._own if self._inner is None else [*self._own, *self._inner.forced]

    @property
    def is_finished(self) -> bool:
        return self._inner is not None and self._inner.is_finished

    @property
    def ends_in_text(self) -> bool:
        return self._inner is not None and self._inner.ends_in_text

    def advance(
        self, token_ids: Sequence[int], num_forced: int, *, with_mask: bool = False, drafts: Sequence[int] = ()
    ) -> None:
        self._follow_inner()
        self._num_asked, self._own, self._num_followed = len(token_ids), [], 0
        for token_id in token_ids:
            self.follow(token_id)
        # Around a constraint the mask brings the mark: only where the constraint allows it.
        while self._inner is None and self._forced and len(self._own) < num_forced:
            self._own.append(self._forced[0])
            self.follow(self._own[-1])
        self._drafts = drafts_behind(self._own, drafts)
        if self._inner is not None:
            # Count tokens one by one: the budget may end inside the tokens that the inner constraint forces.
            num_left = 0 if self._is_thinking else num_forced - len(self._own)
            asked = [*token_ids, *self._own]
            self._inner.advance(asked, num_left, with_mask=with_mask, drafts=self._drafts)

    def follow(self, token_id: int) -> None:
        if self._forced[:1] == [token_id]:
            self._forced = self._forced[1:]
            self._is_thinking = bool(self._forced)
            if not self._is_thinking:
                self._recent.clear()
            return
        if 0 < len(self._forced) < len(self._budget.ends[0]):  # the constraint takes the mark for other text
            self._forced, self._is_thinking = [], False
        self._recent.append(token_id)
        if self._is_thinking:
            self._num_thought += 1
            if self._ending(self._budget.ends):
                self._forced, self._is_thinking = [], False
            elif self._num_thought == self._ending(self._budget.starts):
                self._num_thought = 0  # the model repeats the start mark of thoughts that the prompt opened
            self._check()
        elif self._ending(self._budget.starts):
            self._is_thinking, self._num_thought = True, 0
            self._check()

    def goes_on_behind(self, token_id: int) -> bool:
        return self._inner is None or self._inner.goes_on_behind(token_id)

    @property
    def has_mask(self) -> bool:
        return self._inner is None or self._inner.has_mask

    def mask(self) -> bytes | None:
        self._follow_inner()
        return self._narrowed(None if self._inner is None else self._inner.mask())

    def draft_masks(self) -> list[bytes]:
        self._follow_inner()
        drafts, inner = self._drafts, None
        if self._inner is not None:
            drafts, inner = drafts_behind(self._inner.forced, drafts), self._inner.draft_masks()
        budget = self._alone()
        masks = []
        for token_id, mask in zip(drafts, [b""] * len(drafts) if inner is None else inner, strict=False):
            budget.follow(token_id)
            narrowed = budget._narrowed(mask or None)
            masks.append(b"" if narrowed is None else narrowed)
        return masks

    def _narrowed(self, mask: bytes | None) -> bytes | None:
        """Mask of the end mark's next token, if it is due and `mask` (None: all tokens) allows it; else `mask`."""
        token_id = self._forced[0] if self._forced else -1
        is_allowed = token_id >= 0 and (mask is None or bool(mask[token_id // 8] >> token_id % 8 & 1))
        return self.mask_of(token_id) if is_allowed else mask

    def mask_of(self, *token_ids: int) -> bytes:
        return mask_of(token_ids, self._num_bytes)

    def copy(self) -> BudgetMatcher:
        found = self._alone()
        found._inner = None if self._inner is None else self._inner.copy()
        return found

    def _alone(self) -> BudgetMatcher:
        found = copy.copy(self)
        found._inner, found._drafts = None, []
        found._recent, found._own = self._recent.copy(), list(self._own)
        return found

    def _follow_inner(self) -> None:
        if self._inner is not None:
            forced = self._inner.forced[self._num_followed :]
            self._num_followed += len(forced)
            for token_id in forced:
                self.follow(token_id)

    def _check(self) -> None:
        if self._is_thinking and self._num_thought >= self._budget.num_tokens:
            self._forced = list(self._budget.ends[0])

    def _ending(self, marks: list[list[int]]) -> int:
        """Length of the mark that the last tokens are; 0: none."""
        recent = self._recent
        found = (mark for mark in marks if recent[-1] == mark[-1] and list(recent)[-len(mark) :] == mark)
        return len(next(found, []))
