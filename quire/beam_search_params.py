"""vLLM's types of beam search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from quire.errors import UserError
from quire.outputs import CompletionOutput, Logprob, RequestOutput, raise_if_nonfinite
from quire.sampling_params import SamplingParams


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one beam search. Invalid values raise UserError with `param` set. beam_width: beams (1..32) and
    returned hypotheses. temperature: 0 or 1, without effect. length_penalty, early_stopping: see SamplingParams.
    ignore_eos: only max_tokens ends a hypothesis. logprobs: alternatives (0..20) reported for each token.
    include_stop_str_in_output: the text shows special tokens."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self.to_sampling_params()

    def to_sampling_params(self) -> SamplingParams:
        """Equal settings for `LLM.generate`."""
        try:
            return SamplingParams(
                n=self.beam_width,
                use_beam_search=True,
                max_tokens=self.max_tokens,
                ignore_eos=self.ignore_eos,
                temperature=self.temperature,
                length_penalty=self.length_penalty,
                early_stopping=self.early_stopping,
                include_stop_str_in_output=self.include_stop_str_in_output,
                skip_special_tokens=not self.include_stop_str_in_output,
                min_tokens=self.min_tokens,
                logprobs=self.logprobs,
            )
        except UserError as error:
            if error.param != "n":
                raise
            raise UserError("beam_width" + error.message.removeprefix("n"), param="beam_width") from None


@dataclass(slots=True)
class BeamSearchSequence:
    """One hypothesis. `tokens` and `text` begin with the prompt, as in vLLM; `logprobs` has the generated tokens only.
    cum_logprob: sum over the generated tokens. score: cum_logprob / (generated tokens) ** length_penalty, which ranks
    hypotheses."""

    tokens: list[int]
    cum_logprob: float
    score: float
    text: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """Hypotheses of one prompt, best first: `beam_width`, or fewer if the request's rules allow fewer."""

    sequences: list[BeamSearchSequence]


class TokenDecoder(Protocol):
    """Tokenizer's decoding method."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...


def to_beam_search_output(
    output: RequestOutput, tokenizer: TokenDecoder | None, params: BeamSearchParams
) -> BeamSearchOutput:
    """Convert a search's output. Raises ModelOutputError when the model computed NaN or infinite logits for the
    search."""
    raise_if_nonfinite(output)
    prompt_text = None
    if tokenizer is not None:
        prompt_text = tokenizer.decode(output.prompt_token_ids, not params.include_stop_str_in_output)
    return BeamSearchOutput([_to_sequence(output.prompt_token_ids, prompt_text, each) for each in output.outputs])


def _to_sequence(prompt: list[int], prompt_text: str | None, completion: CompletionOutput) -> BeamSearchSequence:
    assert completion.cumulative_logprob is not None
    assert completion.score is not None
    return BeamSearchSequence(
        tokens=prompt + completion.token_ids,
        cum_logprob=completion.cumulative_logprob,
        score=completion.score,
        text=None if prompt_text is None else prompt_text + completion.text,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )
