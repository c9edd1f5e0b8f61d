"""Outputs of models that pool. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

OutputT = TypeVar("OutputT")


@dataclass(slots=True)
class PoolingOutput:
    """Vector, or the scores of the labels."""

    data: list[float]


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """Result of `LLM.classify`. probs: probability of each label; its logit where the request or the model asks for no
    activation."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """Result of `LLM.score`. score: how well the second text answers the first."""

    score: float


@dataclass(slots=True)
class PooledRequestOutput(Generic[OutputT]):
    """Result of one request. num_cached_tokens: prompt tokens found in the prefix cache."""

    request_id: str
    outputs: OutputT
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    pass


class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]):
    pass


class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    pass


class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]):
    """Result of one pair of `LLM.score`. prompt_token_ids: tokens of the pair, or of both texts in succession where
    their vectors are compared."""
