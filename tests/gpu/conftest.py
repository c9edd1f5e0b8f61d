"""What only a card shows. Without one these tests are deselected, and the run says so at its end; `--interpreted` runs
those that can be run in Triton's interpreter all the same (slowly), to try the tests themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from tests.closing_words import leave_out
from tests.models.conftest import saved_model

__all__ = ["saved_model"]

MISSING = "{} tests were NOT run, because they need a CUDA device (benchmarks/gpu/run.sh runs them)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    interpreted = config.getoption("--interpreted")

    def cannot_run(item: pytest.Item) -> bool:
        marker = item.get_closest_marker("gpu")
        return marker is not None and not (interpreted and marker.kwargs.get("interpretable", True))

    leave_out(config, items, cannot_run, MISSING)


def with_graphs(mode: str) -> Any:
    """The option, which a card alone has: elsewhere it is refused."""
    return pytest.param({"cuda_graphs": mode}, marks=pytest.mark.gpu(interpretable=False))


def open_engine(directory: Path, **options: Any) -> LLM:
    """An engine on the card; without one in the interpreter."""
    on_card = torch.cuda.is_available()
    where = {"device": "cuda"} if on_card else {"device": "cpu", "attention_backend": "triton"}
    defaults = {"dtype": "float32", "num_blocks_override": 400, "max_num_seqs": 16, "skip_tokenizer_init": True}
    return LLM(str(directory), **{**defaults, **where, **options})


def generate(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    **options: Any,
) -> list[RequestOutput]:
    """In an engine made for it."""
    with open_engine(directory, **options) as llm:
        return complete(llm, prompts, params)


def complete(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """Of every completion of every output."""
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def greedy(num_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **fields)
