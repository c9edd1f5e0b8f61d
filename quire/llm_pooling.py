"""The part of the offline API that models which pool have: vectors, labels and scores of texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, Unpack

import msgspec

from quire.call_options import PoolingOptions, truncation_of
from quire.engine.input_processor import Prompt
from quire.engine.pooling_processor import PoolingProcessor
from quire.errors import UserError
from quire.outputs import RequestOutput
from quire.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import PoolingParams

T = TypeVar("T")
PoolingPrompts = Prompt | Sequence[Prompt]


class PoolingMethods(ABC):
    """Part of LLM."""

    @property
    @abstractmethod
    def _pooling(self) -> PoolingProcessor:
        """Makes the requests, and what callers get of their outputs."""

    @abstractmethod
    def _pool(
        self, prompts: Sequence[tuple[Prompt, str | None]], params: Sequence[PoolingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        """Run pooled requests to their end, in order; each prompt may have a second text."""

    def embed(
        self,
        prompts: PoolingPrompts,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[EmbeddingRequestOutput]:
        """The vector of every prompt, in the order of the prompts.

        prompts: as for `LLM.generate`. truncate_prompt_tokens: as PoolingParams have it, which it overrides.
        pooling_params: one for all, or one each. options: see PoolingOptions. Raises UserError, naming the prompt's
        index, before anything runs, and for a model that gives no vectors; else as `LLM.generate`.
        """
        cut = _truncation(truncate_prompt_tokens, options)
        return self._pooled("embed", prompts, pooling_params, cut, use_tqdm, self._pooling.embedding)

    def classify(
        self,
        prompts: PoolingPrompts,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of a classifier's labels for every prompt. Arguments and errors as for `embed`."""
        cut = _truncation(truncate_prompt_tokens, options)
        return self._pooled("classify", prompts, pooling_params, cut, use_tqdm, self._pooling.classification)

    def encode(
        self,
        prompts: PoolingPrompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_task: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[PoolingRequestOutput]:
        """What the model makes of every prompt, a vector or the scores of its labels. pooling_task: "embed", "classify"
        or "score", for models that do it; None: what the model does. The rest as for `embed`."""
        if pooling_task is not None:
            self._pooling.check_task(PoolingParams(task=pooling_task).task or "encode")
        cut = _truncation(truncate_prompt_tokens, options)
        return self._pooled("encode", prompts, pooling_params, cut, use_tqdm, self._pooling.pooled)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` answers that of `data_1`: a cross-encoder's score of the pair, or of an
        embedder the cosine of the two vectors.

        data_1: one text for all, or as many as `data_2`. Raises as `embed`.
        """
        self._pooling.check_task("score")
        firsts, seconds = _texts(data_1, "data_1"), _texts(data_2, "data_2")
        if len(firsts) not in (1, len(seconds)):
            raise UserError(f"got {len(firsts)} texts for {len(seconds)}: give one, or as many", param="data_1")
        params = _merged(pooling_params or PoolingParams(), _truncation(truncate_prompt_tokens, options))
        if self._pooling.is_cross_encoder:
            pairs = [(firsts[min(i, len(firsts) - 1)], second) for i, second in enumerate(seconds)]
            outputs = self._pool(pairs, [params] * len(pairs), use_tqdm)
            return [self._pooling.pair_score(output, params) for output in outputs]
        texts = [(text, None) for text in (*firsts, *seconds)]
        outputs = self._pool(texts, [params] * len(texts), use_tqdm)
        lefts, rights = outputs[: len(firsts)], outputs[len(firsts) :]
        return [
            self._pooling.similarity(lefts[min(i, len(lefts) - 1)], right, params) for i, right in enumerate(rights)
        ]

    def _pooled(
        self,
        task: str,
        prompts: PoolingPrompts,
        params: PoolingParams | Sequence[PoolingParams] | None,
        truncate: int | None,
        use_tqdm: bool,
        finish: Callable[[RequestOutput, PoolingParams], T],
    ) -> list[T]:
        self._pooling.check_task(task)
        listed = as_list(prompts)
        each = params if isinstance(params, Sequence) else [params or PoolingParams()] * len(listed)
        if len(each) != len(listed):
            raise UserError(f"got {len(each)} pooling_params for {len(listed)} prompts", param="pooling_params")
        merged = [_merged(one, truncate) for one in each]
        for asked in {one.task for one in merged if isinstance(one, PoolingParams) and one.task} - {task}:
            if task != "encode":
                raise UserError(f"pooling_params ask for the task {asked!r}, and the call for {task!r}", param="task")
            self._pooling.check_task(asked)
        outputs = self._pool([(prompt, None) for prompt in listed], merged, use_tqdm)
        return [finish(output, one) for output, one in zip(outputs, merged, strict=True)]


def as_list(prompts: PoolingPrompts) -> list[Prompt]:
    """One prompt, or several, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise UserError(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}", param="prompts")
    if prompts and all(isinstance(each, int) for each in prompts):
        return [list(prompts)]  # type: ignore[arg-type]  # one prompt as token ids
    return list(prompts)  # type: ignore[arg-type]  # told apart above


def _texts(data: str | Sequence[str], name: str) -> list[str]:
    listed = [data] if isinstance(data, str) else list(data)
    if not listed or not all(isinstance(each, str) for each in listed):
        raise UserError(f"{name} must be a text or a list of texts", param=name)
    return listed


def _truncation(truncate: int | None, options: PoolingOptions) -> int | None:
    given = truncation_of(options)
    if given.get("truncation_side", "right") != "right":
        raise UserError("truncation_side must be 'right' for models that pool", param="tokenization_kwargs")
    found: int | None = given.get("truncate_prompt_tokens", truncate)
    return found


def _merged(params: PoolingParams, truncate: int | None) -> PoolingParams:
    if truncate is None or not isinstance(params, PoolingParams):
        return params
    return msgspec.structs.replace(params, truncate_prompt_tokens=truncate)
