"""Drafts of a simulated device, right with given probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from quire.simulator.tokens import Streams, uniform
from quire.step import StepPlan, StepResult

DRAFT_TOKENS = 4


@dataclass(frozen=True)
class SimulatedDrafts:
    """Speculation of a simulated engine. chances: probability by place that a draft is right if those before it are;
    the last one holds behind it, too. seconds: time of a step's drafts. Others: see SpeculationConfig."""

    max_drafts: int = 0
    chances: tuple[float, ...] = ()
    seconds: float = 0.0
    adapts: bool = True


NO_DRAFTS = SimulatedDrafts()


class DraftWork:
    """Worker's half of drafts."""

    def __init__(self, drafts: SimulatedDrafts, seed: int) -> None:
        self._drafts, self._seed = drafts, seed
        self._lengths: dict[int, int] = {}

    def seconds(self, plan: StepPlan) -> float:
        return self._drafts.seconds if any(plan.num_drafts) else 0.0

    def result(self, plan: StepPlan, streams: Streams) -> StepResult:
        """Tokens of a plan's samples, and drafts for the next step."""
        lengths = self._lengths
        for seq_id in plan.released:
            lengths.pop(seq_id, None)
        for new in plan.new_sequences:
            lengths[new.seq_id] = len(new.token_ids)
        for fork in plan.forks:
            lengths[fork.child] = lengths[fork.parent]
        result = StepResult(plan.step_id, [], num_drafts=sum(plan.num_drafts))
        for index, (seq_id, source) in enumerate(zip(plan.sample_seq_ids, plan.sample_from, strict=True)):
            if streams.is_beam(seq_id):
                result.token_ids.append([streams.token(seq_id, plan.start_positions[source] + plan.num_tokens[source])])
                continue
            first = lengths[seq_id]
            number = self.accepted(seq_id, first, plan.num_drafts[source]) if plan.num_drafts else 0
            lengths[seq_id] = first + 1 + number
            result.token_ids.append([streams.token(seq_id, first + place) for place in range(1 + number)])
            result.found_drafts[index] = self._drafts.max_drafts
        return result

    def accepted(self, seq_id: int, length: int, num_drafts: int) -> int:
        """Number of right drafts behind a sequence's `length` tokens."""
        chances = self._drafts.chances
        for place in range(num_drafts):
            if uniform(self._seed, seq_id, length + place) > chances[min(place, len(chances) - 1)]:
                return place
        return num_drafts
