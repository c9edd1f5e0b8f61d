"""The page under axe-core's rules, and its layout from telephones to wide screens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import msgspec
import pytest

from quire.dashboard.recent import EndedRequest, Percentiles, Recent
from quire.server.live import KVHistory
from quire.server.live_admin import LogLine, LogLines
from tests.dashboard.chromium import Chromium
from tests.dashboard.frames import frame_of
from tests.dashboard.test_page_frames import Answers, pressed_driver, shown
from tests.long import all_but_long

pytestmark = pytest.mark.browser
VIEWS = ("chat", "completion", "embed", "server")
WIDTHS = (420, 768, 1000, 1280, 1920, 2560)
LINES = [LogLine(n, 1.7e9 + n, level, "quire.x", "w" * 200, None) for n, level in enumerate(("INFO", "ERROR"), 1)]
ADMIN: Answers = {
    "/debug/kv/history": lambda *_: msgspec.json.encode(KVHistory([], is_admin=True)),
    "/debug/log": lambda path, _: msgspec.json.encode(LogLines([] if "after=2" in path else LINES, "p")),
}
PROSE = (
    "# Title\n\nSome **bold** text, `code`, a [link](https://example.org/a) and\n\n```py\nx = 1  # "
    + "long " * 60
    + "\n```\n\n"
    "| a | b |\n|---|---|\n| " + "wide" * 60 + " | 2 |\n\n> quote\n\n1. one\n2. two\n\n" + "unbroken" * 60
)
CHATS = [
    {
        "messages": [
            {"role": "user", "content": "Hello " + "x" * 300},
            {
                "role": "assistant",
                "content": PROSE,
                "reasoning": "hm",
                "calls": [{"id": "c", "name": "f", "arguments": '{"a": 1}'}],
                "note": "12 tokens",
                "error": "it failed",
            },
            {"role": "tool", "content": "wide" * 60, "callId": "c"},
            {"role": "system", "content": "s"},
        ]
    }
]
AXE = """(async () => {
    const found = await axe.run(document, {resultTypes: ["violations"]});
    const told = (node) => `${node.target} ${node.failureSummary}`;
    return found.violations.map(({id, nodes}) => `${id}: ${nodes.map(told).join("; ")}`);
})()"""


def crowded_frame(task: str) -> Any:
    """A frame of everything that the page can show."""
    driver = pressed_driver(5, num_blocks=10, block_size=4, max_model_len=32)
    while driver.core.stats().num_preempted == 0:
        driver.step()
    frame = frame_of(driver)
    frame.task, frame.model = task, "models/" + "long-" * 20 + "name"
    frame.stats.num_adapter_slots, frame.stats.running_adapters = 8, ["sql"]
    frame.stats.max_encoder_tokens = 5000
    frame.recent = Recent([EndedRequest("a", ["stop"], 12, 8, 64, 0.04, 1.25)], Percentiles(0.04, 0.5))
    frame.outcomes, frame.num_client_errors = {"stop": 1, "rate_limit": 2}, 3
    return frame


@pytest.fixture
def view(tab: Chromium, request: pytest.FixtureRequest) -> Iterator[Chromium]:
    """The page at a view, with all that folds open."""
    name = request.param
    with shown(tab, crowded_frame("chat" if name == "server" else name), ADMIN, "#server" if name == "server" else ""):
        tab.evaluate(f"localStorage.setItem('quire-chats', {json.dumps(json.dumps(CHATS))})")
        tab.call("Page.reload")
        tab.wait_for("document.querySelector('#link')?.dataset.state === 'live'")
        tab.evaluate("document.querySelector('.chat-name').click()")
        tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        tab.evaluate("document.querySelector('#key-form').hidden = false")
        if name == "chat":  # a message that is changed, and a way back
            edit = "document.querySelectorAll('.message.{} .redo')[0].click()"
            tab.evaluate(edit.format("system"))
            tab.evaluate("document.querySelector('.edit .quiet').click()")
            tab.evaluate(edit.format("user"))
        if name == "server":
            tab.wait_for("document.querySelector('.line') && document.querySelector('.end')")
        yield tab
        tab.evaluate("localStorage.clear()")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", all_but_long(VIEWS, ("chat", "server")), indirect=True)
def test_axe_finds_nothing(view: Chromium, theme: str) -> None:
    while view.evaluate("document.querySelector('#theme').innerText") != f"Theme: {theme}":
        view.evaluate("document.querySelector('#theme').click()")
    view.evaluate(files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8") + ";0")
    assert view.evaluate("axe.run !== undefined && document.images.length === 0")
    assert view.evaluate(AXE) == []


@pytest.mark.parametrize("view", all_but_long(VIEWS, ("chat", "server")), indirect=True)
def test_nothing_is_wider_than_the_screen(view: Chromium) -> None:
    for width in WIDTHS:
        view.set_size(width, 900, mobile=width < 600)
        view.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        hidden = view.evaluate(f"""[...document.querySelectorAll('main:not([hidden]) button, header button, input')]
            .filter((each) => each.offsetParent !== null && each.getBoundingClientRect().right > {width} + 1)
            .map((each) => each.outerHTML)""")
        assert hidden == [], width
