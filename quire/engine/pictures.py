"""Fetching, decoding and resizing of pictures outside a front end's event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from quire.engine.front_end import FrontEnd
from quire.engine.input_processor import PlacedImages, Prompt
from quire.errors import PromptTooLongError
from quire.multimodal.cache import ReadyImages
from quire.multimodal.inputs import NO_OPTIONS, ImageInputs, MediaOptions, NoImages, pictures_of
from quire.multimodal.named import Names, OwnNames, prepared
from quire.multimodal.sources import Picture
from quire.multimodal.video_marks import ReadyMedium, ReadyVideo
from quire.prompt_image import ReadyImage
from quire.tokenization.helpers import in_turn
from quire.tokenization.jobs import ReadLimits
from quire.utils.fair_threads import FairThreads

if TYPE_CHECKING:
    from quire.multimodal.preparing import Preparation
    from quire.multimodal.videos import AnyVideoProcessor

MAX_FETCHES = 8
OBJECT_BYTES = 2**20
"""Size in bytes that a picture object counts for in the queue."""
_HELPER = "quire.multimodal.preparing:prepare_file"
_IMAGES = msgspec.msgpack.Decoder(ReadyImage)
_VIDEO_HELPER = "quire.multimodal.videos:prepare_video"
_VIDEOS = msgspec.msgpack.Decoder(ReadyVideo)


class ThreadedNames(OwnNames):
    """Content names (hashes) of pictures decoded in this process, which are copied outside the event loop."""

    async def put(self, name: bytes, image: Any) -> None:
        await asyncio.to_thread(self._pictures.put, name, image)


class Pictures:
    """Makes pictures ready. Helper processes decode files; results are cached by content. One per front end."""

    def __init__(self, front_end: FrontEnd, threads: FairThreads) -> None:
        """threads: pool that waits for the helpers."""
        self._front_end = front_end
        self._helpers = front_end.helpers
        self._threads = threads
        self._video_thread = FairThreads(1, "quire-video", long_size=math.inf)
        """Thread of videos: one may take a minute."""
        self._fetching = ThreadPoolExecutor(MAX_FETCHES, "quire-fetch")
        self.kept = ReadyImages(front_end.config.media.cache_bytes)
        self.names: Names = ThreadedNames(front_end.named_pictures)
        """Pictures that clients have named."""

    def close(self) -> None:
        self._fetching.shutdown(wait=False, cancel_futures=True)
        self._video_thread.shutdown(wait=False)

    async def of_prompt(self, prompt: Prompt, owner: str) -> Prompt:
        """Prompt with its images ready. owner: client that named them. Raises UserError naming the image."""
        if not isinstance(prompt, Mapping) or isinstance(prompt.get("multi_modal_data"), PlacedImages):
            return prompt
        inputs = (await asyncio.to_thread(lambda: self._front_end.input_processor)).images
        if isinstance(inputs, NoImages):
            return prompt  # the input processor raises the error
        pictures = pictures_of(prompt)
        inputs.check_numbers(pictures)
        options = MediaOptions.of(prompt.get("mm_processor_kwargs"), owner=prompt.get("cache_salt", owner))
        ready = await self.ready(inputs, pictures, options)
        changed: Any = {**prompt, "multi_modal_data": _by_kind(ready), "multi_modal_uuids": None}
        return changed  # type: ignore[no-any-return]

    async def ready(
        self, inputs: ImageInputs, pictures: Sequence[Picture], options: MediaOptions = NO_OPTIONS
    ) -> list[ReadyMedium]:
        """Prepare the pictures of one prompt, one at a time. Raises UserError naming the picture, and
        PromptTooLongError as soon as the context is full."""
        longest = self._front_end.input_processor.max_model_len
        found: list[ReadyMedium] = []
        for picture in await self._fetched(inputs, pictures):
            found.append(await prepared(picture, options.owner, self.names, partial(self._one, inputs, options)))
            if (num_tokens := sum(each.num_tokens for each in found)) >= longest:
                raise PromptTooLongError(
                    f"{picture.where}: the images up to this one have {num_tokens} tokens, and the model's context is "
                    f"{longest} tokens",
                    param=picture.where,
                )
        return found

    async def _fetched(self, inputs: ImageInputs, pictures: Sequence[Picture]) -> list[Picture]:
        async def one(picture: Picture) -> Picture:
            if not isinstance(picture.image, str):
                return picture
            from quire.multimodal.fetching import fetch_image

            loop = asyncio.get_running_loop()
            given = picture.image, picture.where, inputs.media, picture.limits
            data = await loop.run_in_executor(self._fetching, fetch_image, *given)
            return msgspec.structs.replace(picture, image=data)

        tasks = [asyncio.ensure_future(one(picture)) for picture in pictures]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, inputs: ImageInputs, options: MediaOptions, picture: Picture) -> ReadyMedium:
        image, threads = picture.image, self._video_thread if picture.is_video else self._threads
        if isinstance(image, bytes):
            return await in_turn(threads, len(image), lambda: self._of_file(inputs, picture, image, options))
        return await in_turn(threads, OBJECT_BYTES, lambda: inputs.prepare(picture, options))

    def _of_file(self, inputs: ImageInputs, picture: Picture, data: bytes, options: MediaOptions) -> ReadyMedium:
        how: Preparation | AnyVideoProcessor
        if picture.is_video:
            assert inputs.videos is not None, "check_numbers comes before"
            how = inputs.videos.processor_of(options)
        else:
            how = inputs.preparation(picture.detail, options)
        key = self.kept.key(data, repr(how))
        found = self.kept.get(key)
        if found is None:
            found = self._made(how, picture.where, data)
            self.kept.put(key, found)
        return found

    def _made(self, how: Preparation | AnyVideoProcessor, where: str, data: bytes) -> ReadyMedium:
        if self._helpers is None:
            return how.prepare(data, where)
        from quire.multimodal.preparing import FileJob, Preparation
        from quire.multimodal.videos import VIDEO_SECONDS, VideoJob

        if isinstance(how, Preparation):
            argument = msgspec.json.encode(FileJob(how, where)).decode()
            return _IMAGES.decode(self._helpers.read(_HELPER, argument, [data]))
        argument = msgspec.json.encode(VideoJob(how, where)).decode()
        limits = ReadLimits(VIDEO_SECONDS, how.most_memory, f"{where}: the video", where)
        return _VIDEOS.decode(self._helpers.read(_VIDEO_HELPER, argument, [data], limits))


def _by_kind(ready: Sequence[ReadyMedium]) -> dict[str, list[ReadyMedium]]:
    kinds = {"image": ReadyImage, "video": ReadyVideo}
    return {name: [each for each in ready if isinstance(each, kind)] for name, kind in kinds.items()}
