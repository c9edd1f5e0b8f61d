"""Chat templates that hang, die or do not compile: one request fails, and the server answers all others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire.config.options import EngineOptions
from quire.llm import LLM
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.jobs import TemplateLimits, TokenizerSource
from quire.tokenization.tokenizer import Tokenizer
from tests.processes import has_ended
from tests.server.conftest import NUM_BLOCKS, Served, serving
from tests.server.model_directory import write_model

TEMPLATE = (
    "{% if hang %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
HELLO = [{"role": "user", "content": "hello"}]
PATIENT = TemplateLimits(cpu_seconds=600.0, seconds=600.0, queue_seconds=600.0)


@pytest.fixture(scope="module", autouse=True)
def processes_of_engines() -> None:
    """Fresh ones: these tests look for their command lines."""


def model_with(template: str, path: Path) -> Path:
    write_model(path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return path


@pytest.fixture
def hanging_model(tmp_path: Path) -> Path:
    return model_with(TEMPLATE, tmp_path / "model")


def limit(monkeypatch: pytest.MonkeyPatch, limits: TemplateLimits) -> None:
    def of(tokenizer: Tokenizer, source: TokenizerSource | None = None) -> ChatTemplate:
        return ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens, limits=limits, tokenizer=source)

    monkeypatch.setattr(ChatTemplate, "of", of)


def renderers() -> list[psutil.Process]:
    """The processes of this one that render."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "quire: helper" in child.cmdline()
    ]


async def until_rendering(before: list[psutil.Process]) -> psutil.Process:
    while not (found := new_renderers(before)):
        await asyncio.sleep(0.005)
    return found[0]


def new_renderers(before: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are not the garbage of another test."""
    return [process for process in renderers() if process not in before]


async def chat(served: Served, **fields: Any) -> httpx.Response:
    body = {"messages": HELLO, "max_tokens": 2, **fields}
    return await served.client.post("/v1/chat/completions", json=body)


async def test_a_template_that_hangs_holds_up_nothing_but_its_request(
    hanging_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, PATIENT)
    before = renderers()
    async with asyncio.timeout(300), serving(hanging_model) as served:
        hanging = asyncio.create_task(chat(served, chat_template_kwargs={"hang": True}))
        process = await until_rendering(before)
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.client.post("/v1/completions", json={"prompt": "abc"})).status_code == 200
        assert (await served.client.post("/tokenize", json={"prompt": "abc"})).status_code == 200
        assert not hanging.done()
        os.kill(process.pid, signal.SIGKILL)
        response = await hanging
        assert response.status_code == 500
        error = response.json()["error"]
        assert error["code"] == "chat_template_error"
        assert error["message"] == "the process that renders chat templates was killed by signal 9 (Killed)"
        assert (await chat(served)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_template_is_stopped_at_its_limit(
    path: str, hanging_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, TemplateLimits(cpu_seconds=0.1, seconds=60.0))
    async with serving(hanging_model) as served:
        body = {"messages": HELLO, "chat_template_kwargs": {"hang": True}}
        response = await served.client.post(path, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "messages"
        assert error["message"].startswith("the model's chat template was stopped: it took too long")
        assert (await chat(served)).status_code == 200


async def test_the_process_comes_with_the_first_conversation_and_leaves_with_the_server(hanging_model: Path) -> None:
    before = renderers()
    async with serving(hanging_model) as served:
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.client.post("/v1/completions", json={"prompt": "abc"})).status_code == 200
        assert new_renderers(before) == []
        for _ in range(3):
            assert (await chat(served)).status_code == 200
        (process,) = new_renderers(before)
    assert has_ended(process)


@pytest.mark.parametrize("template", ["{% for %}", "{{ 'unclosed }}", "{% if x %}" * 500, "\ud800"])
async def test_a_template_that_does_not_compile(template: str, tmp_path: Path) -> None:
    """The server starts all the same, since completions need no template; the first conversation says why."""
    async with serving(model_with(template, tmp_path / "model")) as served:
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.client.post("/v1/completions", json={"prompt": "abc"})).status_code == 200
        response = await chat(served)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("the model's chat template is not valid: ")


def test_llm_renders_in_such_a_process_too(model_path: Path) -> None:
    before = renderers()
    options = EngineOptions(model=str(model_path), num_blocks_override=NUM_BLOCKS)
    with LLM.from_options(options, executor="tests.server.executor:readable") as llm:
        assert new_renderers(before) == []
        llm.chat(HELLO, use_tqdm=False)
        (process,) = new_renderers(before)
        llm.chat([HELLO, HELLO], use_tqdm=False)
        assert new_renderers(before) == [process]
    assert has_ended(process)
