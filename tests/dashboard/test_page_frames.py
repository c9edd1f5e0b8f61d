"""The page shown frames that a test made up: large pools, a host pool, every status, names that look like HTML."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.dashboard.page import load_page
from quire.dashboard.recent import EndedRequest, Percentiles, Recent
from quire.dashboard.trail import TrailSample
from quire.server.live import KVHistory
from quire.server.live_admin import LogLine, LogLines
from quire.server.protocol.pooling import (
    ClassificationItem,
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingItem,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingUsage,
)
from tests.dashboard.chromium import Chromium, browser, find_chromium
from tests.dashboard.frames import frame_of
from tests.dashboard.test_page import COUNTS, text
from tests.fakes.core import CoreDriver, make_config

pytestmark = pytest.mark.browser


Answers = dict[str, Callable[[str, bytes], bytes]]
"""Paths of other routes, with what they answer to a path with its query and a body."""


@contextmanager
def shown(tab: Chromium, frame: Any, answers: Answers | None = None, view: str = "#server") -> Iterator[None]:
    """The page, connected to a server that sends this frame and nothing more."""
    page, over = load_page(), threading.Event()
    answers = {"/debug/kv/history": lambda *_: msgspec.json.encode(KVHistory([], is_admin=False)), **(answers or {})}
    event = b"data: %b\n\n" % msgspec.json.encode(frame)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path in answers:
                body = answers[path](self.path, self.rfile.read(int(self.headers["Content-Length"] or 0)))
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(body)
                return
            is_page = self.path == "/"
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8" if is_page else "text/event-stream")
            self.send_header("Content-Security-Policy", page.policy)
            self.end_headers()
            self.wfile.write(page.html if is_page else event)
            if not is_page:
                over.wait()

        do_POST = do_GET  # noqa: N815 - the name is http.server's

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        tab.problems.clear()
        tab.set_size(1280, 900)
        tab.open(f"http://127.0.0.1:{server.server_port}/{view}")
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


def test_age_and_speed_of_a_request(tab: Chromium) -> None:
    driver = pressed_driver(1)
    for _ in range(4):
        driver.step()
    frame = frame_of(driver)
    (request,) = frame.kv.requests
    request.seconds, request.tokens_per_second = 150.0, 48.6
    with shown(tab, frame):
        assert text(tab, ".request .what").split(" · ")[1:3] == ["49 tokens/s", "3 min"]


def test_outcomes_refusals_and_errors(tab: Chromium) -> None:
    frame = frame_of(CoreDriver(make_config()))
    with shown(tab, frame):
        assert tab.evaluate("document.querySelector('.ended').hidden")
    frame.outcomes = {"stop": 1200, "max_num_queued_reqs": 3}
    frame.num_client_errors, frame.num_server_errors = 7, 1
    with shown(tab, frame):
        assert text(tab, ".outcomes") == "1,200 stop · 3 refused (the queue was full) · 7 answers 4xx · 1 answer 5xx"


def test_charts_begin_with_what_the_server_has_kept(tab: Chromium) -> None:
    """Ten minutes of 40 tokens a second, five idle ones."""
    frame = frame_of(CoreDriver(make_config(num_blocks=64)))
    frame.stats.generation_tokens_total = 24_000
    samples = [
        TrailSample(900.0 - 5 * step, 200 * step, 10 * step, 20 * step, 1, 2, 32, 0.5 * step, step)
        for step in range(121)
    ]
    samples.append(msgspec.structs.replace(samples[-1], seconds=0.0, num_running=0))
    history = {"/debug/kv/history": lambda *_: msgspec.json.encode(KVHistory(samples, is_admin=False))}
    with shown(tab, frame, history):
        tab.wait_for("document.querySelector('#span').innerText === 'the last 15 minutes'")
        figures = tab.evaluate("[...document.querySelectorAll('#figures figure')].map((f) => f.innerText.split('\\n'))")
        names = ["Tokens a second", "Time to first token", "Prefix cache hits", "KV cache in use", "Requests running"]
        assert [figure[0] for figure in figures] == names
        assert figures[0][1:] == ["0.0", "peak 40"]
        assert figures[1][1:] == ["500 ms", "peak 500 ms"]
        assert figures[2][1] == "50 %"
        # The line of tokens is high in the first two thirds, and low after it: its topmost row of pixels in each tenth.
        tops = tab.evaluate("""(() => {
            const chart = document.querySelector('#figures canvas');
            const data = chart.getContext('2d').getImageData(0, 0, chart.width, chart.height).data;
            const isDrawn = (x, y) => data[4 * (y * chart.width + x) + 3] > 0;
            const top = (x) => [...Array(chart.height).keys()].find((y) => isDrawn(x, y));
            return [...Array(10).keys()].map((i) => top(Math.floor((i + 0.5) * chart.width / 10)));
        })()""")
        assert max(tops[:6]) < 10
        assert min(tops[7:9]) > 30


class TestAdmin:
    LINE = LogLine(1, 1_700_000_000.0, "WARNING", "quire.test", "<img src=x onerror=alert(1)>", "cmpl-1")

    def test_the_log_and_the_end_of_a_request(self, tab: Chromium) -> None:
        sent: list[tuple[str, bytes]] = []

        def log(path: str, body: bytes) -> bytes:
            sent.append((path, body))
            if "after=1&process=new" in path:
                return msgspec.json.encode(LogLines([], "new"))
            if "after=1&process=old" in path:  # the server was started again, or another API process answers
                return msgspec.json.encode(LogLines([msgspec.structs.replace(self.LINE, time=1.0)], "new"))
            return msgspec.json.encode(LogLines([self.LINE], "old"))

        def abort(path: str, body: bytes) -> bytes:
            sent.append((path, body))
            return b""

        answers = {
            "/debug/kv/history": lambda *_: msgspec.json.encode(KVHistory([], is_admin=True)),
            "/debug/log": log,
            "/debug/abort": abort,
        }
        driver = pressed_driver(1)
        driver.step()
        frame = frame_of(driver)
        with shown(tab, frame, answers):
            tab.wait_for("document.querySelector('.end')")
            assert not sent, "the log is read when it is open"
            tab.evaluate("document.querySelector('#log-card').open = true")
            tab.wait_for("document.querySelector('.line')")
            shown_line = text(tab, ".line")
            assert shown_line == f"22:13:20 WARNING quire.test cmpl-1 {self.LINE.message}"
            tab.evaluate("document.querySelector('.end').click()")
            name = frame.kv.requests[0].request_id
            while ("/debug/abort", msgspec.json.encode({"request_id": name})) not in sent:
                tab.evaluate("new Promise((done) => setTimeout(done, 20))")
            while not any(path == "/debug/log?after=1&process=new" for path, _ in sent):
                tab.evaluate("new Promise((done) => setTimeout(done, 20))")
            times = tab.evaluate("[...document.querySelectorAll('.line')].map((line) => Number(line.dataset.time))")
            assert times == [1.0, self.LINE.time], "each process has numbers of its own; the lines stand in their order"

    def test_a_line_of_a_batch_has_no_end(self, tab: Chromium) -> None:
        """Aborted, it would be asked again."""
        driver = pressed_driver(1)
        driver.add("line", [1, 2, 3], max_tokens=9, is_background=True)
        driver.step()
        answers = {"/debug/kv/history": lambda *_: msgspec.json.encode(KVHistory([], is_admin=True))}
        with shown(tab, frame_of(driver), answers):
            tab.wait_for("document.querySelector('.end')")
            assert tab.evaluate("document.querySelectorAll('.request').length") == 2
            assert tab.evaluate("document.querySelectorAll('.end').length") == 1
            assert "line of a batch" in text(tab, "#queues")

    def test_others_have_neither(self, tab: Chromium) -> None:
        driver = pressed_driver(1)
        driver.step()
        with shown(tab, frame_of(driver)):
            assert tab.evaluate("document.querySelector('#log-card').hidden")
            assert tab.evaluate("document.querySelectorAll('.request').length") == 1
            assert tab.evaluate("document.querySelectorAll('.end').length") == 0


class TestPooling:
    """The first tab of models that embed or classify."""

    def frame(self, task: str) -> Any:
        frame = frame_of(CoreDriver(make_config()))
        frame.task = task
        return frame

    def run(self, tab: Chromium, texts: str) -> list[list[str]]:
        assert tab.evaluate("document.querySelector('#server-view').hidden")
        assert tab.evaluate("document.querySelector('.try').hidden")
        tab.evaluate(f"document.querySelector('#texts').value = {texts!r}")
        tab.evaluate("document.querySelector('#texts').dispatchEvent(new Event('input', {bubbles: true}))")
        tab.evaluate("document.querySelector('#vectors').requestSubmit()")
        tab.wait_for("document.querySelector('#made table')")
        rows: list[list[str]] = tab.evaluate(
            "[...document.querySelectorAll('#made tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))"
        )
        return rows

    def test_vectors_and_their_similarity(self, tab: Chromium) -> None:
        def embed(_path: str, body: bytes) -> bytes:
            asked = msgspec.json.decode(body, type=EmbeddingRequest)
            assert asked.input == ["a <b>", "b"]
            items = [EmbeddingItem(0, [3.0, 4.0]), EmbeddingItem(1, [4.0, -3.0])]
            usage = PoolingUsage(prompt_tokens=5, total_tokens=5)
            return msgspec.json.encode(EmbeddingResponse(id="e", created=0, model="tiny", usage=usage, data=items))

        with shown(tab, self.frame("embed"), {"/v1/embeddings": embed}, view=""):
            assert text(tab, "#tab-first") == "Embed"
            assert self.run(tab, "a <b>\n\nb") == [
                ["1. a <b>", "2", "5.000", "3.0000 4.0000"],
                ["2. b", "2", "5.000", "4.0000 -3.0000"],
                ["1. a <b>", "1.000", "0.000"],
                ["2. b", "0.000", "1.000"],
            ]
            assert text(tab, "#vectors-status").startswith("5 tokens in ")
            curl = tab.evaluate("document.querySelector('#vectors-curl').textContent")
            assert json.loads(curl.split("-d '")[1].rstrip("'"))["input"] == ["a <b>", "b"]

    def test_labels(self, tab: Chromium) -> None:
        def classify(_path: str, body: bytes) -> bytes:
            assert msgspec.json.decode(body, type=ClassificationRequest).input == ["a"]
            usage = PoolingUsage(prompt_tokens=1, total_tokens=1)
            items = [ClassificationItem(0, "spam", [0.25, 0.75], 2)]
            return msgspec.json.encode(ClassificationResponse(id="c", created=0, model="tiny", usage=usage, data=items))

        with shown(tab, self.frame("classify"), {"/classify": classify}, view=""):
            assert text(tab, "#tab-first") == "Classify"
            assert self.run(tab, "a") == [["1. a", "spam", "75 %", "0.2500 0.7500"]]


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
