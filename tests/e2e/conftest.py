"""The whole engine over tiny random models: helpers shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from tests.models.conftest import saved_model

__all__ = ["saved_model"]

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=3, detokenize=False)


def generate(
    model: str, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams] = GREEDY, **options
) -> tuple[list[RequestOutput], dict[str, object]]:  # type: ignore[no-untyped-def]
    """Run prompts in an engine made for them; returns the outputs and the engine's statistics."""
    options = {"num_blocks_override": 400, "num_threads": 1, "skip_tokenizer_init": True, **options}
    with LLM(model, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return outputs, llm.stats()


def exact(outputs: Sequence[RequestOutput]) -> list[object]:
    """All tokens and all logprobs, for comparison bit by bit."""
    return [
        (
            completion.token_ids,
            [
                [(token, entry.logprob, entry.rank) for token, entry in position.items()]
                for position in completion.logprobs
            ]
            if completion.logprobs
            else None,
        )
        for output in outputs
        for completion in output.outputs
    ]
