"""Structured outputs through whole engines with the bundled model: every completion is in its language, whatever else
the request asks for and whatever runs beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import jsonschema
import msgspec
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams, UserError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "long tag"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
PROMPTS = ["import os\n", "def read(path):\n    return ", "x = ", "{"]


@pytest.fixture(scope="module", params=[1, 2], ids=["depth 1", "depth 2"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(queue_depth=request.param, num_blocks_override=64, max_num_seqs=16, num_threads=1) as engine:
        yield engine
        stats = engine.stats()
        assert stats["num_used_blocks"] == stats["num_running"] == 0


def sampled(structured: StructuredOutputsParams, **options) -> SamplingParams:  # type: ignore[no-untyped-def]
    return SamplingParams(
        **{"temperature": 1.0, "seed": 5, "max_tokens": 100, **options}, structured_outputs=structured
    )


def test_json_schema(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, [sampled(JSON, n=2, seed=number) for number in range(4)], use_tqdm=False)
    for output in outputs:
        for completion in output.outputs:
            assert completion.finish_reason == "stop"
            jsonschema.validate(json.loads(completion.text), SCHEMA)
            assert completion.text == llm.get_tokenizer().decode(completion.token_ids)


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": r"^\d{3}-[a-f]{2,4}$"}, r"\d{3}-[a-f]{2,4}"),
        ({"choice": ["yes", "no", "naïve ☃"]}, "yes|no|naïve ☃"),
        ({"grammar": 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-z]{1,5}/'}, "<[a-z]{1,5}(,[a-z]{1,5})*>"),
        ({"grammar": 'root ::= "(" num ")"\nnum ::= [0-9] | [0-9] [0-9]'}, r"\([0-9]{1,2}\)"),
    ],
)
def test_other_languages(llm: LLM, structured: dict[str, object], pattern: str) -> None:
    params = sampled(StructuredOutputsParams(**structured), n=4, max_tokens=200)  # type: ignore[arg-type]
    [output] = llm.generate(["x = "], params, use_tqdm=False)
    for completion in output.outputs:
        assert completion.finish_reason == "stop"
        assert re.fullmatch(pattern, completion.text), completion.text


def test_forced_tokens_change_nothing(llm: LLM) -> None:
    """Runs of forced tokens are computed in one step, or in two with two in flight; with log-probabilities never.
    Penalties and later draws depend on all tokens before."""
    for options in ({}, {"presence_penalty": 1.5, "repetition_penalty": 1.3}, {"n": 2, "top_k": 20}):
        params = [sampled(JSON, **options), sampled(JSON, **options, logprobs=1)]
        plain, told = llm.generate([PROMPTS[0], PROMPTS[0]], params, use_tqdm=False)
        assert [each.token_ids for each in plain.outputs] == [each.token_ids for each in told.outputs]
        assert all(each.logprobs is not None and len(each.logprobs) == len(each.token_ids) for each in told.outputs)
    before = llm.stats()
    [output] = llm.generate([PROMPTS[0]], sampled(JSON), use_tqdm=False)
    num_steps = llm.stats()["steps_total"] - before["steps_total"]
    num_tokens = len(output.outputs[0].token_ids)
    assert num_steps < num_tokens - 5


def test_beams_beside_others(llm: LLM) -> None:
    """Their texts end with an end token, or with the text itself where none counts."""
    kinds = StructuredOutputsParams(json={"enum": ["one", "two", {"three": [1, 2.5]}]}, disable_any_whitespace=True)
    beams = [
        SamplingParams(
            use_beam_search=True, n=3, best_of=4, max_tokens=30, structured_outputs=each, ignore_eos=ignores_end
        )
        for each in (kinds, StructuredOutputsParams(regex="[a-z]{3}(-[0-9])?"))
        for ignores_end in (False, True)
    ]
    alone = [llm.generate(["x = "], params, use_tqdm=False)[0].outputs for params in beams]
    outputs = llm.generate(["x = "] * 5, [*beams, sampled(JSON)], use_tqdm=False)
    assert [output.outputs for output in outputs[:4]] == alone
    ends = llm.model_config.eos_token_ids
    for params, completions in zip(beams, alone, strict=True):
        assert completions[0].text != completions[1].text
        for completion in completions:
            assert completion.finish_reason == "stop"
            assert (completion.token_ids[-1] in ends) == (not params.ignore_eos)
            if params in beams[:2]:
                assert json.loads(completion.text) in ["one", "two", {"three": [1, 2.5]}]
            else:
                assert re.fullmatch("[a-z]{3}(-[0-9])?", completion.text)


def test_unconstrained_neighbours_get_the_tokens_they_would_have_had(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, seed=11, max_tokens=24, logprobs=2)
    [alone] = llm.generate(["import re\n"], free, use_tqdm=False)
    mixed = llm.generate(
        [PROMPTS[0], "import re\n", PROMPTS[1]], [sampled(JSON, n=3), free, sampled(JSON)], use_tqdm=False
    )
    assert mixed[1].outputs == alone.outputs


def test_the_grammar_wins_over_rules_that_would_end_or_prolong_the_text(llm: LLM) -> None:
    a_or_more = StructuredOutputsParams(regex="a{1,6}")
    cases = [
        sampled(a_or_more, ignore_eos=True),
        sampled(a_or_more, min_tokens=50),
        sampled(a_or_more, bad_words=["a", "aa", "aaa"]),
        sampled(a_or_more, logit_bias=dict.fromkeys(range(3, 100), -100.0)),
        sampled(a_or_more, presence_penalty=2.0, repetition_penalty=5.0, min_p=0.2, top_k=3),
    ]
    outputs = llm.generate(["x"] * len(cases), cases, use_tqdm=False)
    for output in outputs:
        assert re.fullmatch("a{1,6}", output.outputs[0].text)
        assert output.outputs[0].finish_reason == "stop"
    assert outputs[0].outputs[0].text == "a" * 6  # no other end was possible
    assert outputs[1].outputs[0].text == "a" * 6


def test_an_empty_intersection_is_an_error_of_that_request_alone(llm: LLM) -> None:
    a_only = StructuredOutputsParams(regex="a+")
    outputs = llm.generate(["x", "x"], [sampled(a_only, allowed_token_ids=[500]), sampled(JSON)], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "allowed_token_ids" in str(outputs[0].outputs[0].stop_reason)
    assert outputs[1].outputs[0].finish_reason == "stop"


def test_stop_strings_and_best_of(llm: LLM) -> None:
    outputs = llm.generate(
        ["x", "x"],
        [
            sampled(StructuredOutputsParams(regex="[a-z]{4}=[0-9]{9}"), stop="="),
            sampled(JSON, best_of=4, n=2),
        ],
        use_tqdm=False,
    )
    assert re.fullmatch("[a-z]{4}", outputs[0].outputs[0].text)
    inside = sampled(StructuredOutputsParams(regex="[a-z]{4}=forced text[0-9]{3}"), stop="rced", min_tokens=2)
    told = msgspec.structs.replace(inside, logprobs=0)
    cut, expected = (each.outputs[0] for each in llm.generate(["x", "x"], [inside, told], use_tqdm=False))
    assert re.fullmatch("[a-z]{4}=fo", cut.text)
    assert (cut.token_ids, cut.finish_reason, cut.stop_reason) == (expected.token_ids, "stop", "rced")
    assert len(outputs[1].outputs) == 2
    for completion in outputs[1].outputs:
        jsonschema.validate(json.loads(completion.text), SCHEMA)


def test_the_constraint_begins_behind_given_tokens(llm: LLM) -> None:
    """As behind the end of a model's reasoning. The tokens that the model generates freely are taken as the mark."""
    [free] = llm.generate(["import os\n"], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    mark = free.outputs[0].token_ids[3:5]
    begins = free.outputs[0].token_ids[:5]
    structured = StructuredOutputsParams(regex="[0-9]{3}", start_after_token_ids=mark)
    [output] = llm.generate(["import os\n"], sampled(structured, temperature=0.0), use_tqdm=False)
    assert output.outputs[0].token_ids[:5] == begins
    assert re.fullmatch("[0-9]{3}", llm.get_tokenizer().decode(output.outputs[0].token_ids[5:]))
    assert output.outputs[0].finish_reason == "stop"


def test_bad_constraints_are_refused_before_anything_runs(llm: LLM) -> None:
    for wrong in (
        {"json": {"type": "nothing"}},
        {"json": "{"},
        {"regex": "("},
        {"regex": "a(?=b)"},
        {"regex": "a^b"},
        {"grammar": "start: missing"},
    ):
        with pytest.raises(UserError) as caught:
            llm.generate("x", sampled(StructuredOutputsParams(**wrong)), use_tqdm=False)  # type: ignore[arg-type]
        assert caught.value.param == "structured_outputs"
        assert "\n" not in caught.value.message


@pytest.mark.long
def test_two_ranks() -> None:
    """Each rank gets the masks, and a text that waits for its rehearsal beside one that runs ends in its language."""
    constraints = [
        JSON,
        StructuredOutputsParams(regex="[a-z]{3,9}-[0-9]{4}"),
        StructuredOutputsParams(choice=["yes", "no"]),
    ]
    with LLM(tensor_parallel_size=2, num_blocks_override=64, max_num_seqs=16, num_threads=1) as llm:
        outputs = llm.generate(PROMPTS[:3], [sampled(each, n=2) for each in constraints], use_tqdm=False)
    made = [[completion.text for completion in output.outputs] for output in outputs]
    for text in made[0]:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert all(re.fullmatch("[a-z]{3,9}-[0-9]{4}", text) for text in made[1])
    assert set(made[2]) <= {"yes", "no"}
