"""The examples of README.md and docs/, run with the bundled model: what they print is no repetition.

Each computes in float32, in which every processor draws the same tokens.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

import quire
from quire import LLM, RequestOutput
from quire.cli.main import main
from quire.cli.vllm import main as vllm_main
from tests.architecture.source import ROOT
from tests.cli.examples import (
    ADDRESS,
    DOCUMENTS,
    NOT_RUN,
    PYTHON_NOT_CHECKED,
    PYTHON_NOT_RUN,
    README,
    Block,
    blocks,
    is_serve,
    shown,
    text_of,
    why_not_run,
)

FLOAT32 = {"matmul_precision": "float32", "kv_cache_dtype": "float32"}
FLAGS = ["--matmul-precision", "float32", "--kv-cache-dtype", "float32"]
LOOP = re.compile(r"(.{1,40}?)\1{3}", re.DOTALL)
"""Some text four times in a row."""


def is_call(command: str) -> bool:
    return command.startswith("curl ")


def is_run(command: str) -> bool:
    return "quire run " in command


def is_run_or_writes(command: str) -> bool:
    return is_run(command) or re.match(r"(?:echo|printf) .*>", command) is not None


def is_plan(command: str) -> bool:
    """Plans of shapes that are built in, on devices that are."""
    return command.startswith("quire plan ") and ".json" not in command and "path/to" not in command


def repeats(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip(' "\n')]
    return LOOP.search(text.replace(" ", "")) is not None or len(set(lines)) < len(lines)


def check(texts: list[str]) -> None:
    """Some text is there, none repeats itself, and JSON has content."""
    assert texts
    for text in texts:
        assert text.strip()
        assert not repeats(text), text
        assert not text.startswith("{") or json.loads(text), text


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server that serves the bundled model."""
    command = [sys.executable, "-m", "quire", "serve", *FLAGS, "--kv-cache-memory", "32MiB", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    yield process.stdout.readline().split(" on ")[1].split()[0]
    process.terminate()
    process.stdout.read()
    assert process.wait() == 0


def answers(command: str, server: str) -> list[str]:
    """The texts that a server answers to a call by curl."""
    _, *arguments = shlex.split(command.replace("\\\n", " "))
    assert arguments.pop(0) == "-s"
    address = arguments.pop(0)
    assert address.startswith(ADDRESS)
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert options.keys() == {"-H", "-d"}
    name, _, value = options["-H"].partition(": ")
    response = httpx.post(address.replace(ADDRESS, server), headers={name: value}, content=options["-d"], timeout=60)
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def test_what_counts_as_a_repetition() -> None:
    assert repeats("LZMAGGGGGG")
    assert repeats("    b = b\n    c = c\n    b = b\n")
    assert not repeats('    """\n    Return it.\n    """\n    return path\n')
    with pytest.raises(AssertionError):
        check(["{     }"])


def test_what_counts_as_a_command() -> None:
    assert Block("sh", "a 'b\n  c' \\\n  d  # e\nf\n").commands() == ["a 'b\n  c' \\\n  d  # e", "f"]
    assert Block("sh", "$ a \\\n  b\noutput\n$ c\n").commands() == ["a \\\n  b", "c"]
    assert Block("text", "a\n").commands() == []


def test_few_commands_are_run_by_no_check() -> None:
    """`make check-docs` runs the others."""
    commands = [command for _, command in shown(lambda command: why_not_run(command) is not None)]
    assert len(commands) + len(PYTHON_NOT_CHECKED) <= 20, commands
    assert set(PYTHON_NOT_CHECKED) <= PYTHON_NOT_RUN.keys()
    assert [start for start in NOT_RUN if not any(each.startswith(start) for each in commands)] == []


def test_each_block_says_what_it_is() -> None:
    """`sh` for commands, `text` for output: no check runs a block without a language."""
    assert [document for document in DOCUMENTS if re.search(r"^```\n[^`]*?^```$", text_of(document), re.M)] == []


@pytest.mark.parametrize(("document", "command"), shown(is_call))
def test_calls_of_a_server(document: str, command: str, server: str) -> None:
    texts = answers(command, server)
    check(texts)
    if document == README:
        assert f"```text\n{texts[0]}\n```" in text_of(README), "the answer as it is printed"


KEEP = r"""quire() { printf '%s\0' "$@" >words; cat >input; }
"""
"""A `quire` for bash that keeps its arguments and its standard input."""


@pytest.mark.parametrize("document", sorted({document for document, _ in shown(is_run)}))
def test_runs_of_the_command_line(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the commands that write their files, in the order of the document. bash expands the lines."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64), "red").save("picture.png")  # a reader's own
    texts = []
    for _, command in [each for each in shown(is_run_or_writes) if each[0] == document]:
        subprocess.run(["bash", "-c", KEEP + command], stdin=subprocess.DEVNULL, check=True)
        if not is_run(command):
            continue
        words = Path("words").read_bytes().decode().split("\0")[:-1]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path("input").read_bytes())))
        assert main([*words, *FLAGS]) == 0
        text = capsys.readouterr().out
        texts.append(json.loads(text)["outputs"][0]["text"] if "--json" in words else text)
    check(texts)


@pytest.mark.parametrize(("document", "command"), shown(is_serve))
def test_options_of_servers(
    document: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is taken, or refused in the words that the document shows. No server starts."""
    for module in ("serve", "vllm"):
        monkeypatch.setattr(f"quire.cli.{module}.start", lambda options, settings: 0)
    program, *words = shlex.split(command.removeprefix("python -m "), comments=True)
    status = main(words) if program == "quire" else vllm_main(words)
    error = capsys.readouterr().err.strip()
    assert status == 0 or (error and error in text_of(document)), error


@pytest.mark.parametrize(("document", "command"), shown(is_plan))
def test_plans(document: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command, comments=True)[1:]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if any(b.language == "python" for b in blocks(each))])
def test_programs(document: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a document in order, as one program. The model does not chat, so that chats are not read."""
    if document in PYTHON_NOT_RUN:
        return
    texts = []

    class InFloat32(LLM):
        def __init__(self, **options: Any) -> None:
            super().__init__(**FLOAT32, **options)

        def generate(self, *arguments: Any, **options: Any) -> list[RequestOutput]:
            outputs = super().generate(*arguments, **options)
            texts.extend(each.text for output in outputs for each in output.outputs[:2])
            return outputs

    monkeypatch.setattr(quire, "LLM", InFloat32)
    names: dict[str, Any] = {}
    for block in blocks(document):
        if block.language == "python":
            exec(block.text.replace(ADDRESS, server), names)
    if texts:
        check(texts)


def test_the_prompt_of_the_live_page(server: str) -> None:
    """The request that its form sends before a reader changes it."""
    page = text_of("quire/dashboard/page/index.html")
    [prompt] = re.findall(r'<textarea id="prompt"[^>]*>(.*?)</textarea>', page, re.DOTALL)
    fields = dict(re.findall(r'<input id="([\w-]+)" type="number"[^>]* value="([\d.]+)"', page))
    assert fields.keys() == {"n", "max-tokens", "temperature", "seed"}
    body = {name.replace("-", "_"): json.loads(value) for name, value in fields.items()}
    response = httpx.post(f"{server}/v1/completions", json={"prompt": prompt, **body}, timeout=60)
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert len(texts) == body["n"]
    check(texts)
