"""The renderer of Markdown in a real browser: its forms, what it must never let through, and its work."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from quire.dashboard.page import load_page
from tests.dashboard.chromium import Chromium
from tests.dashboard.fake_model import LOAD, Model, load, model, opened, redraw, said, send, stream
from tests.dashboard.hostile import DOMPURIFY, HOSTILE, MARKDOWN

__all__ = ["model", "opened"]

pytestmark = pytest.mark.browser
MOST_LINES = 400
FORMS = (
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
    ("a|b\n-|-|-\n\nc | d\n- - -", "<p>a|b<br>-|-|-</p><p>c | d</p><hr>"),
)
"""Texts and their HTML."""
ELEMENTS = (
    "article h3 h4 h5 h6 details summary div p footer span button pre code a br strong em s ul ol li blockquote hr "
    "table tr th td"
)
ATTRIBUTES = "class type tabindex hidden href title target rel start open"
"""Those of a conversation; no name and no id among them, after which `document` and `window` could be asked."""


@pytest.fixture
def page(opened: Chromium) -> Iterator[Chromium]:
    """The page; at the end nothing was run, no policy was offended and no other server was asked."""
    yield opened
    assert opened.evaluate("window.hits") == []
    assert opened.problems == []
    assert {urlsplit(url).netloc for url in opened.requests} <= {opened.evaluate("location.host"), ""}


def check_conversation(tab: Chromium, least: int) -> None:
    """Fold everything open, and look at all that there is. least: number of elements that make sense."""
    tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    tab.evaluate("new Promise((done) => setTimeout(done, 100))")  # for what runs after it was loaded
    found = tab.evaluate("""(() => {
        const all = [...document.querySelectorAll("#log *")];
        const links = all.filter((each) => each.localName === "a");
        return {
            count: all.length,
            elements: [...new Set(all.map((each) => each.localName))],
            attributes: [...new Set(all.flatMap((each) => each.getAttributeNames()))],
            foreign: all.filter((each) => each.namespaceURI !== "http://www.w3.org/1999/xhtml").length,
            links: [...new Set(links.map((each) => each.protocol))],
            opens: [...new Set(links.map((each) => `${each.target} ${each.rel}`))],
        };
    })()""")
    assert found["count"] >= least
    assert set(found["elements"]) <= set(ELEMENTS.split())
    assert set(found["attributes"]) <= set(ATTRIBUTES.split())
    assert found["foreign"] == 0
    assert set(found["links"]) <= {"http:", "https:", "mailto:"}
    assert set(found["opens"]) <= {"_blank noopener noreferrer nofollow"}


def test_blocks_and_texts(page: Chromium) -> None:
    load(page, *(said(text) for text, _ in FORMS))
    html = page.evaluate("[...document.querySelectorAll('.message > .prose')].map((each) => each.innerHTML)")
    assert html == [html for _, html in FORMS]


def test_code_tables_and_links(page: Chromium) -> None:
    code, table = "```py\na = '<b>'\n```", "|a|b|\n|:-|-:|\n|`x`|1\\|2|"
    load(page, said(f"{code}\n\n{table}\n\n[m](mailto:a@b.c) https://x.example/a_(b). [r](/path)"))
    assert page.evaluate("document.querySelector('.prose .code pre').innerText") == "a = '<b>'"
    assert page.evaluate("document.querySelector('.prose .code-head span').innerText") == "py"
    cells = "[...document.querySelectorAll('.prose th, .prose td')].map((c) => c.innerText)"
    assert page.evaluate(cells) == ["a", "b", "x", "1|2"]
    links = "[...document.querySelectorAll('.prose a')].map((a) => [a.getAttribute('href'), a.innerText])"
    url = "https://x.example/a_(b)"
    assert page.evaluate(links) == [["mailto:a@b.c", "m"], [url, url]]


class TestDoors:
    """Ways by which a text comes into the page."""

    def test_there_are_enough(self) -> None:
        assert len(DOMPURIFY) == 223
        assert len(MARKDOWN) >= 60

    def test_a_models_answer(self, page: Chromium, model: Model) -> None:
        for text in ("\n\n".join(DOMPURIFY), *("\n\n".join(MARKDOWN[start::4]) for start in range(4))):
            half = len(text) // 2
            pieces = (text[:half], text[half:])
            model.answers.append(stream({"reasoning": text}, *({"content": piece} for piece in pieces)))
            send(page, text)
        assert len(model.asked) == 5
        check_conversation(page, 1000)

    def test_a_tools_result(self, page: Chromium, model: Model) -> None:
        """Calls, and what a user writes as their results, or edits."""

        def call(index: int, name: str, arguments: str) -> dict[str, Any]:
            return {"index": index, "id": f"{name}{index}", "function": {"name": name, "arguments": arguments}}

        load(page, {"role": "system", "content": "s"})
        calls = [call(index, text, json.dumps({text: [text]})) for index, text in enumerate(HOSTILE)]
        model.answers.append(stream({"tool_calls": calls}))
        send(page, "call")
        check_conversation(page, 1000)
        load(page, {"role": "system", "content": "s"})
        joined = "\n\n".join(HOSTILE)
        model.answers += [stream({"tool_calls": [call(0, "a", "{}"), call(1, "b", "{}")]}), stream({"content": "so"})]
        send(page, "call")
        for _ in range(2):
            assert page.evaluate("document.querySelector('#role').value") == "tool"
            send(page, joined)
        assert page.evaluate("document.querySelector('.message:last-child > .prose').innerText") == "so"
        sent = model.asked[-1]["messages"]
        assert [each.get("tool_call_id") for each in sent] == [None, None, None, "a0", "b1"]
        assert sent[-1]["content"] == re.sub("\r\n?", "\n", joined), "a field for text knows one end of a line"
        check_conversation(page, 30)

    def test_an_imported_file(self, page: Chromium) -> None:
        """Each text alone, some in each field."""

        def message(role: str, text: str) -> dict[str, Any]:
            call = {"id": text, "name": text, "arguments": text}
            images = [text, f"data:image/svg+xml,{text}"]
            others = {
                "images": images,
                "calls": [call],
                text: text,
                **dict.fromkeys(("reasoning", "note", "error"), text),
            }
            return {"role": role, "content": text, "callId": text, **(others if role == "user" else {})}

        messages = [message(role, text) for text in HOSTILE for role in ("assistant", "tool")]
        messages += [message(role, text) for text in HOSTILE[::6] for role in ("user", "system", text)]
        settings = dict.fromkeys(("system", "stop", "more"), "\n\n".join(HOSTILE))
        chats = [{"messages": messages, "settings": settings, "id": HOSTILE[0]}, {"messages": messages[:1]}]
        page.evaluate(f"{LOAD}({json.dumps(chats)})")
        page.evaluate(
            "document.querySelectorAll('#log img').forEach((each) => { window.pictures = 1; each.remove(); })"
        )
        assert page.evaluate("window.pictures") == 1, "those of the file's data: addresses are shown"
        assert page.evaluate("document.querySelectorAll('.message').length") > len(HOSTILE)
        check_conversation(page, 3000)
        assert (
            page.evaluate(
                "document.querySelectorAll('#chats :is(img, svg, script, form, input:not(#import-file))').length"
            )
            == 0
        )


PIECES = (
    "*a ", "[", "](", "`", "`a``", "> ", "- ", "<a", "**_~~", "|", "\\", "[a](b", "https://", "1. a\n ", "a\n", "a\n\n",
    "a|b\n-|-\n", "|\n", " ", "\t", "- a\n  ", "```\n", "~~~ ", "(", "<https://a", "![", "***a", "> - ", "# #", "*a\n",
    "[a\n", "- a\n\n", "http://)", "|-", "- a\na\n", "> a\n", "\r\n", "***", "--- ", "[x](y) ", "&#1;",
)  # fmt: skip
"""Texts that cost most where a renderer looks at them again and again: many of one in a row."""
SMALL, GREAT = 3000, 12_000
MOST_GROWTH = 5.0
"""Growth of the work for four times the text: 4 if it is linear, 16 if it is quadratic, a little more than 4 where a
window of a bounded length is cut off at the end of the text."""


class Work:
    """Counts the blocks of code that the renderer runs through."""

    def __init__(self, tab: Chromium) -> None:
        self._tab = tab
        html = load_page().html.decode()
        script = html[html.index("<script>") + 8 :]
        self._begin = script.index("// Markdown of a model")
        self._end = script.index("// Conversations as the browser keeps them")
        self._url = tab.evaluate("location.href")
        tab.call("Profiler.enable")
        tab.call("Profiler.startPreciseCoverage", callCount=True, detailed=True)

    def take(self) -> int:
        """Number since the last look."""
        total = 0
        for script in self._tab.call("Profiler.takePreciseCoverage")["result"]:
            for function in script["functions"] if script["url"] == self._url else ():
                if self._begin <= function["ranges"][0]["startOffset"] < self._end:
                    total += sum(each["count"] for each in function["ranges"])
        return total

    def stop(self) -> None:
        self._tab.call("Profiler.stopPreciseCoverage")
        self._tab.call("Profiler.disable")


@pytest.fixture
def work(page: Chromium) -> Iterator[Work]:
    work = Work(page)
    page.evaluate("document.querySelector('#log').hidden = true")  # its layout is the browser's
    yield work
    page.evaluate("document.querySelector('#log').hidden = false")
    work.stop()


def test_the_work_is_linear(page: Chromium, work: Work) -> None:
    def growth(piece: str) -> float:
        counts = []
        for size in (SMALL, GREAT):
            redraw(page, "x")
            work.take()
            redraw(page, (piece * size)[:size])
            counts.append(work.take())
        return counts[1] / counts[0]

    load(page, said("x"))
    # The browser sometimes loses counts, those of the small text for one; growth is what is found each time.
    assert [piece for piece in PIECES if all(growth(piece) > MOST_GROWTH for _ in range(3))] == []


def test_a_stream_is_read_once(page: Chromium, work: Work, model: Model) -> None:
    """Each piece of a stream is drawn: the work is that of the text, not that of its length times its pieces."""
    counts = []
    page.evaluate("window.requestAnimationFrame = (draw) => draw()")
    for number in (100, 400):
        load(page, said("x"))
        paragraph = ("Some **words** and `code`.\n\n", "- one\n- two\n\n", "```py\nx = 1\n```\n", "a|b\n-|-\n1|2\n\n")
        model.answers.append(stream(*({"content": paragraph[n % 4]} for n in range(number))))
        work.take()
        send(page, "go")
        counts.append(work.take())
        parts = page.evaluate("document.querySelector('.message:last-child > .prose').childElementCount")
        assert parts == number
    assert counts[1] / counts[0] < MOST_GROWTH


@pytest.mark.long
@pytest.mark.parametrize("piece", ["a\n", "*a\n", "[a\n", "- a\na\n", "a\n\n", "- a\n", "> a\n\n", "|a\n|-\n"])
def test_more_nodes_than_a_call_takes_arguments(page: Chromium, work: Work, piece: str) -> None:
    text = piece * (390_000 // len(piece))
    load(page, said("x"))
    redraw(page, text)
    assert page.evaluate("document.querySelector('.message > .prose').innerHTML.length") >= len(text)
    redraw(page, "x")


def test_its_length() -> None:
    source = Path(load_page.__code__.co_filename).with_name("markdown.js").read_text()
    assert len(source.splitlines()) <= MOST_LINES
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", load_page().html.decode())
