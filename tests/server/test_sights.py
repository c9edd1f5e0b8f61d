"""The bundled model that looks at pictures, over HTTP: it answers about the picture that it is given."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
from PIL import Image, ImageDraw

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


async def test_answers_are_those_of_the_picture() -> None:
    options = {"model": BUNDLED_SIGHTS, "num_threads": 1, "num_blocks_override": 64}
    engine = AsyncLLM.from_options(EngineOptions.from_keywords(options), in_process=True)
    try:
        app = create_app(engine, ServerSettings(allowed_hosts=[HOST]))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}", timeout=60) as client:
            for image, question, answer in CASES:
                url = f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"
                content: list[Any] = [{"type": "image_url", "image_url": {"url": url}}]
                messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
                body = {"messages": messages, "temperature": 0, "max_tokens": 20}
                found = (await client.post("/v1/chat/completions", json=body)).json()
                assert found["choices"][0]["message"]["content"] == answer
    finally:
        engine.shutdown()


@pytest.mark.parametrize("name", BUNDLED_DIRECTORIES)
def test_bundled_models_are_there(name: str) -> None:
    assert (BUNDLED_DIRECTORIES[name] / "model.safetensors").stat().st_size < 12_000_000
