"""The page over a server whose model is a list of streamed answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dashboard.chromium import Chromium
from tests.dashboard.frames import frame_of
from tests.dashboard.test_page_frames import Answers, shown
from tests.fakes.core import CoreDriver, make_config

TRAP = """
window.hits = [];
for (const name of ["hit", "alert", "confirm", "prompt", "open", "print"]) window[name] = () => window.hits.push(name);
addEventListener("securitypolicyviolation", (event) => window.hits.push(event.violatedDirective));
"""
IDLE = "document.querySelector('#halt').hidden && !document.querySelector('.busy')"
LOAD = """(async (chats) => {
    const files = new DataTransfer();
    files.items.add(new File([JSON.stringify(chats)], "chats.json"));
    const field = document.querySelector("#import-file");
    field.files = files.files;
    field.dispatchEvent(new Event("change"));
    while (field.files.length > 0) await new Promise((done) => setTimeout(done, 5));
})"""


def stream(*deltas: dict[str, Any]) -> bytes:
    """A streamed answer."""
    ends = [None] * (len(deltas) - 1) + ["stop"]
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
        for delta, end in zip(deltas, ends, strict=True)
    ]
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


class Model:
    """Answers, each given once, and what was asked."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.asked: list[Any] = []

    def __call__(self, _path: str, body: bytes) -> bytes:
        self.asked.append(json.loads(body))
        return self.answers.pop(0)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def opened(tab: Chromium, model: Model) -> Iterator[Chromium]:
    """The page, loaded once for all tests here."""
    frame = frame_of(CoreDriver(make_config()))
    frame.task = "chat"
    trap = tab.call("Page.addScriptToEvaluateOnNewDocument", source=TRAP)["identifier"]
    answers: Answers = {"/v1/chat/completions": model}
    with shown(tab, frame, answers, view=""):
        tab.wait_for("!document.querySelector('#chat-view').hidden")
        yield tab
        tab.evaluate("localStorage.clear()")
    tab.call("Page.removeScriptToEvaluateOnNewDocument", identifier=trap)


def load(tab: Chromium, *messages: dict[str, Any]) -> None:
    """Import one conversation, which is then the open one."""
    tab.evaluate(f"{LOAD}({json.dumps([{'messages': list(messages)}])})")


def redraw(tab: Chromium, text: str) -> None:
    """Let the open conversation be one answer, as another tab of the browser would."""
    tab.evaluate(
        "(() => { const [{id}] = JSON.parse(localStorage.getItem('quire-chats'));"
        f" localStorage.setItem('quire-chats', JSON.stringify([{{id, messages: [{json.dumps(said(text))}]}}]));"
        " dispatchEvent(new StorageEvent('storage', {key: 'quire-chats'})); })()"
    )


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def send(tab: Chromium, text: str) -> None:
    tab.evaluate(
        f"document.querySelector('#message').value = {json.dumps(text)};"
        " document.querySelector('#composer').requestSubmit()"
    )
    tab.wait_for(IDLE)
