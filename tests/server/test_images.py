"""Pictures over HTTP, by every API: the tokens are those of the same prompt given to the engine with its pictures."""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import ipaddress
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from PIL import Image

from quire.config.media import MediaConfig
from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.errors import UserError
from quire.multimodal.fetching import fetch_image
from quire.multimodal.sources import VIDEO_LIMITS
from quire.sampling_params import SamplingParams
from quire.server.app import create_app
from quire.server.settings import ServerSettings
from tests.models.harness import randomize
from tests.models.vision_models import IMAGE_END, IMAGE_START, IMAGE_TOKEN, qwen3_vl, save_chat
from tests.multimodal.pictures import draw, encoded
from tests.server.conftest import HOST, Served

WIDE, TALL = draw(1, size=(48, 24)), draw(2, size=(16, 40))
WIDE_TOKENS, TALL_TOKENS = 18, 10
NUM_TOKENS = 5
SETTINGS = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat(randomize(qwen3_vl()), tmp_path_factory.mktemp("qwen3-vl-chat"))


@contextlib.asynccontextmanager
async def serving(directory: Path, **options: Any) -> AsyncIterator[Served]:
    settings = {"num_blocks_override": 200, "block_size": 4, "num_threads": 1, "max_num_seqs": 4, "dtype": "float32"}
    engine = AsyncLLM.from_options(
        EngineOptions.from_keywords({"model": str(directory), **settings, **options}), in_process=True
    )
    try:
        app = create_app(engine, ServerSettings(served_model_name=["tiny"], allowed_hosts=[HOST]))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}", timeout=60) as client:
            yield Served(engine, app.state.context, client)
    finally:
        engine.shutdown()


@pytest.fixture
async def served(directory: Path) -> AsyncIterator[Served]:
    async with serving(directory) as found:
        yield found


def b64(image: Image.Image) -> str:
    return b64_of(encoded(image))


def b64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(image: Image.Image) -> str:
    return f"data:image/png;base64,{b64(image)}"


def part(image: Image.Image, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(image), **more}}


async def expected(served: Served, *parts: Any) -> str:
    """What the engine answers to a prompt of tokens and pictures."""
    token_ids: list[int] = []
    for each in parts:
        token_ids += [each] if isinstance(each, int) else [IMAGE_START, IMAGE_TOKEN, IMAGE_END]
    images = [each for each in parts if not isinstance(each, int)]
    prompt: Any = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    async for output in served.engine.generate(prompt, params):
        found = output.outputs[0].text
    return found


async def chat(served: Served, messages: list[Any], **more: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": messages, **SETTINGS, **more}
    return await served.client.post("/v1/chat/completions", json=body)


async def test_a_chat_whole_and_streamed(served: Served) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "w5"}, part(WIDE), part(TALL, detail="high")]}]
    wanted = await expected(served, 5, WIDE, TALL, 8)
    answer = (await chat(served, messages)).json()
    assert answer["choices"][0]["message"]["content"] == wanted
    num_tokens = 2 + 2 * 2 + WIDE_TOKENS + TALL_TOKENS
    assert answer["usage"]["prompt_tokens"] == num_tokens
    response = await chat(served, messages, stream=True, stream_options={"include_usage": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert text == wanted
    assert events[-1]["usage"]["prompt_tokens"] == num_tokens
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    counted = (await served.client.post("/tokenize", json={"model": "tiny", "messages": messages})).json()
    assert counted["count"] == num_tokens
    assert counted["tokens"].count(IMAGE_TOKEN) == WIDE_TOKENS + TALL_TOKENS


async def test_pictures_of_a_tool_and_of_earlier_messages(served: Served) -> None:
    messages = [
        {"role": "user", "content": [part(WIDE), {"type": "text", "text": "w5"}]},
        {"role": "assistant", "content": "w6"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "w7"}, part(TALL)]},
    ]
    answer = (await chat(served, messages)).json()
    assert answer["choices"][0]["message"]["content"] == await expected(served, WIDE, 5, 6, 7, TALL, 8)


async def test_other_apis(served: Served) -> None:
    wanted = await expected(served, WIDE, 5, 8)
    items = [{"role": "user", "content": [
        {"type": "input_image", "image_url": url(WIDE), "detail": "auto"}, {"type": "input_text", "text": "w5"},
    ]}]  # fmt: skip
    more = {"max_output_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = (await served.client.post("/v1/responses", json={"model": "tiny", "input": items, **more})).json()
    assert answer["output"][0]["content"][0]["text"] == wanted
    cut = {"model": "tiny", "input": items, **more, "truncation": "auto"}
    fits = (await served.client.post("/v1/responses", json=cut)).json()
    assert fits["output"][0]["content"][0]["text"] == wanted
    error = (await served.client.post("/v1/responses", json={**cut, "max_output_tokens": 10**6})).json()["error"]
    assert (error["param"], error["message"].split(" with images")[0]) == ("truncation", "truncation cuts no prompt")
    again = {"model": "tiny", "previous_response_id": answer["id"], "input": "w6", **more}
    second = (await served.client.post("/v1/responses", json=again)).json()
    assert second["usage"]["input_tokens"] > answer["usage"]["input_tokens"]
    listed = (await served.client.get(f"/v1/responses/{answer['id']}/input_items")).json()
    assert listed["data"][0]["content"][0] == {"type": "input_image", "image_url": url(WIDE), "detail": "auto"}

    source = {"type": "base64", "media_type": "image/png", "data": b64(WIDE)}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "w5"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": blocks}], **SETTINGS}
    answer = (await served.client.post("/v1/messages", json=body)).json()
    assert answer["content"][0]["text"] == wanted
    del body["max_tokens"], body["temperature"], body["ignore_eos"]
    counted = (await served.client.post("/v1/messages/count_tokens", json=body)).json()
    assert counted["input_tokens"] == 2 + 2 + WIDE_TOKENS
    result = {"type": "tool_result", "tool_use_id": "a", "content": blocks}
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    body["messages"] = [
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    answer = (await served.client.post("/v1/messages", json={**body, **SETTINGS})).json()
    assert answer["content"][0]["text"] == await expected(served, 5, WIDE, 5, 8)

    options = {"num_predict": NUM_TOKENS, "temperature": 0}
    body = {"model": "tiny", "stream": False, "options": options}
    message = {"role": "user", "content": "w5", "images": [b64(WIDE)]}
    answer = (await served.client.post("/api/chat", json={**body, "messages": [message]})).json()
    assert answer["message"]["content"] == wanted
    answer = (await served.client.post("/api/generate", json={**body, "prompt": "w5", "images": [b64(WIDE)]})).json()
    assert answer["response"] == wanted


async def test_a_large_body_goes_through_helpers(served: Served) -> None:
    """A noisy picture of more bytes than a process reads itself, once more from the cache of those that are ready."""
    noise = Image.effect_noise((400, 400), 90).convert("RGB")
    assert len(url(noise)) > 2**17
    messages = [{"role": "user", "content": [part(noise)]}]
    wanted = await expected(served, noise, 8)
    kept = served.engine.texts.pictures.kept
    for number in (1, 2):
        assert (await chat(served, messages)).json()["choices"][0]["message"]["content"] == wanted
        assert (kept.num_queries, kept.num_hits) == (number, number - 1)
    metrics = (await served.client.get("/metrics")).text
    assert "vllm:mm_cache_queries_total 2.0" in metrics
    assert "vllm:mm_cache_hits_total 1.0" in metrics


async def test_features_of_a_client(directory: Path) -> None:
    def b64_of_tensor(value: torch.Tensor) -> str:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return b64_of(buffer.getvalue())

    size = 48 * 3
    given = torch.randn(18, size, generator=torch.Generator().manual_seed(1))
    embeds = {"image_embeds": b64_of_tensor(given), "image_grid_thw": b64_of_tensor(torch.tensor([1, 6, 12]))}
    features = {"type": "image_embeds", "image_embeds": embeds}
    messages = [{"role": "user", "content": [features, part(TALL), {"type": "text", "text": "w5"}]}]
    async with serving(directory, enable_mm_embeds=True) as served:
        answer = (await chat(served, messages)).json()
        assert answer["usage"]["prompt_tokens"] == 2 + 2 * 2 + 18 + TALL_TOKENS
        program = {"image_embeds": given, "image_grid_thw": [1, 6, 12]}
        assert answer["choices"][0]["message"]["content"] == await expected(served, program, TALL, 5, 8)
        for change, path in (
            ({"image_embeds": b64_of_tensor(given[:17])}, "image_embeds.image_embeds"),
            ({"image_grid_thw": b64_of_tensor(torch.tensor([1, 6, 6]))}, "image_embeds.image_embeds"),
            ({"image_grid_thw": "AAAA"}, "image_embeds.image_grid_thw"),
        ):
            wrong = {"type": "image_embeds", "image_embeds": {**embeds, **change}}
            response = await chat(served, [{"role": "user", "content": [part(TALL), wrong]}])
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, f"messages[0].content[1].{path}"), error
        alone = {"type": "image_embeds", "image_embeds": embeds["image_embeds"]}
        response = await chat(served, [{"role": "user", "content": [alone]}])
        assert (response.status_code, "image_grid_thw is needed" in response.text) == (400, True)
    async with serving(directory) as served:
        response = await chat(served, messages)
        assert (response.status_code, "enable_mm_embeds" in response.text) == (400, True)


def named(uuid: str, **more: Any) -> dict[str, Any]:
    """A part that names a picture."""
    return {"type": "image_url", "image_url": None, "uuid": uuid, **more}


async def test_a_uuid_names_a_picture_sent_before(served: Served) -> None:
    """It finds content, of the same key and salt alone, and is in no key of a cache: a picture that is sent counts,
    whatever was sent under its name."""

    async def ask(*content: Any, key: str = "a", **more: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": list(content)}], **SETTINGS, **more}
        headers = {"Authorization": f"Bearer {key}"}
        return await served.client.post("/v1/chat/completions", json=body, headers=headers)

    async def answers(response: httpx.Response, image: Image.Image) -> None:
        assert response.json()["choices"][0]["message"]["content"] == await expected(served, image, 8)

    assert (await ask(named("x"))).status_code == 400
    await answers(await ask({**part(WIDE), "uuid": "x"}), WIDE)
    for form in (None, {}, {"url": ""}, {"url": None, "unknown": 1}):
        await answers(await ask(named("x", image_url=form)), WIDE)
    kept = served.engine.texts.pictures.kept
    assert (kept.num_queries, kept.num_hits) == (5, 4), "no file is decoded again"
    await answers(await ask({**part(TALL), "uuid": "x"}, key="b"), TALL)
    await answers(await ask(named("x")), WIDE)
    await answers(await ask({**part(TALL), "uuid": "x"}, cache_salt="s"), TALL)
    await answers(await ask(named("x")), WIDE)
    await answers(await ask({**part(TALL), "uuid": "x"}), TALL)
    await answers(await ask(named("x")), TALL)
    for response, index, message in (
        (await ask(named("y")), 0, "no picture is known by the uuid 'y'"),
        (await ask(named("x"), key="c"), 0, "send it again"),
        (await ask(named("x"), cache_salt="t"), 0, "send it again"),
        (await ask(part(WIDE), named("y" * 1025)), 1, "1 to 1024 characters"),
        (await ask(part(WIDE), {**named("x"), "uuid": 3}), 1, "1 to 1024 characters"),
    ):
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, f"messages[0].content[{index}].image_url"), error
        assert message in error["message"]
    both = await ask({**part(WIDE), "uuid": "z"}, named("z"))
    assert both.json()["choices"][0]["message"]["content"] == await expected(served, WIDE, WIDE, 8)
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": "w"}
    assert (await ask(broken)).status_code == 400
    assert (await ask(named("w"))).status_code == 400, "a damaged picture has no name"
    await served.engine.texts.pictures.names.clear()
    assert (await ask(named("x"))).status_code == 400


async def test_errors_name_the_picture(served: Served) -> None:
    cut = encoded(WIDE)[:-40]
    cases = [
        ([part(WIDE), {"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}}], "valid base64", 1),
        ([part(WIDE), {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}], "not fetched", 1),
        ([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64_of(cut)}"}}], "cut off", 0),
        ([part(WIDE), {"type": "image_url", "image_url": url(WIDE)}], "must be an object with a url", 1),
        ([part(WIDE)] * 3 + [{"type": "image_url", "image_url": {}}], "needs a URL", 3),
        ([part(WIDE, detail="tiny")], "detail must be one of", 0),
        ([part(draw(1, size=(900, 2)))], "200 times", 0),
    ]
    for content, message, index in cases:
        response = await chat(served, [{"role": "user", "content": content}])
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, f"messages[0].content[{index}].image_url"), error
        assert message in error["message"]
    placeholder = {"type": "text", "text": "<image>"}
    response = await chat(served, [{"role": "user", "content": [placeholder, part(WIDE)]}])
    assert response.status_code == 400
    assert "2 placeholders" in response.json()["error"]["message"]
    response = await chat(served, [{"role": "user", "content": [part(draw(1, size=(60, 60)))] * 20}])
    assert response.status_code == 400
    assert "tokens" in response.json()["error"]["message"]


async def test_options_of_a_request(directory: Path) -> None:
    asked = {
        "mm_processor_kwargs": {"max_pixels": 600},
        "media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}},
    }
    messages = [{"role": "user", "content": [part(WIDE)]}]
    async with serving(directory) as served:
        response = await chat(served, messages, **asked)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "mm_processor_kwargs")
        assert (await chat(served, [{"role": "user", "content": "w5"}], **asked)).status_code == 200
        served.context.settings = msgspec.structs.replace(served.context.settings, trust_request_mm_kwargs=True)
        assert (await chat(served, messages, **asked)).json()["usage"]["prompt_tokens"] == 3 + 8
        asked["mm_processor_kwargs"] = {"max_pixels": 10**6}
        answer = (await chat(served, messages, **asked)).json()
        assert answer["usage"]["prompt_tokens"] == 3 + WIDE_TOKENS, "never more than the server's own limit"
        clear = Image.new("RGBA", (24, 24))
        for color in ([0, 0, 0], [255, 255, 255]):
            asked["media_io_kwargs"] = {"image": {"rgba_background_color": color}}
            answer = (await chat(served, [{"role": "user", "content": [part(clear)]}], **asked)).json()
            wanted = await expected(served, Image.new("RGB", (24, 24), tuple(color)), 8)
            assert answer["choices"][0]["message"]["content"] == wanted
        response = await chat(served, messages, mm_processor_kwargs={"crop": True})
        assert (response.status_code, "has no 'crop'" in response.text) == (400, True)


async def test_limits_and_the_language_model_alone(directory: Path) -> None:
    async with serving(directory, limit_mm_per_prompt={"image": 1}, mm_processor_kwargs={"max_pixels": 600}) as served:
        response = await chat(served, [{"role": "user", "content": [part(WIDE)] * 2}])
        assert (response.status_code, "at most 1 images" in response.text) == (400, True)
        answer = (await chat(served, [{"role": "user", "content": [part(WIDE)]}])).json()
        assert answer["usage"]["prompt_tokens"] == 3 + 8
    async with serving(directory, language_model_only=True) as served:
        response = await chat(served, [{"role": "user", "content": [part(WIDE)]}])
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages[0].content[0].image_url"
        assert "language model alone" in response.text
        assert (await chat(served, [{"role": "user", "content": "w5"}])).status_code == 200
        assert served.context.max_body_bytes == 8 * 2**20


class Site(http.server.BaseHTTPRequestHandler):
    """Pictures, and answers that are none."""

    def do_GET(self) -> None:
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "/wide.png")
            self.end_headers()
            return
        data = encoded(WIDE) if self.path == "/wide.png?x=1" else b"no picture"
        is_asked = self.path != "/clip.mp4" or self.headers["Accept"].startswith("video/*")
        self.send_response(404 if self.path == "/missing" else 200 if is_asked else 406)
        self.send_header("Content-Length", str(len(data) + (5 if self.path == "/cut" else 0)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"{server.server_address[1]}"
        server.shutdown()


async def test_urls_of_allowed_hosts_and_files(directory: Path, site: str, tmp_path: Path) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "secret.png"
    allowed.mkdir()
    for path in (allowed / "a b.png", secret):
        path.write_bytes(encoded(WIDE))
    (allowed / "link.png").symlink_to(secret)
    options = {"allowed_media_domains": ["127.0.0.1", "example.invalid"], "allowed_local_media_path": str(allowed)}
    async with serving(directory, **options) as served:

        async def ask(address: str) -> httpx.Response:
            image = {"type": "image_url", "image_url": {"url": address}}
            return await chat(served, [{"role": "user", "content": [image]}])

        wanted = await expected(served, WIDE, 8)
        for address in (f"http://127.0.0.1:{site}/wide.png?x=1", f"file://{allowed}/a%20b.png"):
            assert (await ask(address)).json()["choices"][0]["message"]["content"] == wanted
        for address, message in (
            (f"http://127.0.0.1:{site}/away", "a redirect"),
            (f"http://127.0.0.1:{site}/missing", "status 404"),
            (f"http://127.0.0.1:{site}/cut", "cut off"),
            (f"http://127.0.0.1:{site}/other", "damaged or of an unknown format"),
            (f"http://localhost:{site}/wide.png?x=1", "allowed_media_domains do not name it"),
            (f"http://127.0.0.1\\@example.invalid:{site}/", "no spaces"),
            (f"http://user@127.0.0.1:{site}/wide.png", "user or a password"),
            ("http://example.invalid/x.png", "has no address"),
            (f"file://{secret}", "no file below"),
            (f"file://{allowed}/../secret.png", "no file below"),
            (f"file://{allowed}/link.png", "no file below"),
            (f"file://{allowed}", "no file below"),
        ):
            response = await ask(address)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "messages[0].content[0].image_url"), error
            assert message in error["message"], error


def test_videos_of_urls(site: str) -> None:
    """Asked for, and named in errors, as videos."""
    media = MediaConfig(domains=("127.0.0.1",), networks=(ipaddress.ip_network("127.0.0.1"),))
    assert fetch_image(f"http://127.0.0.1:{site}/clip.mp4", "x", media, VIDEO_LIMITS) == b"no picture"
    for address, message in (
        (f"http://127.0.0.1:{site}/missing", "x: the video was not fetched: '127.0.0.1' answered with status 404"),
        ("http://example.invalid/x.mp4", "x: videos of 'example.invalid' are not fetched"),
        ("x.mp4", "x: a URL of a video must be data:video/"),
    ):
        with pytest.raises(UserError, match=message):
            fetch_image(address, "x", media, VIDEO_LIMITS)
