"""The client and `quire bench serve` against a server whose bytes are decided here."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire.bench.datasets import PromptSpec
from quire.bench.metrics import RequestRecord
from quire.bench.openai_client import ClientSettings
from quire.bench.serving import run_load
from quire.cli.main import main
from tests.bench.openai_server import DONE, OpenAIServer, Reply, chat_parts, completion_parts, event, running

TEXTS = ["def", " ", "naïve", "🚀"]


def load(
    reply: Reply, *, endpoint: str = "completions", num_requests: int = 1, timeout: float = 120.0, num_together: int = 1
) -> tuple[list[RequestRecord], OpenAIServer]:
    with running(OpenAIServer(lambda index, body: reply, num_together=num_together)) as server:
        settings = ClientSettings(server.base_url, endpoint, "test-model")
        prompt = PromptSpec(max_tokens=4, token_ids=(1, 2, 3), messages=({"role": "user", "content": "hi"},))
        records = asyncio.run(
            run_load(
                settings,
                [prompt] * num_requests,
                [0.0] * num_requests,
                max_concurrency=None,
                timeout=timeout,
                on_done=lambda _: None,
            )
        )
    return records, server


def only(reply: Reply, **options: Any) -> RequestRecord:
    records, _ = load(reply, **options)
    return records[0]


def test_tokens_come_from_usage() -> None:
    # Two texts in one chunk: three chunks with output, but the server says five tokens.
    parts = completion_parts(["a", "b"], num_prompt_tokens=3)
    parts[-2] = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
    record = only(Reply(parts))
    assert record.error is None
    assert (record.num_prompt_tokens, record.num_output_tokens, len(record.chunk_times)) == (3, 5, 2)


def test_tokens_come_from_chunks_without_usage() -> None:
    record = only(Reply(completion_parts(TEXTS)))
    assert record.error is None
    assert (record.num_prompt_tokens, record.num_output_tokens) == (0, len(TEXTS))


def test_an_empty_text_is_a_token_too_but_the_finish_chunk_is_not() -> None:
    assert len(only(Reply(completion_parts(["", "x"]))).chunk_times) == 2


def test_chat_role_and_finish_are_not_tokens() -> None:
    record = only(Reply(chat_parts(["Hel", "lo"])), endpoint="chat")
    assert record.error is None
    assert len(record.chunk_times) == 2


def test_reasoning_counts_as_output() -> None:
    parts = [event({"choices": [{"delta": {"reasoning_content": "hm"}}]}), DONE]
    assert len(only(Reply(parts), endpoint="chat").chunk_times) == 1


def test_invisible_tokens_still_have_a_first() -> None:
    parts = [
        event({"choices": [{"text": "", "finish_reason": "stop"}]}),
        event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}),
        DONE,
    ]
    record = only(Reply(parts))
    assert record.error is None
    assert (len(record.chunk_times), record.num_output_tokens) == (1, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_characters_and_events_may_be_split_anywhere(size: int) -> None:
    stream = b"".join(completion_parts(TEXTS, num_prompt_tokens=3))
    record = only(Reply([stream[start : start + size] for start in range(0, len(stream), size)]))
    assert record.error is None
    assert record.num_output_tokens == len(TEXTS)
    assert len(record.chunk_times) == len(TEXTS)


def test_slow_chunks_are_timed_apart() -> None:
    [record], server = load(Reply(completion_parts(TEXTS), delay=0.02))
    assert len(record.itl) == len(TEXTS) - 1
    assert all(sent < seen for sent, seen in zip(server.sent_at, record.chunk_times, strict=False))
    assert record.due <= record.sent < record.chunk_times[0] < record.end


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply([b'{"error": {"message": "no such field", "param": "x"}}'], status=400), "HTTP 400: no such field"),
        (Reply([b"<html>busy</html>\nmore"], status=503), "HTTP 503: <html>busy</html>"),
        (Reply([b'{"detail": "Not Found"}'], status=404), "HTTP 404: Not Found"),
        (Reply([b"data: {oops}\n\n"]), "malformed event in the stream"),
        (Reply([b"data: \xff\n\n"]), "malformed event in the stream"),
        (Reply([b'data: {"choices": 3}\n\n']), "malformed event in the stream"),
        (Reply([event({"error": {"message": "engine died"}})]), "error in the stream: engine died"),
        (Reply(completion_parts(["a"])[:-1]), "stream ended before [DONE]"),
        (Reply([DONE]), "no output"),
    ],
)
def test_failures_have_reasons(reply: Reply, reason: str) -> None:
    assert only(reply).error == reason


def test_a_cut_connection_is_a_failure() -> None:
    error = only(Reply(completion_parts(["a"])[:1], close_early=True)).error
    assert error is not None
    assert error.startswith("RemoteProtocolError")


def test_silence_is_a_timeout() -> None:
    assert only(Reply(completion_parts(["a"]), delay=5.0), timeout=0.1).error == "timeout"


def test_the_body_of_a_completions_request() -> None:
    _, server = load(Reply(completion_parts(["a"])))
    assert server.paths == ["/v1/completions"]
    assert server.requests == [
        {
            "model": "test-model",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 4,
            "prompt": [1, 2, 3],
        }
    ]
    assert server.headers[0]["accept-encoding"] == "identity"


def test_all_at_once_means_all_at_once() -> None:
    _, server = load(Reply(completion_parts(["a"])), num_requests=20, num_together=20)
    assert server.most_open == 20


def bench(server: OpenAIServer, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "result.json"
    status = main(["bench", "serve", "--base-url", server.base_url, "--json", str(file), "--num-prompts", "6", *flags])
    return status, json.loads(file.read_text()) if file.stat().st_size else {}


def test_the_command_reports_successes_and_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(index: int, body: dict[str, Any]) -> Reply:
        return (
            Reply([b"overloaded"], status=429)
            if index % 3 == 2
            else Reply(completion_parts(TEXTS, num_prompt_tokens=8))
        )

    with running(OpenAIServer(answer)) as server:
        status, result = bench(server, tmp_path, "--input-len", "8", "--goodput", "ttft:60000", "--seed", "3")
    assert status == 0
    assert (result["num_completed"], result["num_failed"]) == (4, 2)
    assert result["failures"] == {"HTTP 429: overloaded": 2}
    assert (result["num_prompt_tokens"], result["num_output_tokens"]) == (32, 16)
    assert result["num_good"] == 4
    assert result["output_throughput"] == pytest.approx(16 / result["duration"])
    assert {"mean", "median", "std", "p50", "p90", "p99"} <= set(result["ttft_ms"])
    assert result["options"]["model"] == "test-model"
    assert [len(request["prompt"]) for request in server.requests] == [8] * 6
    assert len({tuple(request["prompt"]) for request in server.requests}) == 6
    printed = capsys.readouterr().out
    assert "4 of 6" in printed
    assert "failed: HTTP 429: overloaded" in printed
    assert "time to first token (ttft)" in printed


def test_ctrl_c_prints_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def reply(index: int, body: dict[str, Any]) -> Reply:
        if index == 3:
            os.kill(os.getpid(), signal.SIGINT)
            return Reply(completion_parts(TEXTS), delay=60.0)
        return Reply(completion_parts(TEXTS))

    file = tmp_path / "result.json"
    with running(OpenAIServer(reply)) as server:
        flags = ["--base-url", server.base_url, "--json", str(file), "--num-prompts", "6", "--max-concurrency", "1"]
        assert main(["bench", "serve", *flags]) == 130
    assert "interrupted: 3 of 6 requests had ended" in capsys.readouterr().err
    result = json.loads(file.read_text())
    assert result["is_interrupted"] is True
    assert result["num_completed"] == 3


def test_the_command_fails_when_every_request_fails(tmp_path: Path) -> None:
    with running(OpenAIServer(lambda index, body: Reply([b"no"], status=500))) as server:
        status, result = bench(server, tmp_path)
    assert status == 1
    assert result["failures"] == {"HTTP 500: no": 6}
    assert result["ttft_ms"] is None


def test_chat_with_random_pictures(tmp_path: Path) -> None:
    with running(OpenAIServer(lambda index, body: Reply(chat_parts(["hi"])))) as server:
        flags = ["--endpoint", "chat", "--model", "m", "--input-len", "5"]
        for _ in range(2):
            status, _ = bench(server, tmp_path, *flags, "--images", "1:2", "--image-size", "8x4,6x6")
            assert status == 0
    contents = [body["messages"][0]["content"] for body in server.requests]
    urls = [[part["image_url"]["url"] for part in content[:-1]] for content in contents]
    assert sorted(urls[:6]) == sorted(urls[6:]), "drawn from the seed"
    assert {len(each) for each in urls} == {1, 2}
    files = {base64.b64decode(url.removeprefix("data:image/jpeg;base64,")) for each in urls for url in each}
    assert len(files) == sum(map(len, urls[:6])), "no two are alike"
    assert {Image.open(io.BytesIO(file)).size for file in files} == {(8, 4), (6, 6)}
    assert all(len(content[-1]["text"].split()) == 5 for content in contents)


def test_chat_with_every_flag(tmp_path: Path) -> None:
    with running(OpenAIServer(lambda index, body: Reply(chat_parts(["hi"])))) as server:
        server.base_url += "/v1/"
        flags = ["--endpoint", "chat", "--model", "m", "--api-key", "secret", "--ignore-eos", "--temperature", "0.5"]
        flags += ["--extra-body", '{"top_k": 3}', "--input-len", "5", "--prefix-len", "2", "--output-len", "3"]
        flags += ["--request-rate", "500", "--burstiness", "2", "--percentile-metrics", "itl,ttft"]
        status, result = bench(server, tmp_path, *flags, "--metric-percentiles", "75")
    assert status == 0
    assert set(server.paths) == {"/v1/chat/completions"}
    for body, headers in zip(server.requests, server.headers, strict=True):
        assert headers["authorization"] == "Bearer secret"
        assert {key: body[key] for key in ("model", "max_tokens", "ignore_eos", "temperature", "top_k")} == {
            "model": "m",
            "max_tokens": 3,
            "ignore_eos": True,
            "temperature": 0.5,
            "top_k": 3,
        }
        (message,) = body["messages"]
        assert len(message["content"].split()) == 7
    assert "p75" in result["ttft_ms"]
    assert "tpot_ms" not in result
    assert "secret" not in json.dumps(result)


def test_max_concurrency_is_kept(tmp_path: Path) -> None:
    with running(OpenAIServer(lambda index, body: Reply(completion_parts(["a"])), num_together=2)) as server:
        status, _ = bench(server, tmp_path, "--max-concurrency", "2")
    assert status == 0
    assert server.most_open == 2


def test_requests_go_out_when_they_are_due(tmp_path: Path) -> None:
    prompt = PromptSpec(max_tokens=1, text="x")
    offsets = [0.0, 0.05, 0.1]
    with running(OpenAIServer(lambda index, body: Reply(completion_parts(["a"])))) as server:
        settings = ClientSettings(server.base_url, "completions", "m")
        records = asyncio.run(
            run_load(settings, [prompt] * 3, offsets, max_concurrency=None, timeout=60, on_done=lambda _: None)
        )
    assert [record.due - records[0].due for record in records] == pytest.approx(offsets)
    assert all(record.sent >= record.due for record in records)


def test_a_dataset_is_sent_as_it_is(tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "one", "max_tokens": 1}\n{"prompt_token_ids": [4, 5]}\n{"prompt": "three"}\n')
    with running(OpenAIServer(lambda index, body: Reply(completion_parts(["a"])))) as server:
        flags = ["--dataset", str(dataset), "--output-len", "9", "--num-prompts", "2", "--max-concurrency", "1"]
        status, _ = bench(server, tmp_path, *flags)
    assert status == 0
    assert [(request["prompt"], request["max_tokens"]) for request in server.requests] == [("one", 1), ([4, 5], 9)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--endpoint", "chat", "--prompt-format", "ids"], "takes no token ids"),
        (["--request-rate", "0"], "--request-rate"),
        (["--goodput", "ttff:3"], "--goodput"),
        (["--percentile-metrics", "tpott"], "did you mean 'tpot'"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--num-prompts", "0"], "must be at least 1"),
        (["--timeout", "0"], "--timeout"),
        (["--workload", "x"], "--workload needs --dataset"),
        (["--extra-body", "[]"], "must be a JSON object"),
        (["--json", "/nonexistent/dir/x.json"], "cannot write"),
        (["--endpoint", "embeddings"], "invalid choice"),
        (["--dataset", "x.jsonl", "--input-len", "3"], "not with --dataset"),
        (["--dataset", "x.jsonl", "--output-len", "3:4"], "one number"),
        (["--images", "1"], "--images needs --endpoint chat"),
        (["--image-size", "4x4"], "--image-size needs --images"),
        (["--endpoint", "chat", "--images", "x"], "--images must be"),
        (["--endpoint", "chat", "--images", "1", "--image-size", "4x4,0x4"], "--image-size must be pixels"),
        (["--endpoint", "chat", "--images", "1", "--dataset", "x.jsonl"], "not with --dataset"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_an_unreachable_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1"]) == 2
    assert "cannot reach http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "message"), [(200, "lists no model"), (401, "HTTP 401")])
def test_a_server_without_models_is_one_line(status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running(OpenAIServer(lambda index, body: Reply(), models=Reply([b'{"data": []}'], status))) as server:
        assert main(["bench", "serve", "--base-url", server.base_url]) == 2
    assert message in capsys.readouterr().err


def test_connections_are_used_again(tmp_path: Path) -> None:
    with running(OpenAIServer(lambda index, body: Reply(completion_parts(["a"])))) as server:
        bench(server, tmp_path, "--max-concurrency", "1", "--model", "m")
    assert server.num_connections == 1
