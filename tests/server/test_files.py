"""/v1/files and /v1/batches with the official client."""

from __future__ import annotations

import asyncio
import io
import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.errors import ConfigError
from quire.server.file_store import FileStore, Quotas, claimed
from quire.server.settings import ServerSettings
from tests.server.conftest import Served, serving

KEYS = '[one]\nkey = "one"\n[two]\nkey = "two"\n[few]\nkey = "few"\nrequests_per_minute = 2\n'


UNSET = "unset"


def line(number: int, url: str = "/v1/completions", **body: Any) -> bytes:
    """UNSET: leave a field out."""
    body = {name: value for name, value in {"prompt": f"={number}", "max_tokens": 9, **body}.items() if value != UNSET}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}).encode() + b"\n"


def requests(count: int, **body: Any) -> bytes:
    return b"".join(line(number, **body) for number in range(count))


def settings_of(directory: Path, **changes: Any) -> ServerSettings:
    keys = directory / "keys.toml"
    keys.write_text(KEYS)
    files = {"files_dir": str(directory / "files"), "api_key_file": str(keys)}
    return ServerSettings(port=0, served_model_name=["tiny"], **{**files, **changes})


def client_of(served: Served, key: str = "one") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
async def served(model_path: Path, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(model_path, settings_of(tmp_path), live=True) as served:
        served.context.start()
        yield served
        served.context.drain()


async def upload(client: openai.AsyncOpenAI, content: bytes, **fields: Any) -> Any:
    return await client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch", **fields)


async def begin(client: openai.AsyncOpenAI, content: bytes, **fields: Any) -> Any:
    file = await upload(client, content)
    fields = {"endpoint": "/v1/completions", "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=file.id, **fields)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(60):
        while (found := await client.batches.retrieve(batch_id)).status not in (
            "completed", "failed", "expired", "cancelled",
        ):  # fmt: skip
            await asyncio.sleep(0.02)
    return found


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


async def test_a_batch_is_answered(served: Served, tmp_path: Path) -> None:
    client = client_of(served)
    content = requests(20) + line(20, temperature=-1) + line(21, model="other")
    batch = await begin(client, content, metadata={"kind": "nightly"})
    assert (batch.object, batch.status, batch.completion_window) == ("batch", "validating", "24h")
    found = await ended(client, batch.id)
    assert (found.status, found.metadata) == ("completed", {"kind": "nightly"})
    assert (found.request_counts.total, found.request_counts.completed, found.request_counts.failed) == (22, 20, 2)
    assert found.created_at <= found.in_progress_at <= found.finalizing_at <= found.completed_at < found.expires_at
    answers = await results(client, found.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"r{number}" for number in range(20)]
    assert [each["response"]["body"]["choices"][0]["text"] for each in answers] == [str(n) for n in range(20)]
    errors = await results(client, found.error_file_id)
    assert [(each["custom_id"], each["response"]["status_code"]) for each in errors] == [("r20", 400), ("r21", 404)]
    output = await client.files.retrieve(found.output_file_id)
    assert (output.purpose, output.status) == ("batch_output", "processed")
    assert output.bytes == len((await client.files.content(output.id)).content)
    assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "files").rglob("*"))
    listed = await client.batches.list()
    assert [each.id for each in listed.data] == [batch.id]


async def test_a_wrong_file_fails_before_its_first_line(served: Served) -> None:
    client = client_of(served)
    content = line(0) + b"no json\n" + line(0) + line(1, "/v1/chat/completions") + line(2, stream=True)
    found = await ended(client, (await begin(client, content)).id)
    assert (found.status, found.output_file_id, found.error_file_id) == ("failed", None, None)
    assert [(each.line, each.code) for each in found.errors.data] == [
        (2, "malformed_batch_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_url"),
        (5, "invalid_batch_line"),
    ]
    empty = await ended(client, (await begin(client, b"\n")).id)
    assert [each.code for each in empty.errors.data] == ["empty_file"]
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a batch with status 'failed'"):
        await client.batches.cancel(found.id)


async def test_a_line_is_no_longer_than_a_body(model_path: Path, tmp_path: Path) -> None:
    async with serving(model_path, settings_of(tmp_path, max_body_size="16KiB"), live=True) as served:
        served.context.start()
        client = client_of(served)
        found = await ended(client, (await begin(client, line(0) + line(1, prompt="a" * 200_000))).id)
        assert [(each.line, each.code) for each in found.errors.data] == [(2, "line_too_long")]
        served.context.drain()


async def test_files_are_listed_in_pages_and_deleted(served: Served) -> None:
    client = client_of(served)
    files = [await upload(client, line(number)) for number in range(5)]
    assert all(file.id.startswith("file-") and len(file.id.rpartition("-")[2]) == 32 for file in files)
    first = await client.files.list(limit=2)
    assert ([each.id for each in first.data], first.has_more) == ([files[4].id, files[3].id], True)
    everything = [each.id async for each in client.files.list(limit=2, order="asc")]
    assert everything == [file.id for file in files]
    assert [each.id async for each in client.files.list(purpose="batch_output")] == []
    assert (await client.files.content(files[0].id)).content == line(0)
    assert (await client.files.delete(files[0].id)).deleted
    for call in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError):
            await call(files[0].id)
    for query in ({"after": "file-none"}, {"limit": 0}, {"order": "up"}, {"purpose": "vision"}, {"wrong": "1"}):
        with pytest.raises(openai.BadRequestError):
            await client.files.list(extra_query=query)


async def test_another_keys_files_do_not_exist(served: Served) -> None:
    one, two = client_of(served), client_of(served, "two")
    file = await upload(one, line(0))
    batch = await begin(one, line(0))
    for attempt in (
        two.files.retrieve(file.id),
        two.files.delete(file.id),
        two.files.content(file.id),
        two.batches.retrieve(batch.id),
        two.batches.cancel(batch.id),
        two.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            await attempt
    assert (await two.files.list()).data == (await two.batches.list()).data == []
    assert (await ended(one, batch.id)).status == "completed"


async def test_responses_of_lines_belong_to_their_key(served: Served) -> None:
    one, two = client_of(served), client_of(served, "two")
    before = await one.responses.create(model="tiny", input="=before")

    async def answered(client: openai.AsyncOpenAI, **more: Any) -> Any:
        fields = {"input": "=line", "previous_response_id": before.id, "prompt": UNSET, "max_tokens": UNSET, **more}
        batch = await begin(client, line(0, "/v1/responses", **fields), endpoint="/v1/responses")
        return await ended(client, batch.id)

    found = await answered(one, store=True)
    [answer] = await results(one, found.output_file_id)
    response_id = answer["response"]["body"]["id"]
    assert (await one.responses.retrieve(response_id)).previous_response_id == before.id
    with pytest.raises(openai.NotFoundError):
        await two.responses.retrieve(response_id)
    [error] = await results(two, (await answered(two)).error_file_id)
    assert error["error"]["code"] == "previous_response_not_found"
    [answer] = await results(one, (await answered(one)).output_file_id)
    assert answer["response"]["body"]["store"] is False
    with pytest.raises(openai.NotFoundError):  # its answer is in the file
        await one.responses.retrieve(answer["response"]["body"]["id"])


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a\r\nX: y", "<b>.html", "ü.jsonl", ""])
async def test_names_are_never_paths(served: Served, name: str, tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer one"}
    files = {"file": (name or "file", b"<script>", "text/html"), "purpose": (None, "batch")}
    answer = await served.client.post("/v1/files", files=files, headers=headers)
    assert answer.status_code == 200, answer.text
    content = await served.client.get(f"/v1/files/{answer.json()['id']}/content", headers=headers)
    assert content.content == b"<script>"
    assert content.headers["content-disposition"].startswith("attachment; filename*=UTF-8''")
    assert "/" not in content.headers["content-disposition"].partition("''")[2]
    assert (content.headers["content-type"], content.headers["x-content-type-options"]) == (
        "application/octet-stream", "nosniff",
    )  # fmt: skip
    assert "X" not in content.headers
    assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "files").rglob("*"))
    written = {path.name for path in (tmp_path / "files").rglob("*") if path.is_file()}
    assert written == {"lock", "runner.lock", f"{answer.json()['id']}.json", f"{answer.json()['id']}.data"}


@pytest.mark.parametrize("file_id", ["..%2f..%2fkeys.toml", "file-a-" + "0" * 32, "x" * 3000, "file-a-" + "g" * 32])
async def test_ids_are_never_paths(served: Served, file_id: str) -> None:
    headers = {"Authorization": "Bearer one"}
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{file_id}"):
        answer = await served.client.get(path, headers=headers)
        assert answer.status_code == 404
        assert len(answer.content) < 1000


async def test_quotas_are_checked_before_the_disk(model_path: Path, tmp_path: Path) -> None:
    limits = {"max_file_size": "1KiB", "files_quota": "4KiB", "max_files": 4, "max_open_batches": 1}
    async with serving(model_path, settings_of(tmp_path, **limits), live=True) as served:
        client = client_of(served)
        with pytest.raises(openai.APIStatusError) as caught:
            await upload(client, b"a" * 100_000)
        assert caught.value.status_code == 413
        with pytest.raises(openai.APIStatusError) as caught:
            await upload(client, b"a" * 1100)
        assert caught.value.status_code == 413
        files = [await upload(client, line(number)) for number in range(4)]
        with pytest.raises(openai.RateLimitError, match="4 files, of at most 4"):
            await upload(client, line(4))
        assert len(list((tmp_path / "files").rglob("incoming/*"))) == 0
        await upload(client_of(served, "two"), line(3))
        for file in (files[0], files[3]):  # a batch makes up to two
            await client.files.delete(file.id)
        begun = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batch = await client.batches.create(input_file_id=files[1].id, **begun)
        with pytest.raises(openai.RateLimitError, match="1 open batches"):
            await client.batches.create(input_file_id=files[1].id, **begun)
        await client.files.delete(files[1].id)  # the batch has a link of its own
        served.context.start()
        assert (await ended(client, batch.id)).status == "completed"
        served.context.drain()


async def test_bytes_of_one_key_are_limited(model_path: Path, tmp_path: Path) -> None:
    async with serving(
        model_path, settings_of(tmp_path, max_file_size="3KiB", files_quota="4KiB"), live=True
    ) as served:
        client = client_of(served)
        await upload(client, b"a" * 2500)
        with pytest.raises(openai.RateLimitError) as caught:
            await upload(client, b"a" * 2500)
        assert caught.value.code == "file_quota_exceeded"

        async def unknown_length() -> AsyncIterator[bytes]:
            yield b"--b\r\n"

        headers = {"Authorization": "Bearer one", "Content-Type": "multipart/form-data; boundary=b"}
        answer = await served.client.post("/v1/files", content=unknown_length(), headers=headers)
        assert answer.status_code == 429, "as much as a file may have is reserved"


async def test_results_beyond_the_quota_are_errors(model_path: Path, tmp_path: Path) -> None:
    async with serving(
        model_path, settings_of(tmp_path, max_file_size="3KiB", files_quota="6KiB"), live=True
    ) as served:
        served.context.start()
        client = client_of(served)
        found = await ended(client, (await begin(client, requests(12))).id)
        assert (found.status, found.request_counts.total) == ("completed", 12)
        answers, errors = await results(client, found.output_file_id), await results(client, found.error_file_id)
        assert 0 < len(answers) < 12
        assert [each["custom_id"] for each in answers + errors] == [f"r{number}" for number in range(12)]
        assert {each["error"]["code"] for each in errors} == {"file_quota_exceeded"}
        assert found.request_counts.failed == len(errors)
        served.context.drain()


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nabc\r\n--b--\r\n'
)


@pytest.mark.parametrize(
    ("form", "status", "word"),
    [
        (FORM, 200, ""),
        (FORM[:-9], 400, "its end is missing"),
        (FORM.replace(b"\r\n\r\nbatch", b"\r\n\r\nvision"), 400, "purpose must be"),
        (FORM.replace(b'name="purpose"', b'name="use"'), 400, "purpose is required"),
        (FORM.replace(b'name="file"', b'name="data"'), 400, "file is required"),
        (FORM.replace(b'name="purpose"', b'name="file"'), 400, "one file"),
        (FORM.replace(b"batch", b"b" * 2000), 400, "more than 1024 bytes"),
        (b"no form", 400, "not valid multipart"),
        (b"--b\r\n" + b"X: y\r\n" * 10_000, 400, "not valid multipart"),
        (b"--b\r\nX: " + b"y" * 100_000, 400, "not valid multipart"),
        (b"--b\r\n\r\n\r\n" * 100 + FORM, 400, "more than 16 parts"),
        (b"", 400, "its end is missing"),
    ],
)
async def test_forms(served: Served, form: bytes, status: int, word: str, tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer one", "Content-Type": "multipart/form-data; boundary=b"}
    answer = await served.client.post("/v1/files", content=form, headers=headers)
    assert answer.status_code == status, answer.text
    assert word in answer.text
    assert len(list((tmp_path / "files").rglob("incoming/*"))) == 0


async def test_other_bodies_and_other_routes(served: Served) -> None:
    headers = {"Authorization": "Bearer one", "Content-Type": "multipart/form-data; boundary=b"}
    for path in ("/v1/batches", "/v1/completions", "/v1/files/none"):
        assert (await served.client.post(path, content=FORM, headers=headers)).status_code in (405, 415)
    plain = {"Authorization": "Bearer one", "Content-Type": "text/plain"}
    assert (await served.client.post("/v1/files", content=FORM, headers=plain)).status_code == 415
    page = {**headers, "Origin": "http://evil.example"}
    assert (await served.client.post("/v1/files", content=FORM, headers=page)).status_code == 403


async def test_a_batch_is_cancelled(model_path: Path, tmp_path: Path) -> None:
    async with serving(model_path, settings_of(tmp_path), executor="slow", live=True, max_num_seqs=2) as served:
        served.context.start()
        client = client_of(served)
        batch = await begin(
            client, requests(3) + line(3, prompt="a", max_tokens=250) + requests(20)[len(requests(4)) :]
        )
        async with asyncio.timeout(60):
            while (found := await client.batches.retrieve(batch.id)).request_counts.completed < 3:
                await asyncio.sleep(0.05)
        assert found.status == "in_progress"
        found = await client.batches.cancel(batch.id)
        assert found.status == "cancelling"
        found = await ended(client, batch.id)
        assert found.status == "cancelled"
        assert found.cancelling_at <= found.cancelled_at
        answers, errors = await results(client, found.output_file_id), await results(client, found.error_file_id)
        assert [each["custom_id"] for each in answers + errors] == [f"r{number}" for number in range(20)]
        assert len(answers) >= 3
        assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
        served.hurry()
        await served.until_idle()
        served.context.drain()


async def test_a_batch_and_a_file_expire(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client = client_of(served)
    file = await upload(client, line(0), expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    for seconds in (3599, 30 * 24 * 3600 + 1):
        with pytest.raises(openai.BadRequestError, match="3600 to 2592000"):
            await upload(client, line(0), expires_after={"anchor": "created_at", "seconds": seconds})
    store = FileStore(tmp_path / "files", "x", Quotas(10**6, 10**6, 10, 10), clock=lambda: file.expires_at + 1)
    [owner] = store.owners()
    assert store.space(owner).list_files() == []
    store.space(owner).sweep()
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)
    assert list((tmp_path / "files").rglob("*.data")) == []


async def test_unanswered_lines_of_an_expired_batch(model_path: Path, tmp_path: Path) -> None:
    async with serving(model_path, settings_of(tmp_path), live=True) as served:
        client = client_of(served)
        batch = await begin(client, requests(2), completion_window="1h")
        [path] = (tmp_path / "files").rglob(f"{batch.id}.json")
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "expires_at": batch.created_at - 1}))
        served.context.start()
        found = await ended(client, batch.id)
        assert (found.status, found.output_file_id) == ("expired", None)
        errors = await results(client, found.error_file_id)
        assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
            ("r0", "batch_expired"),
            ("r1", "batch_expired"),
        ]
        served.context.drain()


@pytest.mark.parametrize("window", ["24", "0h", "1d", "24h\n", 24])
async def test_wrong_batches(served: Served, window: Any) -> None:
    client = client_of(served)
    file = await upload(client, line(0))
    fields: dict[str, Any] = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for wrong in ({"completion_window": window}, {"endpoint": "/v1/models"}, {"metadata": {"a": 1}}):
        with pytest.raises(openai.BadRequestError):
            await client.batches.create(**{**fields, **wrong})


async def test_lines_have_the_limits_of_their_owner(model_path: Path, tmp_path: Path) -> None:
    """Two requests a minute: the first line goes, and one request of the key's own; a second line waits."""
    async with serving(model_path, settings_of(tmp_path), live=True) as served:
        served.context.start()
        client = client_of(served, "few")
        batch = await begin(client, requests(3))
        async with asyncio.timeout(120):
            while (await client.batches.retrieve(batch.id)).request_counts.completed < 1:
                await asyncio.sleep(0.02)
        found = await client.batches.retrieve(batch.id)
        assert (found.status, found.request_counts.completed) == ("in_progress", 1), "refused lines are asked again"
        answer = await client.completions.create(model="tiny", prompt="=live")
        assert answer.choices[0].text == "live", "half the allowance is left to other requests"
        served.context.drain()


async def test_an_aborted_line_is_asked_again(model_path: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, enable_admin_routes=True, admin_api_key=["root"])
    async with serving(model_path, settings, executor="slow", live=True) as served:
        served.context.start()
        client = client_of(served)
        batch = await begin(client, requests(2, prompt="abc", max_tokens=200))
        async with asyncio.timeout(120):
            await served.until_running(2)
        headers = {"Authorization": "Bearer root"}
        name = (await served.client.get("/debug/kv", headers=headers)).json()["kv"]["requests"][0]["request_id"]
        refused = await served.client.post("/debug/abort", json={"request_id": name}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "line_of_a_batch")
        assert (await served.client.post("/pause?mode=abort", headers=headers)).status_code == 200
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        assert (await served.client.post("/resume", headers=headers)).status_code == 200
        served.hurry()
        answers = await results(client, (await ended(client, batch.id)).output_file_id)
        ends = [each["response"]["body"]["choices"][0]["finish_reason"] for each in answers]
        assert ends == ["length", "length"]
        served.context.drain()


async def test_no_live_request_waits_for_a_line(model_path: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, max_num_queued=2)
    async with serving(model_path, settings, executor="slow", live=True, max_num_seqs=2) as served:
        served.context.start()
        client = client_of(served)
        batch = await begin(client, requests(6, prompt="abc", max_tokens=200))
        async with asyncio.timeout(120):
            await served.until_running(1)
        live = [client_of(served, "two").completions.create(model="tiny", prompt="=hi") for _ in range(2)]
        answers = await asyncio.wait_for(asyncio.gather(*live), 120)  # a line takes 20 seconds and more
        assert [each.choices[0].text for each in answers] == ["hi", "hi"]
        assert (await client.batches.retrieve(batch.id)).request_counts.completed == 0
        await client.batches.cancel(batch.id)
        assert (await ended(client, batch.id)).status == "cancelled"
        served.context.drain()


async def test_lines_have_a_share_of_the_slots_and_do_not_count_as_waiting(model_path: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, max_num_queued=1)
    async with serving(model_path, settings, executor="slow", live=True, max_num_seqs=4) as served:
        served.context.start()
        client = client_of(served)
        batch = await begin(client, requests(2, prompt=["abc"] * 3, max_tokens=200))
        live: list[asyncio.Task[Any]] = []
        async with asyncio.timeout(120):
            while (await served.engine.stats()).num_running_in_background < 3:
                await asyncio.sleep(0.005)
            for _ in range(20):  # none more comes
                assert (await served.engine.stats()).num_running_in_background == 3
                await asyncio.sleep(0.005)
            for number in range(1, 6):
                create = client_of(served, "two").completions.create
                live.append(asyncio.ensure_future(create(model="tiny", prompt="abc", max_tokens=200)))
                while served.engine._session.control.num_running_live < min(number, 4):
                    await asyncio.sleep(0.005)
            while served.engine.num_waiting != 1:
                await asyncio.sleep(0.005)
            assert served.engine.num_pending > 5
            with pytest.raises(openai.RateLimitError, match="1 requests wait"):
                await create(model="tiny", prompt="abc")
            for task in live:
                task.cancel()
            await asyncio.gather(*live, return_exceptions=True)
            await client.batches.cancel(batch.id)
            await ended(client, batch.id)
        served.context.drain()


async def test_a_server_without_keys_has_one_space(model_path: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, api_key_file=None)
    async with serving(model_path, settings, live=True) as served:
        served.context.start()
        file = await upload(client_of(served, "EMPTY"), line(0))
        assert (await client_of(served, "other").files.retrieve(file.id)).id == file.id
        batch = await begin(client_of(served, "more"), line(0))
        assert (await ended(client_of(served, "less"), batch.id)).status == "completed"
        served.context.drain()


async def test_without_a_directory(model_path: Path) -> None:
    async with serving(model_path) as served:
        for path in ("/v1/files", "/v1/files/a/content", "/v1/batches", "/v1/batches/a"):
            answer = await served.client.get(path)
            assert answer.status_code == 404
            assert "--files-dir" in answer.text


def test_the_directory_is_the_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir(mode=0o755)
    FileStore(directory, "my.Host!", Quotas(1, 1, 1, 1))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with claimed(directory), pytest.raises(ConfigError, match="another server uses"), claimed(directory):
        pass
    with claimed(directory), claimed(None):
        pass
    (tmp_path / "plain").write_text("")
    for wrong in (tmp_path / "plain", tmp_path / "plain" / "below"):
        with pytest.raises(ConfigError, match="files_dir: cannot use"), claimed(wrong):
            pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_files": 3}, "max_files needs files_dir"),
        ({"files_dir": "d", "max_open_batches": 0}, "at least 1"),
        ({"files_dir": "d", "max_file_size": "2GiB", "files_quota": "1GiB"}, "exceeds files_quota"),
        ({"files_dir": ""}, "must not be empty"),
    ],
)
def test_wrong_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**changes)


async def test_uploads_of_one_key_leave_room_for_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.uploads.MAX_UPLOADS_OF_KEY", 1)
    headers = {"Authorization": "Bearer one", "Content-Type": "multipart/form-data; boundary=b"}
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield FORM[:20]
        has_begun.set()
        await may_end.wait()
        yield FORM[20:]

    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        first = asyncio.ensure_future(client.post("/v1/files", content=slow(), headers=headers))
        await has_begun.wait()
        while (refused := await client.post("/v1/files", content=FORM, headers=headers)).status_code == 200:
            await asyncio.sleep(0.01)
        assert (refused.status_code, "of this API key" in refused.text) == (429, True)
        others = await client.post("/v1/files", content=FORM, headers={**headers, "Authorization": "Bearer two"})
        assert others.status_code == 200
        may_end.set()
        assert (await first).status_code == 200
        assert (await client.post("/v1/files", content=FORM, headers=headers)).status_code == 200


async def test_a_full_disk_is_told(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quire.server.file_store.os.write", full)
    answer = await served.client.post(
        "/v1/files", content=FORM,
        headers={"Authorization": "Bearer one", "Content-Type": "multipart/form-data; boundary=b"},
    )  # fmt: skip
    monkeypatch.undo()
    assert answer.status_code == 503
    assert "disk for files is full" in answer.text
    assert len(list((tmp_path / "files").rglob("incoming/*"))) == 0


async def test_an_upload_that_breaks_off_leaves_nothing(served: Served, tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield FORM[:120] + b"a" * 600_000
        raise httpx.ReadError("gone")

    headers = {"Authorization": "Bearer one", "Content-Type": "multipart/form-data; boundary=b"}
    with pytest.raises(httpx.ReadError):
        await served.client.post("/v1/files", content=broken(), headers=headers)
    async with asyncio.timeout(120):
        while list((tmp_path / "files").rglob("incoming/*")):
            await asyncio.sleep(0.01)
    assert (await client_of(served).files.list()).data == []
