"""Drafts in requests of every kind, over real workers: the text is that without, wherever it stops, and each cell has
drafts that were accepted and others that were rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.decoding.drafts import WorkerDrafts
from quire.decoding.sequence import Sequence
from quire.outputs import RequestOutput
from quire.structured_outputs_params import StructuredOutputsParams
from tests.e2e.conftest import exact
from tests.fakes.drafts import RandomDrafts
from tests.long import all_but_long

NUM_DRAFTS, NUM_TOKENS, NUM_TOKENS_OF_TORCH = 4, 40, 24
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": NUM_DRAFTS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
OPTIONS: dict[str, Any] = {"num_blocks_override": 200, "num_threads": 1, "block_size": 4, "dtype": "float32"}
PROMPTS = ["def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return", "for i in range(10):\n    print(i)\n"]


class KnownText(RandomDrafts):
    """Random drafts for a real worker, by the scheduler alone: the tokens to come are those of a run without drafts."""

    def __init__(self, seed: int, max_drafts: int) -> None:
        super().__init__(seed, max_drafts, by_worker=0.0)
        self.executor = self
        self.texts: dict[tuple[int, ...], list[int]] = {}
        """By the tokens of a prompt and the number of a sample."""
        self._asked: Sequence | None = None

    def propose(self, sequence: Sequence, limit: int, batch_size: int) -> Any:
        self._asked = sequence
        return super().propose(sequence, limit, batch_size)

    def foresee(self, seq_id: int, count: int) -> list[int]:
        sequence = self._asked
        assert sequence is not None
        text = self.texts[*sequence.request.prompt_token_ids, sequence.index]
        place = sequence.num_output_tokens
        return (text[place : place + count] + [0] * count)[:count]


class Engines(NamedTuple):
    """One without drafts, and one with them whose drafter a test chooses. usual: texts of the first, which say where
    others are to end. expected: the first one's outputs, by kind of request."""

    plain: LLM
    drafting: LLM
    usual: list[RequestOutput]
    expected: dict[str, list[RequestOutput]]
    num_tokens: int

    def asked(self, kind: str) -> list[SamplingParams]:
        """One request for each of PROMPTS."""
        make = (KINDS | CONSTRAINTS)[kind]
        return [params(**{"max_tokens": self.num_tokens, **make(text)}) for text in self.usual]

    def counts(self) -> tuple[int, int]:
        """Drafts that were accepted, and all."""
        stats = self.drafting.stats()
        return stats["accepted_draft_tokens_total"], stats["draft_tokens_total"]


def engines_of(plain: LLM, drafting: LLM, backend: str) -> Engines:
    num_tokens = NUM_TOKENS if backend == "native" else NUM_TOKENS_OF_TORCH
    usual = plain.generate(PROMPTS, params(**VARIED | {"max_tokens": num_tokens}), use_tqdm=False)
    return Engines(plain, drafting, usual, {}, num_tokens)


@pytest.fixture(scope="module")
def opened(bundled_model_path: Path) -> Iterator[Callable[[str], Engines]]:
    """Engines by backend and depth, until the module ends: a fixture beside whose parameter a test has others is made
    for each test."""
    with ExitStack() as stack:

        @cache
        def engines_by(name: str) -> Engines:
            backend, _, depth = name.partition("-")
            options = {"attention_backend": backend, "queue_depth": int(depth), **OPTIONS}
            plain = stack.enter_context(LLM(str(bundled_model_path), **options))
            drafting = stack.enter_context(LLM(str(bundled_model_path), speculative_config=NGRAM, **options))
            return engines_of(plain, drafting, backend)

        yield engines_by


@pytest.fixture
def engines(request: pytest.FixtureRequest, opened: Callable[[str], Engines]) -> Engines:
    """With an empty prefix cache."""
    found = opened(request.param)
    for llm in (found.plain, found.drafting):
        llm.reset_prefix_cache()
    return found


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0, **fields})


VARIED: dict[str, Any] = {"temperature": 0.7, "seed": 5}
SEEDED = params(temperature=100.0, seed=3, allowed_token_ids=[67, 68])
"""So hot that the seed alone chooses between two tokens: on every processor the same drafts are right and wrong."""


def stopping(text: RequestOutput) -> dict[str, Any]:
    """A stop string that the text has in its second half, across two of its tokens, and not before."""
    words = text.outputs[0].text
    places = range(len(words) // 2, len(words) - 4)
    return {"stop": [next(words[at : at + 4] for at in places if words.index(words[at : at + 4]) == at)], **VARIED}


def ending(text: RequestOutput) -> dict[str, Any]:
    """A stop token that the text has behind its beginning, and not before."""
    tokens = text.outputs[0].token_ids
    stop = max(tokens, key=tokens.index)
    return {"stop_token_ids": [stop], **VARIED}


KINDS: dict[str, Callable[[RequestOutput], dict[str, Any]]] = {
    "stop strings": stopping,
    "stop tokens": ending,
    "penalties": lambda _: {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "samples": lambda _: {"n": 3, "temperature": 0.7, "seed": 1},
    "a budget": lambda _: {"max_tokens": 17},
    "a number of drafts": lambda _: {"num_speculative_tokens": 1},
}
BEHIND_A_MARK = StructuredOutputsParams(regex="[ab]{1,60}", start_after_token_ids=[67, 68, 68])
"""Drafts lie before the mark, across it and behind it."""
CALLS = r"(?: *(?:print|return|add)\([a-z]{1,3}(?:, [a-z0-9]{1,2})*\)\n){1,20}"
SCHEMA = {
    "type": "array",
    "minItems": 4,
    "maxItems": 9,
    "items": {"type": "object", "properties": {"name": {"enum": ["add", "sub"]}, "count": {"type": "integer"}}},
}
CONSTRAINTS: dict[str, Callable[[RequestOutput], dict[str, Any]]] = {
    "a pattern": lambda _: {"structured_outputs": StructuredOutputsParams(regex=CALLS)},
    "a schema, sampled": lambda _: {"structured_outputs": StructuredOutputsParams(json=SCHEMA), **VARIED},
    # Forced tokens come without steps of their own where no logprobs are asked for.
    "a schema that forces": lambda _: {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "logprobs": None},
    "a pattern and penalties": lambda _: {
        "structured_outputs": StructuredOutputsParams(regex=CALLS),
        "repetition_penalty": 1.2,
        "logit_bias": {40: 2.0, 41: 3.0},
        "min_tokens": 20,
        "bad_words": ["sub"],
        "n": 2,
        **VARIED,
    },
}


CELLS = [
    ("native-2", "stop strings", "found"),
    ("native-2", "penalties", "found"),
    ("native-2", "a number of drafts", "random"),
    ("native-2", "a pattern", "found"),
    ("native-2", "a schema that forces", "found"),
    ("native-1", "stop tokens", "found"),
    ("native-1", "samples", "random"),
    ("native-1", "a budget", "found"),
    ("native-1", "a schema, sampled", "found"),
    ("native-1", "a pattern and penalties", "found"),
    ("torch-1", "stop strings", "random"),
    ("torch-1", "penalties", "random"),
    ("torch-1", "a number of drafts", "found"),
    ("torch-1", "a pattern", "found"),
    ("torch-1", "a schema that forces", "found"),
    ("torch-2", "stop tokens", "random"),
    ("torch-2", "samples", "found"),
    ("torch-2", "a budget", "random"),
    ("torch-2", "a schema, sampled", "found"),
    ("torch-2", "a pattern and penalties", "found"),
]
"""Engines (backend and queue depth), kinds of requests, drafters. Each kind meets both drafters (a constraint: the one
that it has), both backends and both depths, each drafter both backends and depths, each backend both depths."""


def test_each_pair_is_tried() -> None:
    pairs = {pair for engine, *others in CELLS for pair in combinations((*engine.split("-"), *others), 2)}
    for backend, depth in product(("native", "torch"), "12"):
        assert (backend, depth) in pairs
        for other in (*KINDS, *CONSTRAINTS, "found", "random"):
            assert {(backend, other), (depth, other)} <= pairs
    assert pairs >= {*product(KINDS, ("found", "random")), *product(CONSTRAINTS, ("found",))}


@pytest.mark.parametrize(
    ("engines", "kind", "drafter"),
    all_but_long(CELLS, [cell for cell in CELLS if cell[0] == "native-2"]),
    indirect=["engines"],
)
def test_the_text_without_drafts(engines: Engines, kind: str, drafter: str) -> None:
    """Twice: the second time all prompts are in the prefix cache."""
    drafting = engines.drafting
    seeded = msgspec.structs.replace(SEEDED, max_tokens=engines.num_tokens)
    if kind in CONSTRAINTS:
        seeded = msgspec.structs.replace(seeded, structured_outputs=BEHIND_A_MARK)
    asked = [*engines.asked(kind), seeded]
    prompts = [*PROMPTS, "print"]
    if kind not in engines.expected:
        engines.expected[kind] = engines.plain.generate(prompts, asked, use_tqdm=False)
    expected = engines.expected[kind]
    scheduler: Any = drafting._client._core.scheduler  # type: ignore[attr-defined]
    scheduler._drafter = chosen = WorkerDrafts(NUM_DRAFTS) if drafter == "found" else KnownText(3, NUM_DRAFTS)
    if isinstance(chosen, KnownText):
        for output in expected:
            for sample in output.outputs:
                chosen.texts[*output.prompt_token_ids, sample.index] = list(sample.token_ids)
    for _ in range(2):
        accepted, drafts = engines.counts()
        hits = drafting.stats()["prefix_cache_hits_total"]
        found = drafting.generate(prompts, asked, use_tqdm=False)
        assert exact(found) == exact(expected)
        assert [[each.text for each in output.outputs] for output in found] == [
            [each.text for each in output.outputs] for output in expected
        ]
        assert [[(each.finish_reason, each.stop_reason) for each in output.outputs] for output in found] == [
            [(each.finish_reason, each.stop_reason) for each in output.outputs] for output in expected
        ]
        now_accepted, now_drafts = engines.counts()
        assert 0 < now_accepted - accepted < now_drafts - drafts
    assert drafting.stats()["prefix_cache_hits_total"] > hits


@pytest.mark.parametrize("engines", all_but_long(["native-2", "torch-1"], ["native-2"]), indirect=True)
def test_a_request_without_drafts(engines: Engines) -> None:
    before = engines.counts()
    asked = msgspec.structs.replace(SEEDED, num_speculative_tokens=0)
    found = engines.drafting.generate(["print"], asked, use_tqdm=False)
    assert engines.counts() == before
    assert exact(found) == exact(engines.plain.generate(["print"], SEEDED, use_tqdm=False))
