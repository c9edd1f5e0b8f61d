"""An executor that notes what each step computed and when, around the one that computes it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from benchmarks.gpu.limits import Work
from benchmarks.gpu.shapes import Shape
from quire.config.engine import EngineConfig
from quire.engine.client import DEFAULT_EXECUTOR
from quire.step import StepPlan, StepResult


@dataclass(slots=True)
class Step:
    """num_tokens: new ones, of num_seqs sequences. num_sampled: rows of logits. kv_tokens: whose keys and values are
    read. num_pairs: of a new token with one that it sees. launched, finished: seconds of a clock of the host.
    launching, waiting: seconds that the host spent in launching the step and in waiting for its result."""

    num_tokens: int
    num_seqs: int
    num_sampled: int
    kv_tokens: int
    num_pairs: float
    launched: float
    finished: float = 0.0
    launching: float = 0.0
    waiting: float = 0.0

    @property
    def is_decode(self) -> bool:
        """Every sequence computes one token and gets one."""
        return self.num_tokens == self.num_seqs == self.num_sampled

    @classmethod
    def of_plan(cls, plan: StepPlan, now: float) -> Step:
        starts = np.array(plan.start_positions, np.int64)
        new = np.array(plan.num_tokens, np.int64)
        return cls(
            num_tokens=int(new.sum()),
            num_seqs=len(new),
            num_sampled=len(plan.sample_seq_ids),
            kv_tokens=int((starts + new).sum()),
            num_pairs=float((new * (starts + (new + 1) / 2)).sum()),
            launched=now,
        )


class StepCost(Protocol):
    """The least that steps of a model cost."""

    def work(self, step: Step) -> Work: ...


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a model's steps cost at least. layer_parameters: of all layers, each multiplied with every token.
    head_parameters: of the projection to the vocabulary. itemsize: bytes of a weight. kv_bytes: of a token in all
    layers. attention_width: query heads times their size, over all layers."""

    layer_parameters: int
    head_parameters: int
    itemsize: int
    kv_bytes: int
    attention_width: int

    @classmethod
    def of_shape(cls, shape: Shape, itemsize: int) -> ModelCost:
        return cls(
            layer_parameters=shape.layer_parameters,
            head_parameters=shape.head_parameters,
            itemsize=itemsize,
            kv_bytes=shape.kv_bytes * shape.num_layers,
            attention_width=shape.num_heads * shape.head_dim * shape.num_layers,
        )

    def work(self, step: Step) -> Work:
        """Weights, keys and values are read once a step, keys and values of new tokens written; activations are left
        out."""
        head = self.head_parameters if step.num_sampled else 0
        return Work(
            bytes=self.itemsize * (self.layer_parameters + head) + self.kv_bytes * (step.kv_tokens + step.num_tokens),
            operations=2.0 * (self.layer_parameters * step.num_tokens + self.head_parameters * step.num_sampled)
            + 4.0 * self.attention_width * step.num_pairs,
        )


STEPS: list[Step] = []
"""Of the engine of this process, in order. A measurement clears it first."""


class RecordingExecutor:
    """Passes everything on."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, plan: StepPlan) -> NotedStep:
        step = Step.of_plan(plan, time.perf_counter())
        if plan.seq_ids:
            STEPS.append(step)
        future = self._executor.execute(plan)
        step.launching = time.perf_counter() - step.launched
        return NotedStep(future, step)


class NotedStep:
    """The future of a step, which notes when its result was there."""

    def __init__(self, future: Any, step: Step) -> None:
        self._future = future
        self._step = step

    def result(self) -> StepResult:
        asked = time.perf_counter()
        result: StepResult = self._future.result()
        self._step.finished = time.perf_counter()
        self._step.waiting = self._step.finished - asked
        return result


def make_executor(config: EngineConfig) -> RecordingExecutor:
    """The engine's own executor, recorded."""
    import importlib

    module, _, name = DEFAULT_EXECUTOR.partition(":")
    return RecordingExecutor(getattr(importlib.import_module(module), name)(config))
