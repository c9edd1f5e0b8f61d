"""Pooling requests: texts to EngineRequests, and vectors to callers' results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from quire.config.pooling import Activation, PoolingConfig
from quire.engine.input_processor import InputProcessor, Prompt, split_prompt
from quire.errors import ModelOutputError, PromptTooLongError, UserError, panics_are_errors
from quire.outputs import RequestOutput, raise_if_nonfinite
from quire.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import PoolingParams
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.tokenization.tokenizer import Tokenizer, check_unicode

_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0, detokenize=False)
_SHORTEST = 1e-12
"""Least length of a vector to be normalised; shorter ones count as this long."""


class PoolingProcessor:
    """Makes one model's pooling requests, and answers from their outputs. pooling: its pooling configuration; None: a
    generating model, which refuses every task."""

    def __init__(self, inputs: InputProcessor, pooling: PoolingConfig | None, name: str, vector_size: int) -> None:
        self._inputs = inputs
        self._pooling = pooling
        self.model_name = name
        self._vector_size = vector_size

    @property
    def is_cross_encoder(self) -> bool:
        """True if the model reads both texts of a pair and returns one score."""
        return self._pooling is not None and self._pooling.task == "classify" and len(self._pooling.labels) == 1

    @property
    def labels(self) -> tuple[str, ...]:
        return () if self._pooling is None else self._pooling.labels

    def with_prompt(self, text: str) -> str:
        """Text after the model's default prompt, if it has one."""
        return text if not text or self._pooling is None else self._pooling.prompt + text

    def tokens_behind(self, name: str, text: str, truncate: int | None) -> list[int]:
        """Tokens of a text after the prompt `name`. truncate: see PoolingParams.truncate_prompt_tokens. Raises
        UserError for an unknown name."""
        prompts = {} if self._pooling is None else dict(self._pooling.prompts)
        if name not in prompts:
            known = f"Supported values: {', '.join(sorted(prompts))}" if prompts else "This model defines no prompts"
            raise UserError(f"Unsupported input_type {name!r}. {known}", param="input_type")
        return self._tokens(prompts[name] + text if text else "", None, truncate)[0]

    def check_task(self, task: str) -> None:
        """Raise UserError for a task of TASKS that the model cannot do."""
        pooling = self._pooling
        if pooling is None:
            raise UserError(f"{self.model_name} generates text: {task} needs a model that pools, or runner='pooling'")
        if task == "embed" and pooling.task != "embed":
            raise UserError(f"{self.model_name} is a classifier: it gives no embeddings")
        if task == "classify" and pooling.task != "classify":
            raise UserError(f"{self.model_name} gives embeddings: it is no classifier")
        if task == "score" and pooling.task == "classify" and not self.is_cross_encoder:
            raise UserError(
                f"{self.model_name} has {len(pooling.labels)} labels: score needs an embedder or a classifier with one"
            )

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        *,
        second: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> EngineRequest:
        """Request for the core. second: second text of a pair. Raises UserError with `param` set, or
        PromptTooLongError."""
        inputs, pooling = self._inputs, self._pooling
        assert pooling is not None, "check_task comes first"
        if not isinstance(params, PoolingParams):
            raise UserError(f"params must be PoolingParams, not {type(params).__name__}", param="params")
        self._check_dimensions(params, pooling)
        inputs.check_priority(priority)
        check_unicode(request_id, param="request_id")
        content, cache_salt = split_prompt(prompt, cache_salt)
        if isinstance(content, str):
            content = self.with_prompt(content)
        token_ids, second_segment = self._tokens(content, second, params.truncate_prompt_tokens)
        if params.padding == "max_length":
            token_ids = self._padded(token_ids, is_pair=second is not None)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=_SAMPLING,
            max_tokens=1,
            seed=0,
            cache_salt=cache_salt,
            priority=priority,
            pooling=True,
            columns={"segments": second_segment} if second_segment else {},
        )

    def _tokens(self, content: str | Sequence[int], second: str | None, truncate: int | None) -> tuple[list[int], int]:
        inputs, longest = self._inputs, self._inputs.max_model_len
        if truncate is not None and truncate > longest:
            raise UserError(
                f"truncate_prompt_tokens is greater than the model's context of {longest} tokens. Please request a "
                "smaller truncation size, or truncate_prompt_tokens=-1 for as many as fit",
                param="truncate_prompt_tokens",
            )
        limit = longest if truncate == -1 else truncate
        boundary = 0
        if isinstance(content, str):
            if inputs.tokenizer is None:
                raise UserError(
                    "a text needs a tokenizer, and this model has none: pass prompt_token_ids", param="prompt"
                )
            for text in (content,) if second is None else (content, second):
                check_unicode(text, param="prompt")
                inputs.check_text_length(text, "prompt", is_cut=limit is not None)
                if not text:
                    raise UserError("the text is empty", param="prompt")
                if limit is None:
                    inputs.check_num_tokens(text, "prompt")
            token_ids, boundary = encode_pooled(inputs.tokenizer, content, second, limit)
            inputs.check_embedding(inputs.tokenizer, token_ids)
        else:
            if second is not None:
                raise UserError("the texts of a pair must be strings", param="prompt")
            token_ids = list(content)[:limit]
            inputs.check_token_ids(token_ids, "prompt_token_ids")
        if not token_ids:
            raise UserError("the prompt is empty: at least one token is needed", param="prompt")
        if len(token_ids) > longest:
            raise PromptTooLongError(
                f"this model's maximum context length is {longest} tokens, but the prompt has {len(token_ids)}. Please "
                "reduce the length of the input prompt, or let truncate_prompt_tokens=-1 cut it",
                param="prompt",
                num_tokens=len(token_ids),
            )
        return token_ids, boundary

    def _padded(self, token_ids: list[int], *, is_pair: bool) -> list[int]:
        tokenizer = self._inputs.tokenizer
        padding_id = None if tokenizer is None else tokenizer.padding_token_id
        if padding_id is None:
            raise UserError("padding needs a tokenizer with a padding token, and this model has none", param="padding")
        if is_pair:
            raise UserError("the texts of a pair get no padding (only 'do_not_pad')", param="padding")
        return token_ids + [padding_id] * (self._inputs.max_model_len - len(token_ids))

    def _check_dimensions(self, params: PoolingParams, pooling: PoolingConfig) -> None:
        wanted = params.dimensions
        if wanted is None:
            return
        if pooling.task != "embed":
            raise UserError("dimensions are of embeddings, which this model does not give", param="dimensions")
        if pooling.dimensions and wanted not in pooling.dimensions:
            raise UserError(
                f"dimensions must be one of {', '.join(map(str, pooling.dimensions))} for this model, not {wanted}",
                param="dimensions",
            )
        if not pooling.dimensions and not pooling.any_dimensions:
            raise UserError(
                "this model was not trained for fewer dimensions (its config.json has neither is_matryoshka nor "
                "matryoshka_dimensions)",
                param="dimensions",
            )
        if wanted > self._vector_size:
            raise UserError(f"dimensions must be at most {self._vector_size}, not {wanted}", param="dimensions")

    # -- results ----------------------------------------------------------------------------------------------------

    def vector(self, output: RequestOutput, params: PoolingParams) -> list[float]:
        """Requested vector from the last output. Raises ModelOutputError if the model computed NaN or infinity."""
        pooling = self._pooling
        assert pooling is not None, "the request was checked"
        raise_if_nonfinite(output)
        if output.pooled is None:
            raise ModelOutputError(f"the request ended without a vector ({output.outputs[0].finish_reason})")
        values = output.pooled
        if pooling.task == "classify":
            if params.use_activation is not False:
                values = activated(values, pooling.activation)
        else:
            values = values[: params.dimensions]
            if pooling.normalize if params.normalize is None else params.normalize:
                values = normalized(values)
        return values

    def pooled(self, output: RequestOutput, params: PoolingParams) -> PoolingRequestOutput:
        found = PoolingOutput(self.vector(output, params))
        return PoolingRequestOutput(output.request_id, found, output.prompt_token_ids, output.num_cached_tokens)

    def embedding(self, output: RequestOutput, params: PoolingParams) -> EmbeddingRequestOutput:
        found = EmbeddingOutput(self.vector(output, params))
        return EmbeddingRequestOutput(output.request_id, found, output.prompt_token_ids, output.num_cached_tokens)

    def classification(self, output: RequestOutput, params: PoolingParams) -> ClassificationRequestOutput:
        found = ClassificationOutput(self.vector(output, params))
        return ClassificationRequestOutput(output.request_id, found, output.prompt_token_ids, output.num_cached_tokens)

    def pair_score(self, output: RequestOutput, params: PoolingParams) -> ScoringRequestOutput:
        """Score of a pair from a cross-encoder's output."""
        found = ScoringOutput(self.vector(output, params)[0])
        return ScoringRequestOutput(output.request_id, found, output.prompt_token_ids, output.num_cached_tokens)

    def similarity(self, first: RequestOutput, second: RequestOutput, params: PoolingParams) -> ScoringRequestOutput:
        """Cosine similarity of two texts' vectors."""
        left, right = (normalized(self.vector(output, params)) for output in (first, second))
        found = ScoringOutput(math.fsum(x * y for x, y in zip(left, right, strict=True)))
        token_ids = first.prompt_token_ids + second.prompt_token_ids
        num_cached = first.num_cached_tokens + second.num_cached_tokens
        return ScoringRequestOutput(second.request_id, found, token_ids, num_cached)


def normalized(vector: list[float]) -> list[float]:
    length = max(math.sqrt(math.fsum(value * value for value in vector)), _SHORTEST)
    return [value / length for value in vector]


def activated(logits: list[float], activation: Activation) -> list[float]:
    """Apply the activation to a classifier's logits. Sigmoid, softmax or none."""
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        weights = [1 / (1 + math.exp(-abs(value))) for value in logits]
        return [1 - weight if value < 0 else weight for value, weight in zip(logits, weights, strict=True)]
    largest = max(logits)
    shares = [math.exp(value - largest) for value in logits]
    total = math.fsum(shares)
    return [share / total for share in shares]


class PooledTokens(NamedTuple):
    """Token ids of a pooled text or pair. second_segment: position of the first token of type 1; 0: all are of type 0.
    For the core's request."""

    token_ids: list[int]
    second_segment: int


def encode_pooled(tokenizer: Tokenizer, text: str, second: str | None, limit: int | None) -> PooledTokens:
    """Tokens of a text or pair with special tokens. limit: maximum tokens; longer texts lose their ends, of a pair the
    longer one first (Transformers' "longest_first"); None: no truncation. Raises UserError if the special tokens alone
    exceed it."""
    if second is None and limit is None:
        return PooledTokens(tokenizer.encode(text), 0)
    encodings = tokenizer.encodings([text] if second is None else [text, second], add_special_tokens=False)
    backend = tokenizer.backend
    with panics_are_errors("the tokenizer"):
        if limit is not None:
            room = limit - backend.num_special_tokens_to_add(second is not None)
            if room < 1:
                raise UserError(
                    f"truncate_prompt_tokens ({limit}) leaves no room for the text beside the special tokens",
                    param="truncate_prompt_tokens",
                )
            for encoding, length in zip(encodings, _cut([len(each.ids) for each in encodings], room), strict=True):
                encoding.truncate(length)
        joined = backend.post_process(encodings[0], None if second is None else encodings[1], True)
    types = joined.type_ids
    boundary = types.index(1) if 1 in types else 0
    if boundary and types != [0] * boundary + [1] * (len(types) - boundary):
        raise UserError("the tokenizer mixes the types of a pair's tokens, which is not supported", param="prompt")
    return PooledTokens(joined.ids, boundary)


def _cut(lengths: list[int], room: int) -> list[int]:
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    shorter = min(lengths)
    kept = [shorter, room - shorter]
    if kept[1] < shorter:
        kept = [room // 2, room - room // 2]
    return kept if lengths[0] <= lengths[1] else kept[::-1]
