"""No token outside of the grammar: texts drawn at random by the masks alone follow their schemas, as another library
understands these, and no token that a mask forbids would have been accepted."""

from __future__ import annotations

import json

import jsonschema
import pytest

from quire.errors import UserError
from quire.structured_outputs_params import StructuredOutputsParams
from quire.tokenization.tokenizer import load_tokenizer
from tests.long import all_but_long
from tests.structured_output.schemas import Sampler, random_document

NUM_SCHEMAS, PARTS = 1000, 4


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(load_tokenizer("bundled"), [0])


@pytest.mark.parametrize("part", all_but_long(range(PARTS), [0]))
def test_texts_follow_their_schemas(sampler: Sampler, part: int) -> None:
    num_finished = num_refused = 0
    for seed in range(part * NUM_SCHEMAS // PARTS, (part + 1) * NUM_SCHEMAS // PARTS):
        schema = random_document(seed)
        try:
            params = StructuredOutputsParams(json=schema, disable_any_whitespace=seed % 3 != 0)
            text, is_finished = sampler.draw(params, seed)
        except UserError:
            num_refused += 1
            continue
        num_finished += is_finished
        if is_finished:
            assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), (schema, text)
    assert num_refused <= 0.1 * NUM_SCHEMAS / PARTS  # schemas that nothing satisfies, for example
    assert num_finished >= 0.8 * NUM_SCHEMAS / PARTS


def test_forbidden_tokens_are_not_accepted(sampler: Sampler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    allowed = set(sampler.allowed(sampler.matcher(params)).tolist())
    accepted = {token for token in range(0, sampler.vocab_size, 7) if sampler.matcher(params).accept(token)}
    assert accepted <= allowed
