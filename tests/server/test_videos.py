"""Videos over HTTP: tokens are Transformers'."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.e2e.test_videos import FRAMES, continued, save_video_chat, with_videos
from tests.models.vision_models import qwen3_vl
from tests.multimodal.clips import recorded
from tests.server.test_images import NUM_TOKENS, SETTINGS, part, serving


@pytest.mark.long
async def test_a_chat_about_a_video_and_a_picture(tmp_path: Path) -> None:
    """Also with frames chosen by the server's options, and a file that is damaged."""
    model = with_videos(qwen3_vl)
    directory = save_video_chat(model, tmp_path)
    data = recorded(FRAMES[:6], "matroska", fps=6)  # without loss: one second, two frames of which are asked for
    url = f"data:video/x-matroska;base64,{base64.b64encode(data).decode()}"
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "w5"}, part(FRAMES[7])]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "return_token_ids": True, **SETTINGS}
    async with serving(directory, media_io_kwargs={"video": {"num_frames": 2}}, max_num_batched_tokens=16) as served:
        answer = (await served.client.post("/v1/chat/completions", json=body)).json()
        # The times of the first and the last frame, 0 and 5/6 of a second, are 0.4 on average.
        expected, _ = continued(model, ([FRAMES[0], FRAMES[5]], [5 / 12]), 5, FRAMES[7], 8)
        assert answer["choices"][0]["token_ids"] == expected[:NUM_TOKENS]
        assert (await served.client.post("/v1/chat/completions", json=body)).json()["choices"] == answer["choices"]
        content[0] = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
        refused = await served.client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages[0].content[0].video_url"
        content[0] = {"type": "video_url", "video_url": {"url": "https://example.com/x.mp4"}}
        assert "are not fetched" in (await served.client.post("/v1/chat/completions", json=body)).text
