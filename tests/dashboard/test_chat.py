"""The chat of the page, in a real browser over a server whose model copies what stands behind "=" in the prompt."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.dashboard.page import load_page
from quire.server.live import task_of
from quire.server.settings import ServerSettings
from tests.dashboard.chromium import Chromium
from tests.dashboard.test_page import text
from tests.long import all_but_long
from tests.multimodal.pictures import draw, encoded
from tests.server.conftest import Served, serving
from tests.server.serve_process import Process

pytestmark = pytest.mark.browser
LAST = "document.querySelector('.message:last-child')"
PROSE = f"{LAST}.querySelector(':scope > .prose')"
PICTURE = base64.b64encode(encoded(draw(1, size=(8, 8)))).decode()
IDLE = "document.querySelector('#halt').hidden"
MOST_LINES = 400
PIECES = ("*a ", "[", "](", "`", "> ", "- ", "<a", "**_~~", "|", "\\", "[a](b", "https://", "1. a\n ")
"""Texts that cost most where a renderer looks at them again and again: many of one in a row."""
ALLOWED = (
    "article h3 h4 h5 h6 details summary div p footer span button pre code a br strong em s ul ol li blockquote hr "
    "table tr th td"
)
"""Elements of a conversation."""
HOSTILE = (
    "<script>hit()</script>",
    "<img src=x onerror=hit()>",
    "<svg onload=hit()><p id=x></svg>",
    "<iframe srcdoc='<script>parent.hit()</script>'></iframe>",
    "[a](javascript:hit())",
    "[a](JaVaScRiPt:hit())",
    "[a](\\x01javascript:hit())",
    "[a](data:text/html,<script>hit()</script>)",
    "[a](vbscript:hit())",
    '[a](https://x/" onmouseover="hit())',
    "![a](https://evil.example/leak.png)",
    "![a](javascript:hit())",
    "<https://x/ onclick=hit()>",
    "<javascript:hit()>",
    "`<b onclick=hit()>`",
    "```html\n<script>hit()</script>\n```",
    "<math><mtext><table><mglyph><style><img src onerror=hit()>",
    "<form><math><mtext></form><form><mglyph><style></math><img src onerror=hit()>",
    "| <img src=x onerror=hit()> |\n|---|\n| <a href=javascript:hit()>x</a> |",
    "> <details open ontoggle=hit()>",
    "- <object data=javascript:hit()>\n- <embed src=javascript:hit()>",
    "# <base href=javascript:/a/-hit()//>",
    "<a href='javas&#99;ript:hit()'>x</a> &lt;script&gt;hit()&lt;/script&gt;",
    "[<img src=x onerror=hit()>](https://x)",
    "**<style>@import 'https://evil.example/x.css'</style>**",
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<link rel=prefetch href=https://evil.example>",
    "<video><source onerror=hit()></video>",
)
"""Texts after those that sanitisers of HTML are tested with: what runs calls `hit`, what is fetched has a host."""


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
    tab.evaluate(f"localStorage.setItem('quire-chats', {json.dumps(json.dumps(chats))})")
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
        assert 'stop=["x","y"],\n' in python

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


class TestMarkdown:
    def prose(self, tab: Chromium, server: Process, source: str) -> str:
        """The HTML that a text becomes, as the browser writes it, without the parts of code blocks that are ours."""
        show(tab, server, [talk("q", source)])
        html: str = tab.evaluate("document.querySelector('.message.assistant > .prose').innerHTML")
        return html

    @pytest.mark.parametrize(
        ("source", "html"),
        [
            ("# Title #\ntext\nmore", "<h3>Title</h3><p>text<br>more</p>"),
            (
                "**a *b* c** __d__ ~~e~~ _f_ snake_case_name",
                "<p><strong>a <em>b</em> c</strong> <strong>d</strong> <s>e</s> <em>f</em> snake_case_name</p>",
            ),
            ("***both*** 2 * 3 * 4 **open", "<p><strong><em>both</em></strong> 2 * 3 * 4 **open</p>"),
            ("a `` b ` c `` d \\*e\\*", "<p>a <code>b ` c</code> d *e*</p>"),
            ("- a\n- b\n  1. c\n  2. d\n\nend", "<ul><li>a</li><li>b<ol><li>c</li><li>d</li></ol></li></ul><p>end</p>"),
            ("3. a\n\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
            ("- [x] done\n- [ ] open", "<ul><li>☑ done</li><li>☐ open</li></ul>"),
            ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
            ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
            ("a <b> &amp; c", "<p>a &lt;b&gt; &amp;amp; c</p>"),
        ],
    )
    def test_blocks_and_texts(self, page: Chromium, server: Process, source: str, html: str) -> None:
        assert self.prose(page, server, source) == html

    def test_code_tables_and_links(self, page: Chromium, server: Process) -> None:
        code, table = "```py\na = '<b>'\n```", "|a|b|\n|:-|-:|\n|`x`|1\\|2|"
        source = f"{code}\n\n{table}\n\n[m](mailto:a@b.c) https://x.example/a_(b). [r](/path)"
        self.prose(page, server, source)
        assert text(page, ".prose .code pre") == "a = '<b>'"
        assert text(page, ".prose .code-head span") == "py"
        cells = "[...document.querySelectorAll('.prose th, .prose td')].map((c) => c.innerText)"
        assert page.evaluate(cells) == ["a", "b", "x", "1|2"]
        links = "[...document.querySelectorAll('.prose a')].map((a) => [a.getAttribute('href'), a.rel, a.innerText])"
        rel = "noopener noreferrer nofollow"
        assert page.evaluate(links) == [
            ["mailto:a@b.c", rel, "m"],
            ["https://x.example/a_(b)", rel, "https://x.example/a_(b)"],
        ]

    def test_nothing_of_a_text_runs_or_is_fetched(self, page: Chromium, server: Process) -> None:
        """Texts of the model, of thoughts, calls of tools and the user, out of a file: all take the same ways."""
        joined = "\n\n".join(HOSTILE)
        call = {"name": "<img src=x onerror=hit()>", "arguments": joined}
        chat = {
            "messages": [
                {"role": role, "content": joined, "reasoning": joined, "calls": [call], "note": joined, "error": joined}
                for role in ("user", "assistant", "system")
            ]
        }
        chat["settings"] = {"system": joined, "stop": joined}
        page.call(
            "Page.addScriptToEvaluateOnNewDocument", source="window.hits = 0; window.hit = () => { window.hits += 1; };"
        )
        show(page, server, [chat, *(talk(each, each) for each in HOSTILE)])
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        page.evaluate("new Promise((done) => setTimeout(done, 100))")
        assert page.evaluate("window.hits") == 0
        found = page.evaluate("[...new Set([...document.querySelectorAll('#log *')].map((each) => each.localName))]")
        assert set(found) <= set(ALLOWED.split())
        names = page.evaluate(
            "[...new Set([...document.querySelectorAll('#log *')].flatMap((e) => e.getAttributeNames()))]"
        )
        assert not [name for name in names if name.startswith("on") or name in ("src", "style", "srcdoc")]
        schemes = page.evaluate("[...document.querySelectorAll('#log a')].map((a) => a.protocol)")
        assert set(schemes) <= {"http:", "https:", "mailto:"}
        fetched = page.evaluate("performance.getEntriesByType('resource').map((each) => new URL(each.name).origin)")
        assert set(fetched) <= {server.url}

    @pytest.mark.parametrize("piece", all_but_long(PIECES, ("[a](b", "`")))
    def test_the_time_is_linear(self, page: Chromium, server: Process, piece: str) -> None:
        """Counted in steps of the pass over a text, and in nodes: neither grows faster than the text."""
        self.prose(page, server, piece * (200_000 // len(piece)))
        assert page.evaluate("document.querySelectorAll('.prose *').length") <= 200_000

    def test_its_length(self) -> None:
        source = Path(load_page.__code__.co_filename).with_name("markdown.js").read_text()
        assert len(source.splitlines()) <= MOST_LINES
        assert "innerHTML" not in load_page().html.decode()


async def test_the_first_tab_is_what_the_model_is_for(served: Served, model_path: Path) -> None:
    assert task_of(served.context) == "chat"
    async with serving(model_path, ServerSettings()) as plain:
        plain.context.tokenizer.chat_templates.clear()
        assert task_of(plain.context) == "completion"
        assert (await plain.client.get("/debug/kv")).json()["task"] == "completion"
