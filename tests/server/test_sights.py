"""The bundled model that looks at pictures, over HTTP: it answers about the picture that it is given."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from PIL import Image, ImageDraw
from transformers import AutoImageProcessor, AutoTokenizer

from quire.config.hf_config import BUNDLED_DIRECTORIES
from quire.config.options import BUNDLED_SIGHTS, EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.server.app import create_app
from quire.server.settings import ServerSettings
from tests.multimodal.pictures import encoded
from tests.server.conftest import HOST

WHAT = "What is in the picture?"


def drawn(*things: tuple[str, tuple[int, ...], tuple[int, int]]) -> Image.Image:
    """Things of a shape and a colour around places of a picture of 64 x 64 pixels, which is drawn larger."""
    image = Image.new("RGB", (192, 192), (225, 225, 225))
    draw = ImageDraw.Draw(image)
    for shape, colour, (x, y) in things:
        box = (3 * x - 36, 3 * y - 36, 3 * x + 36, 3 * y + 36)
        if shape == "circle":
            draw.ellipse(box, fill=colour)
        else:
            draw.rectangle(box, fill=colour)
    return image.resize((64, 64), Image.Resampling.LANCZOS)


RED, BLUE = (220, 40, 40), (40, 80, 220)
CASES = [
    (drawn(("circle", RED, (32, 32))), WHAT, "A red circle."),
    (drawn(("square", BLUE, (32, 32))), WHAT, "A blue square."),
    (drawn(("square", BLUE, (32, 32))), "Which colour is it?", "Blue."),
    (drawn(("circle", RED, (32, 32))), "What shape is it?", "A circle."),
    (drawn(("square", BLUE, (18, 32)), ("circle", RED, (46, 32))), WHAT, "A blue square and a red circle."),
]


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
    given = {"model": BUNDLED_SIGHTS, "num_threads": 1, "num_blocks_override": 64, **options}
    engine = AsyncLLM.from_options(EngineOptions.from_keywords(given), in_process=True)
    try:
        app = create_app(engine, ServerSettings(allowed_hosts=[HOST], served_model_name=["sights"]))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}", timeout=60) as client:
            yield client
    finally:
        engine.shutdown()


def url_of(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"


def messages_of(*images: dict[str, Any], text: str = WHAT) -> list[Any]:
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def part(image: Image.Image, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(image)}, **more}


async def test_answers_are_those_of_the_picture() -> None:
    async with serving() as client:
        for image, question, answer in CASES:
            body = {"messages": messages_of(part(image), text=question), "temperature": 0, "max_tokens": 20}
            found = (await client.post("/v1/chat/completions", json=body)).json()
            assert found["choices"][0]["message"]["content"] == answer


async def test_what_vllm_asks_of_pictures() -> None:
    """The status, the errors and the usage that vLLM's own tests of pictures in chats and responses expect."""
    image, answer = CASES[0][0], CASES[0][2]
    async with serving(limit_mm_per_prompt={"image": 2}) as http:
        client = openai.AsyncOpenAI(api_key="a", base_url=f"http://{HOST}/v1", http_client=http, max_retries=0)
        settings: dict[str, Any] = {"model": "sights", "max_completion_tokens": 20, "temperature": 0}

        async def ask(messages: list[Any], **more: Any) -> Any:
            return await client.chat.completions.create(messages=messages, **{**settings, **more})

        async def fails(messages: list[Any], message: str) -> None:
            with pytest.raises(openai.BadRequestError, match=message):
                await ask(messages)

        found = await ask(messages_of(part(image)), max_completion_tokens=2, logprobs=True, top_logprobs=5)
        assert (len(found.choices), found.choices[0].finish_reason) == (1, "length")
        assert [len(each.top_logprobs) for each in found.choices[0].logprobs.content] == [5, 5]
        directory = BUNDLED_DIRECTORIES[BUNDLED_SIGHTS]
        processor = AutoImageProcessor.from_pretrained(directory, use_fast=False)
        written = AutoTokenizer.from_pretrained(directory).apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": WHAT}]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        num_image = processor(image)["image_grid_thw"][0].prod() // processor.merge_size**2
        num_prompt = len(written) - 1 + int(num_image)
        usage = found.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (num_prompt, 2, num_prompt + 2)

        turns = messages_of(part(image))
        whole = await ask(turns)
        assert whole.choices[0].message.content == answer
        turns += [whole.choices[0].message.model_dump(), {"role": "user", "content": "Which colour is it?"}]
        assert (await ask(turns)).choices[0].message.content
        chunks = [chunk async for chunk in await ask(messages_of(part(image)), stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
        assert [each for chunk in chunks if (each := chunk.choices[0].finish_reason)] == ["stop"]
        beams = (await ask(messages_of(part(image)), n=2, extra_body={"use_beam_search": True})).choices
        assert len({choice.message.content for choice in beams}) == 2

        await fails(messages_of({"type": "image_url", "image_url": url_of(image)}), "must be an object with a url")
        two, three = ([part(image)] * count for count in (2, 3))
        assert (await ask(messages_of(*two))).choices[0].message.content
        await fails(messages_of(*three), "at most 2 images")
        assert (await ask([{"role": "user", "content": "a"}])).choices[0].message.content is not None

        await ask(messages_of(part(image, uuid=url_of(image)[:64])))
        named: dict[str, Any] = {"type": "image_url", "image_url": {}, "uuid": url_of(image)[:64]}
        assert (await ask(messages_of(named))).choices[0].message.content == answer
        await fails(messages_of({**named, "uuid": "not sent"}), "no picture is known by the uuid")
        odd = part(image, also_unknown="x")
        odd["image_url"]["unknown"] = "x"
        assert (await ask(messages_of(odd))).choices[0].message.content == answer

        def items(count: int) -> Any:
            images = [{"type": "input_image", "image_url": url_of(image), "detail": "auto"}] * count
            return [{"role": "user", "content": [*images, {"type": "input_text", "text": WHAT}]}]

        assert (await client.responses.create(model="sights", input=items(1), temperature=0)).output_text == answer
        assert (await client.responses.create(model="sights", input=items(2), temperature=0)).output_text
        with pytest.raises(openai.BadRequestError, match="at most 2 images"):
            await client.responses.create(model="sights", input=items(3))


@pytest.mark.parametrize("name", BUNDLED_DIRECTORIES)
def test_bundled_models_are_there(name: str) -> None:
    assert (BUNDLED_DIRECTORIES[name] / "model.safetensors").stat().st_size < 12_000_000
