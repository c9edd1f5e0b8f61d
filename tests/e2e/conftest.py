"""The whole engine over tiny random models: helpers shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from tests.models.conftest import saved_model

__all__ = ["saved_model"]

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=3, detokenize=False)


@pytest.fixture(scope="module", autouse=True)
def products(fixed_order_of_module: None, no_overflow_checks: None) -> None:
    """These tests compare bits, and plain torch's products have those that the machine's BLAS gives them. (In processes
    that a test starts torch multiplies as it likes.)"""


@pytest.fixture(scope="module", autouse=True)
def processes(copied_processes: None, copied_helpers: None) -> None:
    """Ranks and engines are copies of a warm interpreter, but those of `fresh_interpreters`; helpers of another one."""


@dataclass(frozen=True)
class Variant:
    """A way to compute a model. family: of tests/models/families.py; isa: that the native kernels are held to."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    isa: str = "auto"
    directory: str = ""

    def __str__(self) -> str:
        return "-".join([self.family, *map(str, self.options.values()), *([] if self.isa == "auto" else [self.isa])])

    @contextmanager
    def held_to_isa(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUIRE_CPU_ISA", self.isa)
            yield


def generate(
    model: str | Variant,
    prompts: Sequence[list[int]],
    params: SamplingParams | list[SamplingParams] = GREEDY,
    **options,
) -> tuple[list[RequestOutput], dict[str, object]]:  # type: ignore[no-untyped-def]
    """Run prompts in an engine made for them; returns the outputs and the engine's statistics."""
    variant = model if isinstance(model, Variant) else Variant("", directory=model)
    defaults = {"num_blocks_override": 400, "num_threads": 1, "skip_tokenizer_init": True}
    with variant.held_to_isa(), LLM(variant.directory, **{**defaults, **variant.options, **options}) as llm:
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
