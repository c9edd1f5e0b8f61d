"""Conversion of the core's tokens into callers' outputs: text, logprobs, stop strings, metrics. One processor per
engine client, on one thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from quire.engine.messages import Abort
from quire.errors import InternalError, UserError, is_interrupt
from quire.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    RequestTiming,
    SequenceUpdate,
)
from quire.request import EngineRequest, FinishReason
from quire.sampling_params import RepetitionDetectionParams, SamplingParams
from quire.step import TokenLogprobs
from quire.tokenization.detokenizer import IncrementalDetokenizer
from quire.tokenization.stop_strings import StopStrings, StopTable
from quire.tokenization.tokenizer import Tokenizer
from quire.utils.failures import explain


@dataclass(slots=True)
class FailedRequest:
    """Request whose output could not be made (text, logprobs). last: final output with metrics, without content."""

    request_id: str
    error: InternalError
    last: RequestOutput


class ProcessedOutputs(msgspec.Struct):
    """Results of one batch of updates. outputs: one per request with news, ordered by first mention. aborts: for the
    core, sequences ended by a stop string, and failed requests."""

    outputs: list[RequestOutput] = []
    aborts: list[Abort] = []
    failures: list[FailedRequest] = []


class OutputProcessor:
    """Turns the core's updates into outputs with text; holds the output state of every unfinished request of a front
    end. tokenizer: None if the model has none; texts are then empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _RequestState] = {}

    def add_request(
        self,
        request: EngineRequest,
        prompt_text: str | None = None,
        *,
        delta: bool = False,
        final_only: bool = False,
    ) -> None:
        """Expect updates of `request`; call before the core knows it. Raises UserError for an id in use. An output
        holds the whole request so far (all `n` completions). delta: only completions with news, and their new part:
        text when it is certain, token ids and logprobs with their step, prompt logprobs with the first tokens.
        final_only: one, last output; always so for beam search and best_of."""
        if request.request_id in self._requests:
            raise UserError(f"request id {request.request_id!r} is already in use", param="request_id")
        self._requests[request.request_id] = _RequestState(
            request, prompt_text, self._tokenizer, delta=delta, final_only=final_only
        )

    def process(self, updates: list[SequenceUpdate]) -> ProcessedOutputs:
        """Process one step's updates. Updates of unknown requests and ended sequences are dropped. A request with
        unprocessable output fails; the others continue."""
        processed = ProcessedOutputs()
        touched: dict[str, _RequestState] = {}
        for update in updates:
            state = self._requests.get(update.request_id)
            if state is None:
                continue
            try:
                is_news = state.take_update(update)
            except BaseException as error:
                touched.pop(update.request_id, None)
                self._fail(state, error, processed)
                continue
            if not is_news:
                continue
            if state.num_live == 0 or not state.final_only:
                touched[update.request_id] = state
            if update.finish_reason is None and state.sequences[update.index].finish_reason is not None:
                processed.aborts.append(Abort(update.request_id, update.index))
        for request_id, state in touched.items():
            try:
                output = state.output()
            except BaseException as error:
                self._fail(state, error, processed)
                continue
            if state.num_live == 0:
                del self._requests[request_id]
            processed.outputs.append(output)
        return processed

    def abort(self, request_id: str) -> RequestOutput | None:
        """Drop a request and return its last output, whose open completions end with "abort"; None if unknown. Raises
        InternalError if that output cannot be made; the request is dropped anyway."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        try:
            for sequence in state.sequences:
                if sequence.finish_reason is None:
                    sequence.mark_finished(FinishReason.ABORT, None)
                    state.num_live -= 1
            return state.output()
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise _internal_error(request_id, error) from error

    def _fail(self, state: _RequestState, error: BaseException, processed: ProcessedOutputs) -> None:
        if is_interrupt(error):
            raise error
        request_id = state.request_id
        del self._requests[request_id]
        failure = _internal_error(request_id, error)
        failure.__cause__ = error
        processed.failures.append(FailedRequest(request_id, failure, state.failed_output()))
        processed.aborts.append(Abort(request_id))

    def fail_all(self) -> list[str]:
        """Drop every request of a dead engine. Returns their ids in order of arrival."""
        request_ids = list(self._requests)
        self._requests.clear()
        return request_ids

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)


class _RequestState:
    __slots__ = (
        "_delta",
        "_draft_steps",
        "_first_token",
        "_metrics",
        "_num_cached_tokens",
        "_pooled",
        "_prompt_logprobs",
        "_prompt_text",
        "_queue_time",
        "_ranks_samples",
        "_request",
        "_tokenizer",
        "final_only",
        "num_live",
        "sequences",
    )

    def __init__(
        self,
        request: EngineRequest,
        prompt_text: str | None,
        tokenizer: Tokenizer | None,
        *,
        delta: bool,
        final_only: bool,
    ) -> None:
        self._request = request
        self._ranks_samples = request.params.ranks_samples
        self._prompt_text = prompt_text
        self._tokenizer = tokenizer if request.params.detokenize else None
        self._delta = delta
        self.final_only = final_only or request.params.answers_at_end
        self._num_cached_tokens = 0
        self._pooled: list[float] | None = None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if request.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]
        self._metrics = RequestMetrics()
        self._draft_steps = bytearray()
        self._queue_time = 0.0
        self._first_token: float | None = None
        stops = StopTable(request.params.stop_strings) if request.params.stop_strings else None
        # The core reports only the hypotheses of a beam search, not its beams.
        num_reported = request.params.n if request.params.use_beam_search else request.params.num_sequences
        self.sequences = [_SequenceState(index, request, self._tokenizer, stops) for index in range(num_reported)]
        self.num_live = len(self.sequences)

    @property
    def request_id(self) -> str:
        return self._request.request_id

    def failed_output(self) -> RequestOutput:
        """Last output of a failed request: ends every open completion, without content."""
        outputs = [
            CompletionOutput(sequence.index, "", [], finish_reason=FinishReason.ERROR.value)
            for sequence in self.sequences
            if sequence.finish_reason is None
        ]
        return RequestOutput(
            self.request_id, self._prompt_text, self._request.prompt_token_ids, outputs, True, metrics=self._metrics
        )

    def take_update(self, update: SequenceUpdate) -> bool:
        """Apply an update. Returns whether there is news for the caller."""
        sequence = self.sequences[update.index]
        if sequence.finish_reason is not None:
            return False
        if update.prompt_logprobs is not None and self._prompt_logprobs is not None:
            assert update.prompt_logprobs.start == len(self._prompt_logprobs)
            self._prompt_logprobs += [to_logprobs(entry, self._tokenizer) for entry in update.prompt_logprobs.entries]
        if update.pooled is not None:
            self._pooled = update.pooled
        if update.timing is not None:
            if self._first_token is None:  # a restarted engine may report another number later
                self._num_cached_tokens = update.num_cached_tokens
            self._measure(update.timing, has_token=bool(update.new_token_ids))
        self._draft_steps += update.drafts
        if not update.new_token_ids and update.finish_reason is None:
            return False
        sequence.take_update(update)
        if sequence.finish_reason is not None:
            self.num_live -= 1
        return True

    def output(self) -> RequestOutput:
        """Output of the request so far, or with `delta` only the part since the last one."""
        sequences = self._reported_sequences()
        if self._draft_steps and not self.num_live:
            self._metrics = msgspec.structs.replace(self._metrics, draft_steps=bytes(self._draft_steps))
        if self._delta:
            outputs = [sequence.delta() for sequence in sequences if sequence.has_news]
        else:
            outputs = [sequence.snapshot() for sequence in sequences]
        output = RequestOutput(
            request_id=self._request.request_id,
            prompt=self._prompt_text,
            prompt_token_ids=self._request.prompt_token_ids,
            outputs=outputs,
            finished=self.num_live == 0,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._metrics,
            pooled=self._pooled,
        )
        if self._delta:
            self._prompt_logprobs = None
        return output

    def _reported_sequences(self) -> list[_SequenceState]:
        if self._ranks_samples:
            ranked = sorted(self.sequences, key=_SequenceState.rank)[: self._request.params.n]
            for index, sequence in enumerate(ranked):
                sequence.index = index
            return ranked
        if self._request.params.use_beam_search:
            return [sequence for sequence in self.sequences if not sequence.is_missing]
        return self.sequences

    def _measure(self, timing: RequestTiming, *, has_token: bool) -> None:
        elapsed = timing.now - timing.arrival
        if self._first_token is None:
            self._queue_time = timing.first_scheduled - timing.arrival
        if has_token and self._first_token is None:
            self._first_token = elapsed
        self._metrics = RequestMetrics(
            queue_time=self._queue_time,
            time_to_first_token=self._first_token or 0.0,
            latency=elapsed,
            num_preemptions=timing.num_preemptions,
        )


class _SequenceState:
    """State of one completion: everything so far, or with `delta` what is not delivered."""

    __slots__ = (
        "_cumulative_logprob",
        "_detokenizer",
        "_is_scored",
        "_logprobs",
        "_num_tokens",
        "_num_unchecked",
        "_params",
        "_repetition",
        "_score",
        "_stops",
        "_text",
        "_token_ids",
        "_tokenizer",
        "finish_reason",
        "has_news",
        "index",
        "is_missing",
        "stop_reason",
    )

    def __init__(
        self, index: int, request: EngineRequest, tokenizer: Tokenizer | None, stops: StopTable | None
    ) -> None:
        params = request.params
        self.index = index
        self._params: SamplingParams = params
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(params.skip_special_tokens, request.prompt_token_ids)
        self._stops: StopStrings | None = None
        if stops is not None:
            self._stops = StopStrings(stops, params.include_stop_str_in_output)
        self._repetition: RepetitionDetector | None = None
        if params.repetition_detection is not None:
            self._repetition = RepetitionDetector(params.repetition_detection)
        self._num_tokens = 0
        self._num_unchecked = params.min_tokens
        """Tokens still to come not searched for stop strings."""
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._is_scored = self._logprobs is not None or params.ranks_samples
        """True if the cumulative log-probability is reported even without a score."""
        self._score: float | None = None
        self.is_missing = False
        """True if the beam search found fewer hypotheses."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.has_news = False

    def take_update(self, update: SequenceUpdate) -> None:
        """Append the update's tokens, up to the one that completes a stop string or repetition."""
        self.has_news = True
        token_ids = update.new_token_ids
        detokenizer, repetition = self._detokenizer, self._repetition
        if detokenizer is not None or repetition is not None:
            # A token that ends the sequence is not part of its text, unless the request asks for it.
            is_stop = update.finish_reason is FinishReason.STOP and not self._params.include_stop_str_in_output
            is_stop = is_stop and not update.ends_in_text
            num_shown = len(token_ids) - is_stop
            for position in range(num_shown):
                stops = detokenizer is not None and self._show(detokenizer.push(token_ids[position]))
                if stops or (repetition is not None and self._repeats(repetition, token_ids[position])):
                    token_ids = token_ids[: position + 1]
                    break
        self._token_ids += token_ids
        for entry in (update.logprobs or ())[: len(token_ids)]:
            self._cumulative_logprob += entry.logprobs[0]
            if self._logprobs is not None:
                self._logprobs.append(to_logprobs(entry, self._tokenizer))
        if self._params.use_beam_search:
            if update.ranking is None:
                self.is_missing = update.finish_reason is not FinishReason.ERROR
            else:
                self._cumulative_logprob, self._score = update.ranking
        if self.finish_reason is None and update.finish_reason is not None:
            self.mark_finished(update.finish_reason, update.stop_reason)

    def _repeats(self, repetition: RepetitionDetector, token_id: int) -> bool:
        self._num_tokens += 1
        if not repetition.push(token_id) or self._num_tokens < self._params.min_tokens:
            return False
        self.mark_finished(FinishReason.REPETITION, "repetition_detected")
        return True

    def mark_finished(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End the sequence and release held-back text, which may still contain a stop string."""
        self.finish_reason, self.stop_reason, self.has_news = reason, stop_reason, True
        if self._detokenizer is None or self._show(self._detokenizer.flush()):
            return
        if self._stops is not None:
            self._text.append(self._stops.flush())

    def rank(self) -> tuple[bool, bool, float]:
        """Sort key, smaller is better: failed ones first, aborted ones last, others by cumulative log-probability. For
        `best_of`."""
        reason = self.finish_reason
        return reason is FinishReason.ABORT, reason is not FinishReason.ERROR, -self._cumulative_logprob

    def _show(self, text: str) -> bool:
        """Append a token's text, without an end that may belong to a stop string; returns whether a stop string ended
        the sequence."""
        if self._stops is None:
            if text:
                self._text.append(text)
            return False
        if self._num_unchecked > 0:
            self._num_unchecked -= 1
            self._text.append(text)
            return False
        safe, stop = self._stops.push(text)
        self._text.append(safe)
        if stop is None:
            return False
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        return True

    def snapshot(self) -> CompletionOutput:
        self.has_news = False
        text = "".join(self._text)
        self._text = [text]
        return self._output(text, list(self._token_ids), None if self._logprobs is None else list(self._logprobs))

    def delta(self) -> CompletionOutput:
        """Completion with the text, tokens and logprobs since the last call."""
        self.has_news = False
        text, token_ids, logprobs = "".join(self._text), self._token_ids, self._logprobs
        self._text, self._token_ids, self._logprobs = [], [], None if logprobs is None else []
        return self._output(text, token_ids, logprobs)

    def _output(self, text: str, token_ids: list[int], logprobs: list[dict[int, Logprob]] | None) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None if self._score is None and not self._is_scored else self._cumulative_logprob,
            logprobs=logprobs,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
            score=self._score,
        )


def _internal_error(request_id: str, error: BaseException) -> InternalError:
    return InternalError(
        f"the output of request {request_id!r} could not be processed: {explain(error)}",
        summary="the output of this request could not be processed",
    )


def to_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Alternatives of one position by token id: the chosen token, the others by rank, then the tokens that the request
    names, without a rank."""
    text_of = None if tokenizer is None else tokenizer.token_text
    chosen = entry.token_ids[0]
    found = {chosen: Logprob(entry.logprobs[0], entry.rank, None if text_of is None else text_of(chosen))}
    num_ranked = len(entry.token_ids) - entry.num_listed
    for place in range(1, len(entry.token_ids)):
        token_id, rank = entry.token_ids[place], place if place < num_ranked else None
        if token_id not in found:
            found[token_id] = Logprob(entry.logprobs[place], rank, None if text_of is None else text_of(token_id))
    return found


class RepetitionDetector:
    """Finds repeated patterns in one completion."""

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._lengths = range(max(1, params.min_pattern_size), params.max_pattern_size + 1)
        self._num_equal = [0] * len(self._lengths)
        self._min_count = params.min_count
        self._last: deque[int] = deque(maxlen=params.max_pattern_size)

    def push(self, token_id: int) -> bool:
        """Add a token; returns whether the completion ends with `min_count` copies of a pattern."""
        last, found = self._last, False
        for place, length in enumerate(self._lengths):
            if length > len(last):
                break
            self._num_equal[place] = self._num_equal[place] + 1 if last[-length] == token_id else 0
            found = found or self._num_equal[place] >= length * (self._min_count - 1)
        last.append(token_id)
        return found
