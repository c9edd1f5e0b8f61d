"""The runner of clients: what it takes from their processes, and what the scripted model says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import pytest
from tokenizers import Tokenizer

from benchmarks.clients.__main__ import Result, page, run_script
from benchmarks.clients.clients import CLIENTS, Client
from benchmarks.clients.environments import CASES, Environment
from benchmarks.clients.scripted import Script
from benchmarks.clients.servers import Server
from quire.sampling_params import SamplingParams
from quire.step import SequenceSampling
from tests.server.executor import END_TOKEN
from tests.server.model_directory import write_model

SCRIPT = """
import os
print('noise')
print('{"case": "good", "reason": null}')
print('{"case": "bad", "reason": "it\\\\nis ' + os.environ["QUIRE_MODEL"] + '"}')
raise SystemExit(3)
"""


class _ThisPython:
    packages = ("some==1",)

    def command(self, folder: Path, script: str) -> list[str]:
        return [sys.executable, "-c", SCRIPT]


def test_results_of_a_process(tmp_path: Path) -> None:
    client = Client("some", cast(Environment, _ThisPython()), {})
    (tmp_path / "some").mkdir()
    (tmp_path / "logs").mkdir()
    results = list(run_script(client, "x.py", Server("m", "http://x"), tmp_path))
    assert results[:2] == [Result("some", "good", None), Result("some", "bad", "it is m")]
    assert "status 3" in (results[2].reason or "")
    assert "| some | some==1 |  | 1 of 3, **bad: it is m**" in page([client], results)


def test_every_script_belongs_to_a_client() -> None:
    named = [script for client in CLIENTS for script in client.scripts]
    files = {path.name for path in CASES.iterdir() if path.suffix in (".py", ".mjs")}
    assert sorted(named) == sorted(files - {"harness.py", "harness.mjs", "openai_common.py"})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_model(tmp_path_factory.mktemp("models") / "tiny")
    return Tokenizer.from_file(str(path / "tokenizer.json"))


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        ("no script<|end|><|start|>assistant: ", "ok"),
        ("say ~~one~~<|end|><|start|>assistant: ", "one"),
        ("~~one||two~~<|start|>assistant: one<|end|>user: go on<|end|><|start|>assistant: ", "two"),
        ("~~old~~<|start|>assistant: old<|end|>user: ~~new||more~~<|end|><|start|>assistant: ", "new"),
    ],
)
def test_what_the_scripted_model_says(tokenizer: Tokenizer, conversation: str, expected: str) -> None:
    script, sampling = Script(tokenizer), SequenceSampling(SamplingParams(), 0, [], [])
    token_ids = tokenizer.encode(conversation, add_special_tokens=False).ids
    said: list[int] = []
    while (token := script.choose(sampling, len(said), token_ids + said)) != END_TOKEN:
        said.append(token)
    assert tokenizer.decode(said) == expected
