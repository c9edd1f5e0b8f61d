"""What `quire top` draws: the map, the counts, the requests, rates and sparklines."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from rich.segment import Segment

from quire.cli.top import ORDER_NAMES, PIPE_WIDTH
from quire.dashboard.frame import Frame, blocks_of, number_of, owners_of
from quire.dashboard.history import History
from quire.dashboard.terminal import (
    CACHED,
    FREE,
    ORDERS,
    QUEUE_ORDER,
    BlockMap,
    _age,
    colour_of,
    counts_of,
    render,
    sparkline,
)
from tests.dashboard.frames import frame_of
from tests.fakes.core import CoreDriver, make_config


@pytest.fixture
def driver() -> CoreDriver:
    return CoreDriver(make_config(num_blocks=64, block_size=4))


def busy(driver: CoreDriver) -> Frame:
    """One request with four samples, one that runs alone, and blocks that are cached."""
    driver.add("old#1", list(range(1, 10)), max_tokens=2)
    driver.run()
    driver.add("cmpl-abc#2", list(range(20, 30)), n=4, temperature=1.0)
    driver.step()
    driver.add("cmpl-def#3", list(range(40, 50)))
    driver.step()
    driver.step()
    return frame_of(driver)


def printed(frame: Frame, width: int = 100, history: History | None = None) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(frame, history or History(), "http://server"))
    console.file.close()
    return console.export_text()


def cells(frame: Frame, width: int) -> list[tuple[object, object]]:
    """The colours of the map, in order: upper and lower half of each character."""
    console = Console(width=width, color_system="truecolor")
    found = []
    for segment in BlockMap(frame.kv).__rich_console__(console, console.options):
        assert isinstance(segment, Segment)
        if segment.text == "▀":
            assert segment.style is not None
            found.append((segment.style.color, segment.style.bgcolor))
    return found


def test_every_block_has_its_half_of_a_character(driver: CoreDriver) -> None:
    frame = busy(driver)
    width = 16
    halves = cells(frame, width)
    assert len(halves) == 2 * width
    colours = [pair[row % 2] for row in range(4) for pair in halves[row // 2 * width : row // 2 * width + width]]
    owners = owners_of(frame.kv)
    for block, colour in enumerate(colours, start=1):
        state = frame.kv.states[block]
        if state == 0:
            assert colour == FREE
        elif state == 255:
            assert colour == CACHED
        else:
            assert colour == colour_of(owners[block][0].request_id, shared=state > 1)
    assert len(set(colours)) >= 5, "free, cached, two requests, and what one shares"


def test_a_pool_of_100_000_blocks_fits_the_screen() -> None:
    driver = CoreDriver(make_config(num_blocks=100_000, block_size=4))
    driver.add("a#1", list(range(1, 30)))
    driver.step()
    frame = frame_of(driver)
    assert len(printed(frame, 80).splitlines()) < 40
    assert colour_of("a#1") in {pair[0] for pair in cells(frame, 76)}, "eight blocks in a cell do not vanish"


def test_counts(driver: CoreDriver) -> None:
    frame = busy(driver)
    counts = counts_of(frame.kv)
    stats = frame.stats
    assert counts["used"] == stats.num_used_blocks > 0
    assert counts["shared"] == stats.num_shared_blocks > 0
    assert counts["cached"] == stats.num_cached_blocks > 0
    assert counts["used"] + counts["cached"] + counts["free"] == 64


def test_the_text(driver: CoreDriver) -> None:
    text = printed(busy(driver))
    assert "Quire tiny" in text
    assert "2 running  0 preempted  0 swapped  0 waiting  0 pinned" in text
    lines = [line.split() for line in text.splitlines()]
    # chip, number, id, state, prompt, cached, generated, tokens/s, age, sequences, blocks; of steps of 10 ms
    [row] = [line for line in lines if "#2" in line]
    assert row[3:10] == ["running", "10", "0", "12", "600.0", "0.0", "s"]
    assert row[10] == "4"
    assert int(row[11]) == len(blocks_of(busy_request(driver, "cmpl-abc#2")))


@pytest.mark.parametrize(("width", "num_heads"), [(80, 6), (PIPE_WIDTH, 9)])
def test_no_head_is_cut(driver: CoreDriver, width: int, num_heads: int) -> None:
    console = Console(width=width, record=True, file=StringIO())
    frame = busy(driver)
    frame.kv.requests[0].request_id = "chatcmpl-0123456789abcdef#12345"
    console.print(render(frame, History(), "http://server:8000", size=(width, None)))
    [heads] = [line for line in console.export_text().splitlines() if line.startswith("request")]
    assert len(heads.split()) == num_heads
    assert "…" not in heads


def small(frame: Frame, order: str = "queue", num_lines: int = 20) -> list[str]:
    """The lines of a screen of 60 columns."""
    console = Console(width=60, height=num_lines, record=True, file=StringIO())
    console.print(render(frame, History(), "http://server:8000", order=order, size=(60, num_lines)))
    return [line.rstrip() for line in console.export_text().splitlines()]


def names(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines if line.startswith("██")]


def test_a_screen_of_60_by_20_shows_requests_first(driver: CoreDriver) -> None:
    lines = small(busy(driver))
    assert len(lines) <= 20
    assert names(lines) == ["#2", "#3"]
    assert lines.index(next(line for line in lines if line.startswith("██"))) < 6
    assert next(line for line in lines if "#2" in line).split()[2:] == ["running", "10", "12", "600.0", "0.0", "s"]
    assert any("64 blocks" in line for line in lines), "the map has what is left"
    for number in range(4, 30):
        driver.add(f"more#{number}", [number] * 9)
    driver.step()
    crowded = small(frame_of(driver))
    assert len(crowded) <= 20
    assert "and 22 more" in crowded


def test_the_order_of_the_requests(driver: CoreDriver) -> None:
    for number, (num_prompt, n) in enumerate([(9, 1), (30, 1), (9, 4)], start=1):
        driver.add(f"r#{number}", list(range(num_prompt)), n=n, temperature=1.0)
        driver.step()
        driver.step()
    driver.clock.advance(1.0)
    frame = frame_of(driver)
    found = {order: names(small(frame, order)) for order in ORDER_NAMES}
    assert found == {
        "queue": ["#1", "#2", "#3"],
        "age": ["#1", "#2", "#3"],
        "rate": ["#3", "#1", "#2"],
        "tokens": ["#3", "#1", "#2"],
        "blocks": ["#2", "#3", "#1"],
    }
    assert (QUEUE_ORDER, *ORDERS) == ORDER_NAMES
    assert "by blocks" in "\n".join(small(frame, "blocks"))


def test_ages() -> None:
    assert [_age(seconds) for seconds in (0.04, 9.94, 12.3, 240, 7300)] == ["0.0 s", "9.9 s", "12 s", "4 min", "2 h"]


def busy_request(driver: CoreDriver, name: str):  # type: ignore[no-untyped-def]
    [request] = [r for r in driver.scheduler.snapshot(driver.clock.now()).requests if r.request_id == name]
    return request


def test_an_idle_server(driver: CoreDriver) -> None:
    text = printed(frame_of(driver))
    assert "no requests" in text
    assert "64 free" in text


def test_adapters_have_a_line(driver: CoreDriver) -> None:
    frame = frame_of(driver)
    assert "adapters" not in printed(frame)
    stats = frame.stats
    stats.num_adapter_slots, stats.num_loaded_adapters = 8, 2
    stats.running_adapters, stats.waiting_adapters = ["sql", "[b]"], [str(number) for number in range(8)]
    text = printed(frame)
    assert "adapters: 2 of 8 slots; running sql, [b]; waiting 0, 1, 2, 3, 4, 5 and 2 more" in text


def test_images_have_a_line_and_a_column(driver: CoreDriver) -> None:
    driver.add("r#1", [1, 2, 3])
    frame = frame_of(driver)
    assert "images" not in printed(frame)
    frame.kv.requests[0].num_image_tokens = 1234
    frame.stats.max_encoder_tokens, frame.stats.num_encoder_tokens, frame.stats.encoded_images_total = 5000, 1500, 3
    text = printed(frame)
    assert "images: 1,500 of 5,000 tokens kept; 3 encoded" in text
    assert "1,234" in text


def test_more_requests_than_lines(driver: CoreDriver) -> None:
    for number in range(1, 21):
        driver.add(f"r#{number}", [number, 2, 3])
    text = printed(frame_of(driver))
    assert "20 waiting" in text
    assert "and 8 more" in text


@pytest.mark.parametrize("width", [20, 40, 200])
def test_any_width(driver: CoreDriver, width: int) -> None:
    assert max(len(line) for line in printed(busy(driver), width).splitlines()) <= width


def test_hostile_names_are_text(driver: CoreDriver) -> None:
    driver.add("[red]x[/#1", [1, 2, 3])
    driver.step()
    frame = frame_of(driver)
    frame.model = "[bold]m[/nope]"
    text = printed(frame)
    assert "[bold]m[/nope]" in text
    assert "[red]x[/" in text


def test_rates_between_frames(driver: CoreDriver) -> None:
    history = History()
    history.add_frame(frame_of(driver, first_tokens=(1.0, 2)), now=10.0)
    assert (history.tokens_per_second, history.time_to_first_token, history.hit_rate) == (None, 0.5, None)
    driver.add("a", list(range(1, 13)), max_tokens=4)
    driver.run()
    driver.add("b", list(range(1, 13)), max_tokens=4)
    driver.run()
    history.add_frame(frame_of(driver, first_tokens=(4.0, 4)), now=12.0)
    assert history.tokens_per_second == 4.0
    assert history.time_to_first_token == 1.5
    assert history.hit_rate == pytest.approx(8 / 24)
    history.add_frame(frame_of(driver, first_tokens=(4.0, 4)), now=13.0)
    assert history.tokens_per_second == 0
    assert history.values("tokens") == [None, 4.0, 0.0]
    history.add_frame(frame_of(CoreDriver(make_config())), now=14.0)
    assert history.values("tokens")[-1] is not None
    assert history.values("ttft")[-1] is None, "another server: nothing is subtracted from the old one's counts"


def test_drafts_that_were_accepted(driver: CoreDriver) -> None:
    """Where there are any: the share lately."""
    history, frame = History(), frame_of(driver)
    history.add_frame(frame, now=1.0)
    assert "drafts accepted" not in printed(frame, history=history)
    for now, counts in ((2.0, (3, 4)), (3.0, (4, 10))):
        frame = frame_of(driver)
        frame.stats.accepted_draft_tokens_total, frame.stats.draft_tokens_total = counts
        history.add_frame(frame, now=now)
    assert "drafts accepted 40%" in printed(frame, history=history)


def test_sparkline() -> None:
    assert sparkline([None, 0.0, 4.0, 8.0], 10) == " ▁▅█"
    assert sparkline([0.0, 0.0], 10) == "▁▁"
    assert sparkline([], 10) == ""
    assert len(sparkline([1.0] * 50, 10)) == 10


@pytest.mark.parametrize(("request_id", "number"), [("cmpl-x#12", 12), ("a#b#3", 3), ("plain", 0), ("x#", 0)])
def test_numbers(request_id: str, number: int) -> None:
    assert number_of(request_id) == number
