"""A limit on the tokens that a model thinks: when they are used up, the mark that ends the thoughts is forced.

It is a constraint like others (quire/decoding/masks.py), around the one that the request may have besides: while the
mark is forced, one token is allowed.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence

from quire.decoding.masks import Constraint, ConstraintSpec, Matcher, mask_of
from quire.sampling_params import ThinkingBudget


class BudgetConstraint:
    """Implements Constraint. inner: the request's own; None: it has none."""

    def __init__(self, inner: Constraint | None, budget: ThinkingBudget, vocab_size: int) -> None:
        self._inner = inner
        self._budget = budget
        self._num_bytes = 4 * -(-vocab_size // 32)

    @property
    def is_ready(self) -> bool:
        return self._inner is None or self._inner.is_ready

    def matcher(self, spec: ConstraintSpec, token_ids: Sequence[int]) -> BudgetMatcher:
        inner = None if self._inner is None else self._inner.matcher(spec, token_ids)
        matcher = BudgetMatcher(inner, self._budget, self._num_bytes)
        for token_id in token_ids:
            matcher.follow(token_id)
        return matcher


class BudgetMatcher:
    """Implements Matcher."""

    def __init__(self, inner: Matcher | None, budget: ThinkingBudget, num_bytes: int) -> None:
        """num_bytes: of a mask."""
        self.is_finished = self.ends_in_text = False
        self._inner = inner
        self._budget = budget
        self._num_bytes = num_bytes
        self._is_thinking = budget.is_open
        self._num_thought = 0
        self._recent: deque[int] = deque(maxlen=max(len(budget.start), len(budget.end)))
        self._forced: list[int] = []
        """What is left of the mark that ends the thoughts, once the budget is used up."""
        self._check()

    def accept(self, token_id: int) -> bool:
        inner = self._inner
        if inner is not None:
            if not inner.accept(token_id):
                return False
            self.is_finished, self.ends_in_text = inner.is_finished, inner.ends_in_text
        self.follow(token_id)
        return True

    def follow(self, token_id: int) -> None:
        """Go on by a token, as far as the budget is concerned."""
        if self._forced:
            self._forced = self._forced[1:]
            self._is_thinking = bool(self._forced)
            self._recent.clear()
            return
        self._recent.append(token_id)
        if self._is_thinking:
            self._num_thought += 1
            if self._ends_with(self._budget.end):
                self._is_thinking = False
            elif self._num_thought == len(self._budget.start) and self._ends_with(self._budget.start):
                self._num_thought = 0  # the prompt left it open, and the model opens it once more
            self._check()
        elif self._ends_with(self._budget.start):
            self._is_thinking, self._num_thought = True, 0
            self._check()

    def forced_token(self) -> int | None:
        if self._forced:
            return self._forced[0]
        return None if self._inner is None else self._inner.forced_token()

    def mask(self) -> bytes | None:
        if self._forced:
            return self.mask_of(self._forced[0])
        return None if self._inner is None else self._inner.mask()

    def mask_of(self, *token_ids: int) -> bytes:
        return mask_of(token_ids, self._num_bytes)

    def copy(self) -> BudgetMatcher:
        found = copy.copy(self)
        found._inner = None if self._inner is None else self._inner.copy()
        found._recent = self._recent.copy()
        return found

    def _check(self) -> None:
        if self._is_thinking and self._num_thought >= self._budget.num_tokens:
            self._forced = list(self._budget.end)

    def _ends_with(self, mark: list[int]) -> bool:
        return self._recent[-1] == mark[-1] and list(self._recent)[-len(mark) :] == mark
