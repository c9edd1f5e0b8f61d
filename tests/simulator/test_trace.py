"""Trace files: what is read is what was written, and what is wrong is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import UserError
from quire.simulator.scenario import TraceSource
from quire.simulator.trace import TraceImage, TraceRequest, read_trace, write_trace


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    arrivals = sorted(draw(st.lists(st.floats(0, 1e6), min_size=1, max_size=8)))
    found = []
    for arrival in arrivals:
        names = st.one_of(st.none(), st.text("ab:/", min_size=1, max_size=4))
        drawn = draw(st.lists(st.tuples(st.integers(1, 2**16), names), max_size=3))
        images = tuple(TraceImage(*each) for each in drawn)
        own = sum(image.num_tokens for image in images)
        text = draw(st.integers(1 + bool(images), 10**6))
        tokens = text + own
        group = draw(st.one_of(st.none(), st.text(min_size=1, max_size=8)))
        beams = draw(st.integers(0, 4))
        found.append(
            TraceRequest(
                arrival=arrival,
                input_tokens=tokens,
                output_tokens=draw(st.integers(1, 10**6)),
                prefix_group=group,
                prefix_tokens=0 if group is None else draw(st.integers(1, text - bool(images))),
                n=1 if beams else draw(st.integers(1, 4)),
                beam_width=beams,
                priority=draw(st.integers(-100, 100)),
                images=images,
            )
        )
    return found


@given(requests=traces())
def test_json_lines_come_back_as_they_were(
    requests: list[TraceRequest], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    write_trace(path, requests)
    assert list(read_trace(path)) == requests


def test_csv_in_any_order_of_columns_with_empty_cells(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "output_tokens, arrival,input_tokens,prefix_group,prefix_tokens\n7,0.5,20,,\n\n8,1.5,30,a,12\n9,1.5,40,a,\n"
    )
    assert list(read_trace(path)) == [
        TraceRequest(0.5, 20, 7),
        TraceRequest(1.5, 30, 8, "a", 12),
        TraceRequest(1.5, 40, 9, "a", 40),  # all of its tokens, when the trace does not say how many
    ]


def test_what_a_spreadsheet_writes_first_is_no_part_of_a_name(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfarrival,input_tokens,output_tokens\r\n0.5,3,4\r\n")
    assert list(read_trace(path)) == [TraceRequest(0.5, 3, 4)]


GOOD = '{"arrival": 1, "input_tokens": 5, "output_tokens": 5}\n'


@pytest.mark.parametrize(
    ("name", "text", "line", "message"),
    [
        ("t.jsonl", GOOD + "{no", 2, "not valid JSON"),
        ("t.jsonl", GOOD + "\n[1]\n", 3, "expected an object"),
        ("t.jsonl", GOOD + '{"arrival": 2, "input_tokens": 5}', 2, "output_tokens is missing"),
        ("t.jsonl", '{"arival": 2}', 1, "unknown column 'arival'; did you mean 'arrival'"),
        ("t.jsonl", GOOD + '{"arrival": 0.5, "input_tokens": 5, "output_tokens": 5}', 2, "before the line above"),
        ("t.jsonl", '{"arrival": -1, "input_tokens": 5, "output_tokens": 5}', 1, "arrival must be a number"),
        ("t.jsonl", '{"arrival": true, "input_tokens": 5, "output_tokens": 5}', 1, "arrival must be a number"),
        ("t.jsonl", '{"arrival": NaN, "input_tokens": 5, "output_tokens": 5}', 1, "arrival must be a number"),
        ("t.jsonl", '{"arrival": 1, "input_tokens": 0, "output_tokens": 5}', 1, "input_tokens must be a whole number"),
        ("t.jsonl", '{"arrival": 1, "input_tokens": 2.5, "output_tokens": 5}', 1, "input_tokens must be a whole"),
        ("t.jsonl", '{"arrival": 1, "input_tokens": 9, "output_tokens": 5, "prefix_tokens": 3}', 1, "prefix_group"),
        (
            "t.jsonl",
            '{"arrival": 1, "input_tokens": 9, "output_tokens": 5, "prefix_group": "a", "prefix_tokens": 10}',
            1,
            "exceeds input_tokens",
        ),
        ("t.jsonl", '{"arrival": 1, "input_tokens": 9, "output_tokens": 5, "n": 2, "beam_width": 2}', 1, "exclude"),
        ("t.csv", "arrival,input_tokens,output_tokens\n1,2,3\n1,2\n", 3, "2 values for 3 columns"),
        ("t.csv", "arrival,input_tokens,output_tokens\n1,x,3\n", 2, "input_tokens must be a whole number"),
        ("t.csv", "arrival,input_tokens\n", 1, "output_tokens is missing"),
        ("t.csv", "arrival,arrival,input_tokens,output_tokens\n1,2,3,4\n", 1, "'arrival' is there twice"),
        ("t.csv", '"' + "x" * 200_000, 1, "field larger than field limit"),
        ("t.jsonl", GOOD + "[" * 200_000, 2, "not valid JSON"),
        ("t.jsonl", GOOD.replace("}", ', "n": 257}'), 1, "n must be at most 256"),
        ("t.jsonl", GOOD.replace("}", ', "beam_width": 33}'), 1, "beam_width must be at most 32"),
        ("t.jsonl", '{"arrival": 1, "input_tokens": 9, "output_tokens": 0}', 1, "output_tokens must be a whole number"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, name: str, text: str, line: int, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        list(read_trace(path))
    assert caught.value.message.startswith(f"{path}:{line}: ")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.txt", b"", "expected a .jsonl or .csv file"),
        ("t.jsonl", b"", "holds no requests"),
        ("t.csv", b"arrival,input_tokens,output_tokens\n", "holds no requests"),
        ("t.jsonl", b"\xff\xfe", "not UTF-8"),
        ("absent.jsonl", None, "cannot read trace"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_trace(path))


def test_a_trace_is_stretched_to_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, [TraceRequest(float(second), 5, 5) for second in range(1, 11)])
    source = TraceSource(path)
    assert source.rate() == 1.0
    assert [request.arrival for request in source.requests(4.0)] == [second / 4 for second in range(1, 11)]
    assert [request.arrival for request in source.requests(None)] == list(range(1, 11))


def test_a_trace_of_one_moment_has_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, [TraceRequest(0.0, 5, 5)] * 3)
    with pytest.raises(UserError, match="have no rate"):
        list(TraceSource(path).requests(2.0))
