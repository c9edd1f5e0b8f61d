"""The examples of the documents, run: the bundled model's answers are no repetitions."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from tests.architecture.source import ROOT

LOOP = re.compile(r"(.{1,40}?)\1{3}", re.DOTALL)
"""Some text four times in a row."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(num_threads=1)
    yield made
    made.shutdown()


def bodies(document: str) -> Iterator[dict]:
    """The JSON bodies of a document's calls of /v1/completions by curl that ask for greedy tokens."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for found in re.findall(r"/v1/completions [^\n]*?(?:\\\n\s*)-d '(.*?)'\n", text, re.DOTALL):
        body = json.loads(found)
        if body.get("temperature") == 0:
            yield body


def repeats(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip(' "\n')]
    return LOOP.search(text.replace(" ", "")) is not None or len(set(lines)) < len(lines)


def test_what_counts_as_a_repetition() -> None:
    assert repeats("LZMAGGGGGG")
    assert repeats("    b = b\n    c = c\n    b = b\n")
    assert not repeats('    """\n    Return it.\n    """\n    return path\n')


def test_the_first_calls_of_the_readme(llm: LLM) -> None:
    found = list(bodies("README.md"))
    assert len(found) == 2
    for body in found:
        [output] = llm.generate(body["prompt"], SamplingParams(temperature=0, max_tokens=body["max_tokens"]))
        assert "return os.path" in output.outputs[0].text
        assert not repeats(output.outputs[0].text)


def test_the_run_of_the_command_line(llm: LLM) -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    [quoted, options] = re.findall(r"^quire run \$'([^']*)' (.*)$", text, re.MULTILINE)[0]
    words = shlex.split(options)
    params = SamplingParams(temperature=0, max_tokens=int(words[words.index("--max-tokens") + 1]))
    [output] = llm.generate(quoted.replace("\\n", "\n"), params)
    assert not repeats(output.outputs[0].text)


def test_the_constrained_calls(llm: LLM) -> None:
    page = (ROOT / "docs" / "structured-output.md").read_text(encoding="utf-8")
    [body] = bodies("docs/structured-output.md")
    schema = body["response_format"]["json_schema"]["schema"]
    params = SamplingParams(
        temperature=0, max_tokens=body["max_tokens"], structured_outputs=StructuredOutputsParams(json=schema)
    )
    [output] = llm.generate(body["prompt"], params)
    assert isinstance(json.loads(output.outputs[0].text)["age"], int)
    assert output.outputs[0].finish_reason == "stop"
    program = re.findall(r"```python\n(from quire import LLM.*?)```", page, re.DOTALL)[0]
    assert f"schema = {json.dumps(schema)}" in program
    assert json.dumps(body["prompt"]) in program
