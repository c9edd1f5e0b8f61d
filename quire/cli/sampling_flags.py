from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from quire.cli.parser import Parser, add_struct_flags, given
from quire.sampling_params import PYTHON_ONLY, SamplingParams

HELP: dict[str, str] = {
    "n": "completions of the prompt",
    "best_of": "generate this many completions and show the n likeliest",
    "use_beam_search": "search with best_of (else n) beams instead of sampling",
    "length_penalty": "beam search ranks by the log-probability over the length to this power",
    "early_stopping": "when a beam search ends: true, false or never",
    "temperature": "0 is greedy",
    "top_p": "sample from the smallest set of tokens of this probability",
    "top_k": "sample from this many best tokens (0: off)",
    "min_p": "drop tokens less probable than this share of the best one's probability",
    "presence_penalty": "penalty for tokens generated before",
    "frequency_penalty": "penalty for each time a token was generated before",
    "repetition_penalty": "divides the logits of tokens seen before (1: off)",
    "seed": "seed of the engine and of the request; makes the output reproducible",
    "stop": "string that ends the text; may be given several times",
    "stop_token_ids": "tokens that end the text",
    "include_stop_str_in_output": "keep the stop string in the text",
    "bad_words": "string that is never produced; may be given several times",
    "logit_bias": "added to the logits of tokens, such as 11=-5,42=3",
    "allowed_token_ids": "produce no other tokens than these",
    "ignore_eos": "go on after the end-of-sequence token",
    "max_tokens": "most tokens to generate (none: up to the model's context)",
    "min_tokens": "no end-of-sequence and no stop token before this many tokens",
    "logprobs": "log-probabilities of this many alternatives for each token",
    "prompt_logprobs": "the same for the tokens of the prompt",
    "truncate_prompt_tokens": "keep only this many of the prompt's last tokens",
    "truncation_side": "which side of a prompt truncate_prompt_tokens cuts: left or right (default: left)",
    "timeout_s": "seconds after which the request ends with what it has",
    "thinking_token_budget": "most tokens that the model thinks before it answers (-1: no limit)",
    "num_speculative_tokens": "drafts of a step at most, where the engine makes drafts (0: none)",
    "detokenize": "make text of the tokens",
    "skip_special_tokens": "leave special tokens out of the text",
}


def add_sampling_flags(parser: Parser, defaults: Mapping[str, Any], *, skip: tuple[str, ...] = ()) -> None:
    """Add a flag for each field of SamplingParams. defaults: command's own."""
    skip = (*skip, *PYTHON_ONLY)
    add_struct_flags(parser, SamplingParams, HELP, title="sampling options", skip=skip, defaults=defaults)


def sampling_params(namespace: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    """Given flags over the command's defaults. Raises UserError."""
    return SamplingParams.from_options({**defaults, **given(namespace, SamplingParams)})
