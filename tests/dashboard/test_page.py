"""The live page as it is served, and in a real browser: Debian's Chromium, headless.

The browser's tests need the program `chromium`; tests/dashboard/conftest.py says what happens where there is none.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.dashboard.page import SCRIPTS, content_policy, load_page, load_reference
from quire.server.settings import ServerSettings
from tests.dashboard.chromium import Chromium
from tests.server.conftest import Served, serving
from tests.server.serve_process import Process

COUNTS = "({...document.querySelector('#map').dataset})"


class TestDocument:
    async def test_headers(self, served: Served) -> None:
        response = await served.client.get("/", headers={"Accept": "text/html,*/*;q=0.8"})
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
        assert response.headers["x-content-type-options"] == "nosniff"

    def test_it_is_whole_and_fetches_nothing_from_elsewhere(self) -> None:
        html = load_page().html.decode()
        assert html.count("<style>") == html.count("<script>") == 1
        assert "/* style */" not in html
        assert "/* script */" not in html
        scripts = {path.name for path in Path(load_page.__code__.co_filename).parent.glob("*.js")}
        assert scripts == {*SCRIPTS, "reference.js"}
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\s'\"]*", html))
        assert addresses == {"http://www.w3.org/2000/svg"}, "the name of a vocabulary in the icon, not a fetch"
        assert not re.search(r"\s(?:on\w+|style)=", html), "inline handlers and styles are against the policy"

    def test_the_policy_is_made_of_the_very_texts(self) -> None:
        assert content_policy("a", "b") != content_policy("a", "c")
        page = load_page()
        style, script = (re.search(f"<{tag}>(.*?)</{tag}>", page.html.decode(), re.S) for tag in ("style", "script"))
        assert style is not None
        assert script is not None
        assert page.policy == content_policy(style[1], script[1])

    async def test_the_reference_fetches_nothing_from_elsewhere(self, served: Served) -> None:
        response = await served.client.get("/docs")
        html = response.text
        assert html.encode() == load_reference().html
        assert "unsafe" not in response.headers["content-security-policy"]
        assert not re.search(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\s'\"]*", html)
        assert "innerHTML" not in html, "what the document says is text"

    def test_addresses_are_relative_for_proxies_that_take_a_path_off(self) -> None:
        for page in (load_page(), load_reference()):
            html = page.html.decode()
            assert not re.search(r"""(?:href=|src=|fetch\(|ask\()["'`]/""", html)

    async def test_it_says_nothing_about_the_server(self, model_path: Path) -> None:
        settings = ServerSettings(served_model_name=["<b>&"], api_key=["key"])
        async with serving(model_path, settings) as served:
            assert (await served.client.get("/", headers={"Accept": "text/html"})).content == load_page().html


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[Process]:
    """Steps take 0.4 s, so that there is time to look. Four sequences of one request fit into its share of the rows."""
    process = Process(model_path, max_num_seqs=8, served_model_name=["tiny<b>"], shutdown_timeout=1).wait_ready()
    yield process
    process.signal(signal.SIGTERM)
    assert process.finish()[0] == 0


@pytest.fixture
def page(tab: Chromium, server: Process) -> Iterator[Chromium]:
    """The page, connected; at the end nothing is running and no script has failed."""
    tab.problems.clear()
    tab.set_size(1280, 900)
    tab.open("about:blank")  # else the address differs in nothing, and the page stays as it is
    tab.open(f"{server.url}/#server")
    tab.wait_for("document.querySelector('#link').dataset.state === 'live'")
    yield tab
    tab.evaluate("document.querySelector('#stop').click()")
    tab.wait_for(f"{COUNTS}.used === '0'")
    assert tab.problems == []


def run(tab: Chromium, **fields: object) -> None:
    """Fill in the prompt box and send it."""
    for name, value in {"n": 1, "max-tokens": 200, "temperature": 0.8, "prompt": "a" * 40, **fields}.items():
        tab.evaluate(f"document.querySelector('#{name}').value = {str(value)!r}")
    tab.evaluate("document.querySelector('#try').requestSubmit()")


def text(tab: Chromium, selector: str) -> str:
    value: str = tab.evaluate(f"document.querySelector('{selector}').innerText")
    return value


@pytest.mark.browser
class TestInABrowser:
    def test_blocks_appear_are_shared_and_all_are_free_at_the_end(self, page: Chromium, server: Process) -> None:
        assert text(page, "#model") == "tiny<b>"
        assert page.evaluate(f"Number({COUNTS}.free) + Number({COUNTS}.cached)") == 64
        run(page, n=4)
        counts = page.wait_for(f"{COUNTS}.shared > 0 && {COUNTS}")
        assert int(counts["used"]) >= int(counts["shared"]) >= 2
        page.wait_for("document.querySelectorAll('.sequence').length === 4")
        assert page.evaluate("document.querySelectorAll('.page-of .count').length") >= 4
        assert page.evaluate("document.querySelector('.page-of .count').innerText") == "×4"
        page.wait_for("document.querySelectorAll('.output pre').length === 4")
        server.hurry()
        page.wait_for(f"{COUNTS}.used === '0' && {COUNTS}.shared === '0'")
        page.wait_for("!document.querySelector('#run').disabled")
        assert page.evaluate("[...document.querySelectorAll('.output pre')].every((p) => p.innerText.length === 200)")
        assert text(page, "#queues .queue").split() == ["Running", "0", "nothing", "runs"]
        assert text(page, "#queues .ended .past").startswith("length 41 + 800 tokens")
        server.slow_down()
        assert int(page.evaluate(f"{COUNTS}.cached")) > 0, "what was computed stays"

    def test_the_cells_have_the_colours_of_their_states(self, page: Chromium) -> None:
        """Read from the canvas itself: the first blocks that a request takes turn from dark to bright. A cached block's
        red, green and blue add up to 194, the darkest request's to 321."""
        brightness = """(() => {
            const {width, height} = document.querySelector('#map');
            const context = new OffscreenCanvas(width, height).getContext('2d');
            context.drawImage(document.querySelector('#map'), 0, 0);
            const data = context.getImageData(0, 0, width, height).data;
            let bright = 0;
            for (let i = 0; i < data.length; i += 4) bright += data[i] + data[i + 1] + data[i + 2] > 270;
            return bright;
        })()"""
        assert page.evaluate(brightness) == 0
        run(page)
        page.wait_for(f"{COUNTS}.used > 2")
        page.wait_for(f"{brightness} > 500")  # the canvas is drawn in the frame after the counts

    def test_pointing_at_a_request_lights_its_blocks(self, page: Chromium) -> None:
        run(page, n=2)
        page.wait_for("document.querySelector('.request')")
        page.move_pointer(".request")
        page.wait_for("document.querySelector('.request.active')")
        name = text(page, ".request .who").split()[0]
        assert text(page, "#tables-summary").startswith(name)
        page.wait_for("document.querySelectorAll('.sequence').length === 2")
        page.move_pointer(".page-of")
        page.wait_for("document.querySelector('#block-text').innerText.includes('2 owners')")
        assert name in text(page, "#block-text")

    def test_the_keyboard_reaches_everything(self, page: Chromium) -> None:
        run(page)
        page.wait_for(f"{COUNTS}.used > 0")
        page.evaluate("document.querySelector('#map').focus()")
        page.press("ArrowRight")
        assert text(page, "#block-text").startswith("Block 1")
        page.press("ArrowRight")
        assert text(page, "#block-text").startswith("Block 2")
        page.press("End")
        words = text(page, "#block-text").split()
        assert [words[0], *words[2:]] == ["Blocks", "to", "64", "are", "free,", "and", "were", "not", "in", "use."]
        page.press("ArrowRight")
        assert text(page, "#block-text").split() == words
        page.press("ArrowLeft")
        assert text(page, "#block-text").startswith(f"Block {int(words[1]) - 1}")
        page.evaluate("document.querySelector('.request').focus()")
        page.evaluate("document.querySelector('.request').click()")
        assert page.evaluate("document.querySelector('.request').getAttribute('aria-pressed')") == "true"
        page.press("Escape")
        assert page.evaluate("document.querySelector('.request').getAttribute('aria-pressed')") == "false"

    def test_stop_frees_the_blocks(self, page: Chromium) -> None:
        run(page, n=3)
        page.wait_for(f"{COUNTS}.used > 0")
        page.evaluate("document.querySelector('#stop').click()")
        page.wait_for(f"{COUNTS}.used === '0'")
        assert text(page, "#try-status") == "stopped"

    def test_a_refusal_is_shown_in_the_servers_words(self, page: Chromium) -> None:
        run(page, prompt="a" * 400)
        page.wait_for("document.querySelector('#try-status.bad')")
        assert "256" in text(page, "#try-status")
        # The browser notes every answer that is no success.
        assert all("400" in problem for problem in page.problems)
        page.problems.clear()

    def test_a_seed_is_sent_unless_its_box_is_empty(self, page: Chromium) -> None:
        curl = "document.querySelector('#curl').textContent"
        assert '"seed": 44' in page.evaluate(curl)
        page.evaluate("document.querySelector('#seed').value = ''")
        page.evaluate("document.querySelector('#try').dispatchEvent(new Event('input'))")
        assert "seed" not in page.evaluate(curl)

    def test_paused_and_hidden_it_asks_for_nothing(self, page: Chromium) -> None:
        page.evaluate("document.querySelector('#pause').click()")
        assert text(page, "#link") == "paused"
        run(page)
        page.wait_for("document.querySelector('.output pre').innerText.length > 3")
        assert page.evaluate(f"{COUNTS}.used") == "0"
        page.evaluate("document.querySelector('#pause').click()")
        page.wait_for(f"{COUNTS}.used > 0")

    def test_a_phone(self, page: Chromium) -> None:
        page.set_size(360, 740, mobile=True)
        run(page, n=4)
        page.wait_for(f"{COUNTS}.shared > 0")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360

    @pytest.mark.parametrize("name", ["light", "dark"])
    def test_themes(self, page: Chromium, name: str) -> None:
        while text(page, "#theme") != f"Theme: {name}":
            page.evaluate("document.querySelector('#theme').click()")
        red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (red + green + blue > 600) == (name == "light")


@pytest.mark.browser
def test_a_key_is_asked_for(tab: Chromium, model_path: Path) -> None:
    process = Process(model_path, api_key=["open sesame"], shutdown_timeout=1).wait_ready()
    tab.open(f"{process.url}/#server")
    tab.wait_for("!document.querySelector('#key-form').hidden")
    for key in ("wrong", "open sesame"):
        tab.evaluate(f"document.querySelector('#key').value = {key!r}")
        tab.evaluate("document.querySelector('#key-form').requestSubmit()")
        if key == "wrong":
            tab.wait_for("document.querySelector('#key-error').innerText === 'Incorrect API key provided'")
    tab.wait_for("document.querySelector('#link').dataset.state === 'live'")
    assert tab.evaluate("document.querySelector('#key-form').hidden")
    run(tab, n=4)
    tab.wait_for(f"{COUNTS}.shared > 0")
    process.signal(signal.SIGTERM)
    tab.wait_for("['shutting down', 'no connection: the server does not answer'].includes(link_text())".replace(
        "link_text()", "document.querySelector('#link').innerText"
    ))  # fmt: skip
    assert process.finish()[0] == 0
    tab.wait_for("document.querySelector('#link').dataset.state === 'lost'")
