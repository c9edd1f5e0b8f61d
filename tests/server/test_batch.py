"""`quire run-batch`: answers in the order of the requests, and errors in their lines."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.cli import run_batch as run_batch_command
from quire.cli.main import main
from quire.server.batch import NO_JSON, Pace, run_batch
from quire.server.batch_lines import BYTE_ORDER_MARK, AnsweredLine, custom_id_of, unanswered
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving


def line(number: int, url: str = "/v1/completions", **body: Any) -> bytes:
    fields = {"custom_id": f"r{number}", "method": "POST", "url": url, "body": {"max_tokens": 9, **body}}
    return json.dumps(fields).encode() + b"\n"


async def answers(served: Served, lines: list[bytes], concurrency: int = 4) -> list[dict[str, Any]]:
    written: list[bytes] = []
    assert served.app is not None
    counts = await run_batch(served.app, lines, written.append, pace=Pace(concurrency))
    found = [json.loads(each) for each in written]
    assert counts.num_failed == sum(each["error"] is not None for each in found)
    assert counts.total == len(found)
    return found


@pytest.fixture
async def local(model_path: Path) -> AsyncIterator[Served]:
    async with serving(model_path) as served:
        yield served


async def test_every_route_and_the_order(local: Served) -> None:
    chat = [{"role": "user", "content": "=chat"}]
    lines = [
        line(0, prompt="=" + "long" * 20, max_tokens=100),
        line(1, "/v1/chat/completions", messages=chat),
        b"\n",
        line(2, "/v1/responses", input="=response", max_tokens=None),
        line(3, "/v1/messages", model="tiny", messages=chat),
        line(4, prompt="=last"),
    ]
    found = await answers(local, lines)
    assert [each["custom_id"] for each in found] == ["r0", "r1", "r2", "r3", "r4"]
    assert all(each["error"] is None and each["response"]["status_code"] == 200 for each in found)
    bodies = [each["response"]["body"] for each in found]
    assert bodies[0]["choices"][0]["text"] == "long" * 20
    assert bodies[1]["choices"][0]["message"]["content"] == "chat"
    assert bodies[2]["output"][0]["content"][0]["text"] == "response"
    assert bodies[3]["content"][0]["text"] == "chat"
    assert len({each["id"] for each in found}) == 5
    await local.until_idle()


async def test_what_is_wrong_with_a_line_stands_in_its_place(local: Served) -> None:
    lines = [
        b"no json\n",
        b'{"custom_id": "only"}\n',
        b"\xff\n",
        line(0, "/v1/models"),
        line(1, prompt="a", stream=True),
        json.dumps({"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}}).encode(),
        line(2, prompt="a", temperature=-1),
        line(3, prompt="a", model="other"),
        line(4, "/v1/embeddings", input="a", max_tokens=None),
        line(5, prompt="=fine"),
        line(6, "/v1/responses", input="a", background=True, max_tokens=None),
    ]
    found = await answers(local, lines, concurrency=3)
    assert [each["custom_id"] for each in found] == [
        None,
        "only",
        None,
        "r0",
        "r1",
        "get",
        "r2",
        "r3",
        "r4",
        "r5",
        "r6",
    ]
    statuses = [each["response"] and each["response"]["status_code"] for each in found]
    assert statuses == [None, None, None, None, None, None, 400, 404, 404, 200, None]
    assert (found[6]["error"]["param"], found[6]["response"]["body"]) == ("temperature", None)
    assert found[4]["error"]["message"].startswith("a batch is not streamed")
    assert found[10]["error"]["message"].startswith("a batch waits for its answers")


async def test_lines_of_routes_that_stream_by_default(model_path: Path) -> None:
    settings = ServerSettings(served_model_name=["tiny"], api="ollama")
    async with serving(model_path, settings) as served:
        chat = {"messages": [{"role": "user", "content": "=b"}], "max_tokens": None}
        lines = [
            line(0, "/api/generate", model="tiny", prompt="=a", max_tokens=None),
            line(1, "/api/chat", model="tiny", **chat),
        ]
        found = await answers(served, [*lines, line(2, "/api/chat", model="other", **chat)])
        assert [each["response"]["body"]["done"] for each in found[:2]] == [True, True]
        assert "other" in found[2]["error"]["message"]
        await served.until_idle()


@pytest.mark.parametrize("content", [b'{"a": 1}\n{"b": 2}\n', b"\xff\x00\n", b"", b'{\n "a": 1\n}\n'])
async def test_each_answer_is_one_line_of_the_results(content: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(content)(scope, receive, send)

    written: list[bytes] = []
    counts = await run_batch(app, [line(0), line(1)], written.append, pace=Pace(2))
    assert [each.count(b"\n") for each in written] == [1, 1]
    found = [json.loads(each) for each in written]
    if counts.num_answered:
        assert [each["response"]["body"] for each in found] == [{"a": 1}] * 2
    else:
        assert {each["error"]["code"] for each in found} == {NO_JSON}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_a_file_as_an_editor_on_windows_writes_it(local: Served, mark: bytes, end: bytes) -> None:
    lines = [line(number, prompt=f"={number}").replace(b"\n", end) for number in range(2)]
    lines[0] = mark + lines[0]
    found = await answers(local, [*lines, end])
    assert [each["response"]["body"]["choices"][0]["text"] for each in found] == ["0", "1"]
    assert [each["custom_id"] for each in found] == ["r0", "r1"]
    await local.until_idle()


def test_a_byte_order_mark_before_a_blank_line() -> None:
    lines = [BYTE_ORDER_MARK + b"\n", b'{"custom_id": "a"}\n', b'{"custom_id": "b"}\n']
    assert list(unanswered(iter(lines), [AnsweredLine("a", False)])) == lines[2:]
    assert next(unanswered(iter(lines), [])).isspace()


async def test_a_byte_order_mark_elsewhere_is_no_request(local: Served) -> None:
    lines = [line(0, prompt="=0"), b"\xef\xbb\xbf" + line(1, prompt="=1")]
    found = await answers(local, lines)
    assert [each["error"] and each["error"]["code"] for each in found] == [None, "malformed_batch_line"]
    await local.until_idle()


async def test_a_second_line_with_a_custom_id_is_refused(local: Served) -> None:
    lines = [
        line(0, prompt="=a"),
        line(1, "/v1/nothing"),
        line(0, prompt="=b"),
        line(1, prompt="=c"),
        line(2, prompt="=d"),
    ]
    found = await answers(local, lines)
    codes = [each["error"] and each["error"]["code"] for each in found]
    assert codes == [None, "invalid_batch_line", "duplicate_custom_id", "duplicate_custom_id", None]
    assert [each["custom_id"] for each in found] == ["r0", "r1", "r0", "r1", "r2"]
    assert found[2]["response"] is None
    assert "custom_id 'r0'" in found[2]["error"]["message"]
    await local.until_idle()


async def test_a_large_line_keeps_its_place(local: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.batch.LARGE_BYTES", 200)
    lines = [line(0, prompt="=a", user="u" * 300), line(0, prompt="=b"), line(1, user="u" * 300, max_tokens=-1)]
    found = await answers(local, lines)
    assert [each["error"] and each["error"]["code"] for each in found][:2] == [None, "duplicate_custom_id"]
    assert found[2]["response"]["status_code"] == 400
    await local.until_idle()


async def test_the_file_is_read_no_further_than_is_answered(local: Served) -> None:
    num_read = 0

    def lines() -> Iterator[bytes]:
        nonlocal num_read
        for number in range(40):
            num_read += 1
            yield line(number, prompt=f"={number}")

    ahead = []
    assert local.app is not None
    counts = await run_batch(local.app, lines(), lambda _: ahead.append(num_read - len(ahead)), pace=Pace(3))
    assert counts.num_answered == 40
    assert max(ahead) <= 4


async def test_a_full_disk_ends_all(local: Served) -> None:
    def full(_: bytes) -> None:
        raise OSError(28, "No space left on device")

    assert local.app is not None
    with pytest.raises(OSError, match="No space"):
        await run_batch(local.app, [line(n, prompt="a" * 20, max_tokens=99) for n in range(9)], full, pace=Pace(9))
    await asyncio.wait_for(local.until_idle(), 120)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-i", "missing.jsonl", "-o", "OUT"], "cannot open missing.jsonl"),
        (["-i", "https://a/b.jsonl", "-o", "OUT"], "must be a file"),
        (["-i", "IN", "-o", "IN"], "are the same file"),
        (["-i", "IN", "-o", "OUT", "--max-concurrency", "0"], "at least 1"),
        (["-i", "IN", "-o", "no/such/OUT"], "cannot open"),
        (["-i", "WIDE", "-o", "OUT"], "input_file is UTF-16"),
        (["-i", "IN"], "two files are required"),
        (["IN"], "two files are required"),
        (["IN", "OUT", "--port", "8358"], "port is of the server of metrics: give --enable-metrics"),
        (["OUT", "-i", "IN"], "two files are required"),
        (["IN", "OUT", "-o", "IN"], "two files are required"),
    ],
)
def test_wrong_use(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("IN").write_text("")
    Path("WIDE").write_text('{"custom_id": "a"}', "utf-16")
    assert main(["run-batch", *arguments]) == 2
    assert message in capsys.readouterr().err


ANSWERS: list[dict[str, Any]] = [
    {
        "id": f"r{index}",
        "custom_id": f"r{index}",
        "response": {"status_code": 200, "request_id": "x", "body": {"text": "a"}},
    }
    for index in range(3)
]


def batch_files(tmp_path: Path, answers: bytes) -> tuple[Path, Path]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + b"\n".join(line(index, prompt="a") for index in range(5)))
    target.write_bytes(answers)
    return source, target


@pytest.mark.parametrize("cut", [b"", b'{"id": "r3", "cus', b'{"id": "r3", "custom_id": "r3", "response": null}'])
@pytest.mark.parametrize("count", [0, 2, 3])
def test_answers_go_on_behind_those_of_before(
    cut: bytes, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = b"".join(json.dumps(answer).encode() + b"\n" for answer in ANSWERS[:count])
    source, target = batch_files(tmp_path, whole + cut)
    asked: list[bytes] = []
    seen: list[object] = []

    async def run(_: object, settings: object, concurrency: object, files: run_batch_command.Files, __: object) -> int:
        asked.extend(files.requests)
        seen.extend([files.answered, files.total])
        files.answers.write(b"more\n")
        return 0

    monkeypatch.setattr(run_batch_command, "_run", run)
    assert main(["run-batch", str(source), str(target), "--resume"]) == 0
    assert [custom_id_of(each) for each in asked if each.strip()] == [f"r{index}" for index in range(count, 5)]
    assert seen == [[AnsweredLine(f"r{index}", False) for index in range(count)], 5]
    assert target.read_bytes() == whole + b"more\n"


@pytest.mark.parametrize(
    ("answers", "flags", "message"),
    [
        (b"x\n", [], "has content: --resume goes on behind it"),
        (b"x\n", ["--resume"], "line 1 of"),
        (b'{"id": "r", "custom_id": "r1", "response": null}\n', ["--resume"], "answer 1 is to no request"),
        (b'{"id": "r", "custom_id": "r0", "response": null}\n' * 6, ["--resume"], "answer 2 is to no request"),
    ],
)
def test_a_file_that_has_content_is_not_written_over(
    answers: bytes, flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    async def run(_: object, settings: object, concurrency: object, files: run_batch_command.Files, __: object) -> int:
        return len(list(files.requests))

    monkeypatch.setattr(run_batch_command, "_run", run)
    source, target = batch_files(tmp_path, answers)
    assert main(["run-batch", str(source), str(target), *flags]) == 2
    assert message in capsys.readouterr().err
    assert target.read_bytes() == answers


@pytest.mark.long
def test_the_bundled_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(line(0, prompt="import os\n", temperature=0) + line(1, prompt="def f(", temperature=0, n=2))
    assert (
        main(["run-batch", str(source), str(target), "--num-blocks-override", "64", "--enable-metrics", "--port", "0"])
        == 0
    )
    found = [json.loads(each) for each in target.read_text().splitlines()]
    assert [len(each["response"]["body"]["choices"]) for each in found] == [1, 2]
    told = capfd.readouterr().err
    assert "2 requests in" in told
    assert re.search(r"quire: metrics on http://127\.0\.0\.1:\d+/metrics\n", told)
    target.unlink()
    source.write_bytes(b'{"custom_id": "no url"}\n' + line(0, prompt="import os\n", temperature=0))
    assert main(["run-batch", str(source), str(target), "--num-blocks-override", "64"]) == 1
    assert [json.loads(each)["error"] is None for each in target.read_text().splitlines()] == [False, True]
