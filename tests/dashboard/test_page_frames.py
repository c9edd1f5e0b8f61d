"""The page shown frames that a test made up: large pools, a host pool, every status, names that look like HTML."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.dashboard.page import load_page
from quire.dashboard.recent import EndedRequest, Percentiles, Recent
from tests.dashboard.chromium import Chromium, browser, find_chromium
from tests.dashboard.frames import frame_of
from tests.dashboard.test_page import COUNTS, text
from tests.fakes.core import CoreDriver, make_config

pytestmark = pytest.mark.browser


@contextmanager
def shown(tab: Chromium, frame: Any) -> Iterator[None]:
    """The page, connected to a server that sends this frame and nothing more."""
    page, over = load_page(), threading.Event()
    event = b"data: %b\n\n" % msgspec.json.encode(frame)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = self.path == "/"
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8" if is_page else "text/event-stream")
            self.send_header("Content-Security-Policy", page.policy)
            self.end_headers()
            self.wfile.write(page.html if is_page else event)
            if not is_page:
                over.wait()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        tab.problems.clear()
        tab.set_size(1280, 900)
        tab.open(f"http://127.0.0.1:{server.server_port}/#server")
        tab.wait_for("document.querySelector('#link').dataset.state === 'live'")
        yield
        assert tab.problems == []
    finally:
        tab.open("about:blank")  # else the page would go on asking a server that is gone
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def pressed_driver(num_requests: int, **options: Any) -> CoreDriver:
    """Requests that fill the pool, some waiting, some preempted."""
    driver = CoreDriver(make_config(**options))
    for number in range(1, num_requests + 1):
        driver.add(f"cmpl-{number}#{number}", [number % 90 + 1] * 14, max_tokens=10, n=1 + number % 2, temperature=1.0)
    return driver


def test_preempted_and_waiting_requests_have_their_queues(tab: Chromium) -> None:
    driver = pressed_driver(5, num_blocks=10, block_size=4, max_model_len=32)
    while driver.core.stats().num_preempted == 0:
        driver.step()
    frame = frame_of(driver)
    with shown(tab, frame):
        titles = tab.evaluate("[...document.querySelectorAll('.queue:not([hidden]) h3')].map((h) => h.innerText)")
        assert [title.split()[0] for title in titles] == ["Running", "Preempted", "Waiting"]
        statuses = [request.status for request in frame.kv.requests]
        assert tab.evaluate("[...document.querySelectorAll('.request')].map((r) => r.dataset.status)") == sorted(
            statuses, key=["running", "preempted", "waiting"].index
        )
        assert tab.evaluate(f"Number({COUNTS}.used)") == frame.stats.num_used_blocks


def test_requests_that_have_ended(tab: Chromium) -> None:
    name = "<img src=x onerror=alert(1)>"
    ended = [
        EndedRequest(name, ["stop"], 12, 8, 64, 0.04, 1.25),
        EndedRequest("b", ["abort"], 3, 0, 0, None, None),
    ]
    frame = frame_of(pressed_driver(1))
    frame.recent = Recent(ended, Percentiles(0.04, 0.5), Percentiles(1.25, 2.0))
    with shown(tab, frame):
        lines = tab.evaluate("[...document.querySelectorAll('.past')].map((line) => line.innerText)")
        assert lines == ["stop 12 (8 cached) + 64 tokens · first 40 ms · 1.3 s", "abort 3 + 0 tokens"]
        times = tab.evaluate("document.querySelector('.ended .more').innerText")
        assert times == "first token after 40 ms (95 %: 500 ms), the last one after 1.3 s (95 %: 2.0 s)"
        assert tab.evaluate("document.querySelector('.past').title") == name


@pytest.mark.parametrize("num_blocks", [50, 50_000])
def test_pools_of_any_size(tab: Chromium, num_blocks: int) -> None:
    driver = pressed_driver(60, num_blocks=num_blocks, block_size=4, max_num_seqs=200, max_num_batched_tokens=4096)
    driver.step()
    frame = frame_of(driver)
    with shown(tab, frame):
        total = f"Number({COUNTS}.used) + Number({COUNTS}.free) + Number({COUNTS}.cached)"
        assert tab.evaluate(total) == num_blocks
        assert tab.evaluate(f"Number({COUNTS}.used)") == frame.stats.num_used_blocks
        height = tab.evaluate("document.querySelector('#map').clientHeight")
        assert 20 < height < 1200
        assert tab.evaluate("document.querySelectorAll('.request').length") <= 2 * 50
        tab.evaluate("document.querySelector('#map').focus()")
        tab.press("End")
        assert re.match(f"Blocks? [0-9]+ (to {num_blocks:,} are|is) ", text(tab, "#block-text"))


def test_window_groups_have_a_table_each(tab: Chromium) -> None:
    driver = CoreDriver(make_config(block_size=4, windows=(None, 5)))
    driver.add("a#1", list(range(1, 31)), max_tokens=8)
    for _ in range(5):
        driver.step()
    with shown(tab, frame_of(driver)):
        assert tab.evaluate("document.querySelectorAll('.sequence').length") == 2
        assert "window of 5 tokens" in text(tab, "#tables")
        assert tab.evaluate("document.querySelectorAll('.page-of.gone').length") > 0


def test_a_long_table_leaves_its_middle_out(tab: Chromium) -> None:
    driver = CoreDriver(make_config(num_blocks=400, block_size=1, max_model_len=350, max_num_batched_tokens=400))
    driver.add("a#1", [7] * 300)
    driver.step()
    with shown(tab, frame_of(driver)):
        assert tab.evaluate("document.querySelectorAll('.page-of').length") == 96
        assert "… 204 more …" in text(tab, "#tables")


def test_names_are_text(tab: Chromium) -> None:
    driver = CoreDriver(make_config())
    driver.add("<img/src=x>#1", [1, 2, 3])
    driver.step()
    frame = frame_of(driver)
    frame.model = "<script>alert(1)</script>"
    with shown(tab, frame):
        assert text(tab, "#model") == "<script>alert(1)</script>"
        assert "<img/src=x>" in text(tab, ".request .who")
        assert tab.evaluate("document.images.length") == 0


def test_a_host_pool_is_a_second_strip(tab: Chromium) -> None:
    with shown(tab, frame_of(CoreDriver(make_config()))):
        assert tab.evaluate("document.querySelector('#host').hidden")
    options = {"num_blocks": 10, "num_host_blocks": 20, "block_size": 4, "max_model_len": 32}
    driver = pressed_driver(3, preemption_mode="swap", **options)
    while driver.core.stats().num_swapped == 0:
        driver.step()
    frame = frame_of(driver)
    with shown(tab, frame):
        used, size = frame.stats.num_used_host_blocks, frame.stats.num_host_blocks
        assert text(tab, "#host-summary") == f"{used} of {size} blocks in use"
        assert tab.evaluate("document.querySelector('#host-map').clientHeight") > 10
        assert "Swapped out" in text(tab, "#queues")


def test_adapters_have_a_line(tab: Chromium) -> None:
    frame = frame_of(CoreDriver(make_config()))
    with shown(tab, frame):
        assert tab.evaluate("document.querySelector('#adapters').hidden")
    frame.stats.num_adapter_slots, frame.stats.num_loaded_adapters = 8, 2
    frame.stats.running_adapters, frame.stats.waiting_adapters = ["sql"], ["<b>"]
    with shown(tab, frame):
        assert text(tab, "#adapters-summary") == "2 of 8 slots · running sql · waiting <b>"


def test_images_have_a_line(tab: Chromium) -> None:
    driver = CoreDriver(make_config())
    driver.add("r#1", [1, 2, 3])
    frame = frame_of(driver)
    with shown(tab, frame):
        assert tab.evaluate("document.querySelector('#images').hidden")
    frame.kv.requests[0].num_image_tokens = 2
    frame.stats.max_encoder_tokens, frame.stats.num_encoder_tokens, frame.stats.encoded_images_total = 5000, 1500, 3
    with shown(tab, frame):
        assert text(tab, "#images-summary") == "1,500 of 5,000 tokens kept · 3 encoded"
        assert "2 of images" in text(tab, "#queues")


@pytest.mark.long
def test_the_profile_of_the_browser_is_its_own(tmp_path: Path) -> None:
    program = find_chromium()
    assert program is not None
    with browser(program, tmp_path) as chromium:
        assert chromium.evaluate("1 + 1") == 2
    assert any(tmp_path.iterdir())
