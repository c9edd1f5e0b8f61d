"""The chat of the page, in a real browser over a server whose model copies what stands behind "=" in the prompt."""

from __future__ import annotations

import ast
import base64
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.server.live import task_of
from quire.server.settings import ServerSettings
from tests.dashboard.chromium import Chromium
from tests.dashboard.fake_model import Model, model, opened, send, stream
from tests.dashboard.test_page import text
from tests.multimodal.pictures import draw, encoded
from tests.server.conftest import Served, serving
from tests.server.serve_process import Process

__all__ = ["model", "opened"]

pytestmark = pytest.mark.browser
LAST = "document.querySelector('.message:last-child')"
PROSE = f"{LAST}.querySelector(':scope > .prose')"
PICTURE = base64.b64encode(encoded(draw(1, size=(8, 8)))).decode()
IDLE = "document.querySelector('#halt').hidden"


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[Process]:
    process = Process(model_path, executor="readable", served_model_name=["tiny<b>"], shutdown_timeout=1).wait_ready()
    yield process
    process.signal(signal.SIGTERM)
    assert process.finish()[0] == 0


@pytest.fixture
def page(tab: Chromium, server: Process) -> Iterator[Chromium]:
    """The page with no conversation; at the end no script has failed and the policy was not offended."""
    tab.set_size(1280, 900)
    show(tab, server, [])
    tab.problems.clear()
    yield tab
    assert tab.problems == []


def show(tab: Chromium, server: Process, chats: list[Any]) -> None:
    """Open the page over stored conversations."""
    tab.open(f"{server.url}/health")
    tab.evaluate(f"sessionStorage.clear(); localStorage.setItem('quire-chats', {json.dumps(json.dumps(chats))})")
    tab.open(f"{server.url}/")
    tab.wait_for("!document.querySelector('#chat-view').hidden")


def talk(*texts: str, **fields: Any) -> dict[str, Any]:
    """A stored conversation: the user's and the assistant's texts by turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], **fields}


def fill(tab: Chromium, selector: str, value: str) -> None:
    tab.evaluate(
        f"(() => {{ const field = document.querySelector({json.dumps(selector)}); field.value = {json.dumps(value)};"
        " field.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def click(tab: Chromium, selector: str) -> None:
    tab.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


def ask(tab: Chromium, message: str) -> None:
    fill(tab, "#message", message)
    tab.evaluate("document.querySelector('#composer').requestSubmit()")
    tab.wait_for(f"{IDLE} && {LAST}.classList.contains('assistant') && !{LAST}.classList.contains('busy')")


def names(tab: Chromium) -> list[str]:
    """The conversations of the list."""
    found: list[str] = tab.evaluate("[...document.querySelectorAll('.chat-name')].map((each) => each.innerText)")
    return found


class TestConversation:
    def test_an_answer_and_what_it_took(self, page: Chromium) -> None:
        assert page.evaluate("document.querySelector('#tab-first').getAttribute('aria-selected')") == "true"
        ask(page, "=**hi** <b>")
        assert page.evaluate(f"{LAST}.querySelector('strong').innerText") == "hi"
        assert page.evaluate(f"{PROSE}.innerText") == "hi <b>"
        assert page.evaluate(f"{LAST}.querySelector('h3').innerText") == "tiny<b>"
        note = page.evaluate(f"{LAST}.querySelector('.note').innerText")
        assert note.startswith("11 tokens")
        assert "first after " in note
        assert text(page, "#said") == "**hi** <b>", "the whole answer is announced once, at its end"

    def test_a_pasted_picture_is_sent(self, page: Chromium) -> None:
        """The policy of the page lets it in. This server's model takes none, and the page says so."""
        page.evaluate(
            f"(() => {{ const bytes = Uint8Array.from(atob({json.dumps(PICTURE)}), (each) => each.charCodeAt(0));"
            " const data = new DataTransfer(); data.items.add(new File([bytes], 'a.png', {type: 'image/png'}));"
            " const options = {clipboardData: data, bubbles: true, cancelable: true};"
            " document.querySelector('#message').dispatchEvent(new ClipboardEvent('paste', options)); })()"
        )
        page.wait_for("document.querySelector('#attached img')?.naturalWidth === 8")
        ask(page, "=seen")
        assert page.evaluate("document.querySelectorAll('#attached img').length") == 0
        assert page.evaluate("document.querySelector('.message.user img').src") == f"data:image/png;base64,{PICTURE}"
        (refused,) = page.problems
        assert "status of 400" in refused
        page.problems.clear()
        assert "images are not supported" in page.evaluate(f"{LAST}.querySelector('.bad').innerText")

    def test_conversations_are_kept_and_deleted(self, page: Chromium, server: Process) -> None:
        ask(page, "=one")
        click(page, "#new-chat")
        assert page.evaluate("document.querySelectorAll('.message').length") == 0
        ask(page, "=two")
        page.open(f"{server.url}/version")
        page.open(f"{server.url}/")
        page.wait_for("document.querySelectorAll('#chat-list li').length === 2")
        assert names(page) == ["=two", "=one"]
        click(page, "#chat-list li:last-child .chat-name")
        assert text(page, ".message.assistant > .prose") == "one"
        click(page, "#chat-list li:last-child .quiet")
        assert names(page) == ["=two"]
        assert text(page, ".message.assistant > .prose") == "two"
        # The name comes after the messages are drawn.
        page.wait_for("document.querySelector('.message.assistant h3').innerText === 'tiny<b>'")

    def test_an_answer_again_and_a_message_changed(self, page: Chromium) -> None:
        ask(page, "=one")
        page.evaluate(f"[...{LAST}.querySelectorAll('button')].find((b) => b.innerText === 'Regenerate').click()")
        page.wait_for(f"{IDLE} && {LAST}.querySelector('.note').innerText")
        assert page.evaluate("document.querySelectorAll('.message').length") == 2
        page.evaluate(
            "[...document.querySelectorAll('.message.user button')].find((b) => b.innerText === 'Edit').click()"
        )
        fill(page, ".edit textarea", "=changed")
        page.evaluate("document.querySelector('.edit').requestSubmit()")
        page.wait_for(f"{IDLE} && {PROSE}?.innerText === 'changed'")
        assert page.evaluate("document.querySelectorAll('.message').length") == 2

    def test_settings_are_sent_and_shown_as_programs(self, page: Chromium) -> None:
        fill(page, "#chat-max-tokens", "3")
        fill(page, "#chat-system", "it's brief")
        fill(page, "#chat-stop", "x\ny")
        ask(page, "=abcdef")
        assert page.evaluate(f"{PROSE}.innerText") == "abc"
        assert "cut at the limit" in page.evaluate(f"{LAST}.querySelector('.note').innerText")
        curl, python = (
            page.evaluate(f"document.querySelector('#{name}').textContent") for name in ("chat-curl", "chat-python")
        )
        assert '"Authorization: Bearer $QUIRE_API_KEY"' in curl
        assert "it'\\''s brief" in curl
        compile(python, "sample.py", "exec")
        assert "max_tokens=3,\n" in python
        assert 'stop=["x", "y"],\n' in python
        fill(page, "#chat-more", '{"top_k": 5, "chat_template_kwargs": {"a": [true, null]}, "tools": []}')
        python = page.evaluate("document.querySelector('#chat-python').textContent")
        call = ast.parse(python).body[-2].value
        given = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        assert given["extra_body"] == {"top_k": 5, "chat_template_kwargs": {"a": [True, None]}}
        assert given["tools"] == []
        fill(page, "#chat-more", "{")
        assert text(page, "#more-error").startswith("no JSON")
        fill(page, "#message", "=kept")
        page.evaluate("document.querySelector('#composer').requestSubmit()")
        assert text(page, "#chat-status").startswith("not sent")
        assert page.evaluate("document.querySelector('#message').value") == "=kept"

    def test_a_refusal_is_shown_in_the_servers_words(self, page: Chromium) -> None:
        fill(page, "#chat-temperature", "-1")
        ask(page, "=a")
        assert "temperature" in page.evaluate(f"{LAST}.querySelector('.bad').innerText")
        page.problems.clear()  # the browser notes every answer that is no success

    def test_thoughts_are_folded(self, page: Chromium) -> None:
        ask(page, "=<think>hm</think>yes")
        assert page.evaluate(f"{LAST}.querySelector('.thoughts').open") is False
        assert page.evaluate(f"{LAST}.querySelector('.thoughts .prose').textContent") == "hm"
        assert page.evaluate(f"{PROSE}.innerText") == "yes"

    def test_copying_without_a_clipboard(self, page: Chromium) -> None:
        """Pages over plain HTTP have none."""
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        ask(page, "=`a` <b>")
        page.evaluate("document.addEventListener('copy', () => { window.copied = document.activeElement.value; })")
        script = f"((button) => {{ button.click(); return button.innerText; }})({LAST}.querySelector('footer button'))"
        answer = page.call("Runtime.evaluate", expression=script, userGesture=True)
        assert answer["result"]["value"] == "Copied"
        assert page.evaluate("window.copied") == "`a` <b>"
        assert page.evaluate("document.activeElement.innerText") == "Copied", "the focus is where it was"

    def test_files_hold_conversations(self, page: Chromium, server: Process) -> None:
        show(page, server, [talk("=a", "a", settings={"temperature": 0.5, "system": "s"}), {"messages": 3}, None, 7])
        assert names(page) == ["=a"]
        assert page.evaluate("document.querySelector('#chat-temperature').value") == "0.5"
        load = """(async (content) => {
            const files = new DataTransfer();
            files.items.add(new File([content], "chats.json"));
            document.querySelector("#import-file").files = files.files;
            document.querySelector("#import-file").dispatchEvent(new Event("change"));
            await new Promise((done) => setTimeout(done, 50));
        })"""
        page.evaluate(f"{load}({json.dumps(json.dumps([talk('=b', 'b')]))})")
        page.wait_for("document.querySelectorAll('#chat-list li').length === 2")
        page.evaluate(f"{load}('no json')")
        page.wait_for("document.querySelector('#chat-status.bad')")
        assert text(page, "#chat-status").startswith("not imported")

    def test_a_phone(self, page: Chromium, server: Process) -> None:
        page.set_size(420, 800, mobile=True)
        show(
            page,
            server,
            [
                talk(
                    "=a",
                    "word " * 50 + "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n\n|a|b|\n|-|-|\n|" + "z" * 300 + "|1|",
                )
            ],
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
        assert page.evaluate("getComputedStyle(document.querySelector('#chats')).display") == "none"
        click(page, "#show-chats")
        assert page.evaluate("getComputedStyle(document.querySelector('#chats')).display") == "flex"


async def test_the_first_tab_is_what_the_model_is_for(served: Served, model_path: Path) -> None:
    assert task_of(served.context) == "chat"
    async with serving(model_path, ServerSettings()) as plain:
        plain.context.tokenizer.chat_templates.clear()
        assert task_of(plain.context) == "completion"
        assert (await plain.client.get("/debug/kv")).json()["task"] == "completion"


@pytest.fixture
def fresh(opened: Chromium, model: Model) -> Iterator[Chromium]:
    """The page without a conversation, whose model answers what a test chose."""
    assert not model.answers
    model.asked.clear()
    click(opened, "#new-chat")
    yield opened
    assert opened.problems == []


def say(tab: Chromium, role: str, words: str) -> None:
    tab.evaluate(f"document.querySelector('#role').value = {role!r}")
    send(tab, words)


def act(tab: Chromium, number: int, label: str) -> None:
    """Press a button of a message."""
    tab.evaluate(
        f"[...document.querySelectorAll('.message')[{number}].querySelectorAll('button')]"
        f".find((each) => each.innerText === {label!r}).click()"
    )
    tab.wait_for(IDLE)


def texts_of(tab: Chromium) -> list[str]:
    found: list[str] = tab.evaluate(
        "[...document.querySelectorAll('.message > :is(.prose, .said)')].map((each) => each.innerText)"
    )
    return found


def sent(model: Model) -> list[tuple[str, str]]:
    """The messages of the last request."""
    return [(each["role"], each["content"]) for each in model.asked[-1]["messages"]]


class TestMessages:
    """Any role, any message: what is sent is what is shown."""

    def test_roles(self, fresh: Chromium, model: Model) -> None:
        say(fresh, "system", "be brief")
        say(fresh, "assistant", "I am")
        assert not model.asked
        assert fresh.evaluate("document.querySelector('#role').value") == "user"
        model.answers.append(stream({"content": "yes"}))
        say(fresh, "user", "are you?")
        assert sent(model) == [("system", "be brief"), ("assistant", "I am"), ("user", "are you?")]
        heads = fresh.evaluate("[...document.querySelectorAll('.message h3')].map((each) => each.innerText)")
        assert heads == ["System", "tiny", "You", "tiny"]

    def test_messages_are_changed_and_gone_on_with(self, fresh: Chromium, model: Model) -> None:
        model.answers += [stream({"content": "one"}), stream({"content": "two"})]
        send(fresh, "a")
        send(fresh, "b")
        act(fresh, 1, "Edit")
        fill(fresh, ".edit textarea", "ONE")
        act(fresh, 1, "Save")
        assert texts_of(fresh) == ["a", "ONE", "b", "two"]
        model.answers.append(stream({"content": ", three"}))
        act(fresh, 3, "Continue")
        assert texts_of(fresh)[-1] == "two, three"
        assert sent(model) == [("user", "a"), ("assistant", "ONE"), ("user", "b"), ("assistant", "two")]
        assert (model.asked[-1]["continue_final_message"], model.asked[-1]["add_generation_prompt"]) == (True, False)
        act(fresh, 1, "Edit")
        fresh.evaluate("document.querySelector('.edit select').value = 'system'")
        act(fresh, 1, "Save")
        act(fresh, 0, "Edit")
        act(fresh, 0, "Delete")
        model.answers.append(stream({"content": "four"}))
        act(fresh, 1, "Edit")
        act(fresh, 1, "Send")
        assert sent(model) == [("system", "ONE"), ("user", "b")]
        assert texts_of(fresh) == ["ONE", "b", "four"]
        click(fresh, "#undo button")
        assert texts_of(fresh) == ["ONE", "b", "two, three"]

    def test_a_deleted_conversation_comes_back(self, fresh: Chromium, model: Model) -> None:
        model.answers.append(stream({"content": "here"}))
        send(fresh, "gone?")
        before = names(fresh)
        click(fresh, "#chat-list li .quiet")
        assert names(fresh) == before[1:]
        click(fresh, "#undo button")
        assert names(fresh) == before
        assert texts_of(fresh) == ["gone?", "here"]

    def test_an_answer_that_breaks_off(self, fresh: Chromium, model: Model) -> None:
        whole = stream({"content": "half"}, {"content": "way"})
        model.answers.append(whole[: whole.index(b"way")])
        send(fresh, "a")
        assert texts_of(fresh) == ["a", "half"]
        error = fresh.evaluate(f"{LAST}.querySelector('.bad').innerText")
        assert error == "the answer broke off: the server closed the connection"
        assert fresh.evaluate("document.querySelector('#said').textContent") == error, "announced once"
        assert fresh.evaluate("document.querySelectorAll('#log [role=alert]').length") == 0

    def test_what_is_in_sight_stays_there(self, fresh: Chromium, model: Model) -> None:
        """An answer in four pieces, each drawn at once; the reader scrolls up behind the first."""
        fresh.evaluate("""
            window.places = [];
            window.draws = window.requestAnimationFrame;
            window.requestAnimationFrame = (draw) => {
                draw();
                const log = document.querySelector("#log");
                if (places.length === 1) {
                    log.scrollTop -= 300;
                    log.dispatchEvent(new Event("scroll"));
                }
                places.push(Math.round(log.scrollHeight - log.scrollTop - log.clientHeight));
            };
        """)
        model.answers.append(stream(*[{"content": "line\n" * 60 + "\n"}] * 4))
        send(fresh, "a")
        places = fresh.evaluate("window.requestAnimationFrame = window.draws; places")
        assert places[0] == 0
        assert places[1] == 300
        assert places[-1] > places[1] + 1000
        assert not fresh.evaluate("document.querySelector('#to-end').hidden")
        click(fresh, "#to-end")
        fresh.wait_for("document.querySelector('#to-end').hidden")

    def test_code_that_grows_stays_the_same_node(self, fresh: Chromium, model: Model) -> None:
        fresh.evaluate("""
            window.nodes = new Set();
            window.draws = window.requestAnimationFrame;
            window.requestAnimationFrame = (draw) => {
                draw();
                nodes.add(document.querySelector(".prose code").firstChild);
            };
        """)
        model.answers.append(stream(*({"content": piece} for piece in ("```py\nx", " = 1\ny", " = 2\n", "```\nend"))))
        send(fresh, "a")
        assert fresh.evaluate("window.requestAnimationFrame = window.draws; nodes.size") == 1
        assert fresh.evaluate("document.querySelector('.prose code').textContent") == "x = 1\ny = 2"
        assert fresh.evaluate("document.querySelector('.message > .prose').lastChild.textContent") == "end"

    def test_the_keyboard_goes_on(self, fresh: Chromium, model: Model) -> None:
        focus = "document.activeElement.id"
        model.answers += [stream({"content": "a"}), stream({"content": "b"})]
        fresh.evaluate("document.querySelector('#message').focus()")
        fresh.call("Input.insertText", text="hello")
        fresh.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r")
        fresh.wait_for(f"{IDLE} && document.querySelectorAll('.message').length === 2")
        assert fresh.evaluate(focus) == "message"
        act(fresh, 1, "Regenerate")
        assert fresh.evaluate(focus) == "message"
        act(fresh, 0, "Edit")
        fresh.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape")
        assert fresh.evaluate("document.activeElement.innerText") == "Edit"
        assert fresh.evaluate("document.querySelector('.edit')") is None

    def test_a_reload_and_another_tab_lose_nothing(self, fresh: Chromium, model: Model) -> None:
        model.answers.append(stream({"content": "kept"}))
        send(fresh, "first")
        click(fresh, "#new-chat")
        fill(fresh, "#chat-system", "s")
        fill(fresh, "#message", "unsent")
        fresh.call("Page.reload")
        fresh.wait_for("document.querySelector('#link')?.dataset.state === 'live'")
        fresh.wait_for("!document.querySelector('#chat-view').hidden")
        assert fresh.evaluate("document.querySelectorAll('.message').length") == 0
        assert fresh.evaluate("document.querySelector('#message').value") == "unsent"
        assert fresh.evaluate("document.querySelector('#chat-system').value") == "s"
        fill(fresh, "#message", "")
        click(fresh, "#chat-list .chat-name")
        assert texts_of(fresh) == ["first", "kept"]
        fresh.evaluate("""(() => {
            const kept = JSON.parse(localStorage.getItem("quire-chats"));
            kept.push({id: "other", messages: [{role: "user", content: "of another tab"}]});
            kept[0].messages.push({role: "user", content: "there"});
            localStorage.setItem("quire-chats", JSON.stringify(kept));
            dispatchEvent(new StorageEvent("storage", {key: "quire-chats"}));
        })()""")
        assert texts_of(fresh) == ["first", "kept", "there"]
        assert "of another tab" in names(fresh)
        model.answers.append(stream({"content": "both"}))
        send(fresh, "")
        assert "of another tab" in fresh.evaluate("localStorage.getItem('quire-chats')")
        assert texts_of(fresh)[-1] == "both"
