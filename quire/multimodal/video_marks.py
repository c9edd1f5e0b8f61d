"""Placeholders of videos in prompts, in Qwen3-VL with a time and marks around each part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quire.errors import UserError
from quire.multimodal.marks import Encoder
from quire.prompt_image import PromptImage, ReadyImage


class ReadyVideo(msgspec.Struct, frozen=True, array_like=True):
    """Decoded video: parts of a few frames, each computed as an image, and their times."""

    parts: list[ReadyImage]
    seconds: list[float]
    moments: list[int]
    """Rotary times of the parts; empty: each has marks and positions of its own."""

    @property
    def num_tokens(self) -> int:
        """Placeholders, without the texts of the times."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


ReadyMedium = ReadyImage | ReadyVideo


@dataclass(frozen=True)
class VideoMarks:
    """Writer of Qwen3-VL's prompts, with times as text. token_id: placeholder. begin, end: tokens around a part's.
    tokenizer: writes the times (None: prompts must have them)."""

    token_id: int
    begin: int
    end: int
    tokenizer: Encoder | None

    def written(self, token_ids: list[int], videos: Sequence[ReadyVideo], where: str) -> list[int]:
        """Prompt with all parts' placeholders. token_ids: with one placeholder a video, perhaps between `begin` and
        `end`, or with all. Raises UserError for placeholders that do not match."""
        counts = [part.num_tokens for video in videos for part in video.parts]
        if _has_all(token_ids, self.token_id, videos, counts, where):
            return token_ids
        if videos and self.tokenizer is None:
            if counts == [1] * len(videos):
                return token_ids
            raise UserError(
                f"{where}: without a tokenizer the times in videos are not written: the prompt needs all placeholders",
                param=where,
            )
        found: list[int] = []
        left = iter(videos)
        is_marked = False
        for place, token in enumerate(token_ids):
            if token == self.token_id:
                parts = self._parts(next(left))
                is_marked = found[-1:] == [self.begin] and token_ids[place + 1 : place + 2] == [self.end]
                if is_marked and found[2 - len(parts) :] == parts[:-2]:
                    found += parts[-2:]  # a part of one token has its time already
                    continue
                found = found[:-1] if is_marked else found
                found += parts
            elif token == self.end and is_marked and token_ids[place - 1] == self.token_id:
                is_marked = False  # the last part has it
            else:
                found.append(token)
        return found

    def placed(self, token_ids: list[int], videos: Sequence[ReadyVideo]) -> list[PromptImage]:
        """Parts at their places in a prompt from `written`."""
        parts = [part for video in videos for part in video.parts]
        starts = [start for start, _ in runs_of(token_ids, self.token_id)] if parts else []
        return [part.at(start) for start, part in zip(starts, parts, strict=True)]

    def _parts(self, video: ReadyVideo) -> list[int]:
        assert self.tokenizer is not None
        found: list[int] = []
        for part, seconds in zip(video.parts, video.seconds, strict=True):
            found += self.tokenizer.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False)
            found += [self.begin, *[self.token_id] * part.num_tokens, self.end]
        return found


@dataclass(frozen=True)
class VideoRuns:
    """Videos whose placeholders follow one another, as in Qwen2.5-VL. token_id: placeholder."""

    token_id: int

    def written(self, token_ids: list[int], videos: Sequence[ReadyVideo], where: str) -> list[int]:
        """Prompt with all placeholders; see VideoMarks.written."""
        counts = [video.num_tokens for video in videos]
        if _has_all(token_ids, self.token_id, videos, counts, where):
            return token_ids
        left = iter(counts)
        return [token for each in token_ids for token in [each] * (next(left) if each == self.token_id else 1)]

    def placed(self, token_ids: list[int], videos: Sequence[ReadyVideo]) -> list[PromptImage]:
        """Parts at their places in a prompt from `written`."""
        found: list[PromptImage] = []
        places = (place for place, token in enumerate(token_ids) if token == self.token_id)
        for video in videos:
            for number, (part, moment) in enumerate(zip(video.parts, video.moments, strict=True)):
                start, *_ = itertools.islice(places, part.num_tokens)
                found.append(part.at(start, moment if number else None))
        return found


def _has_all(
    token_ids: list[int], placeholder: int, videos: Sequence[ReadyVideo], counts: list[int], where: str
) -> bool:
    """True if the prompt has all placeholders, in runs of `counts`; False if it has one a video. Raises UserError for
    another number."""
    num_places = token_ids.count(placeholder)
    if num_places == len(videos):
        return False
    if [end - start for start, end in runs_of(token_ids, placeholder)] == counts:
        return True
    raise UserError(
        f"{where}: the prompt has {num_places} placeholders (token {placeholder}), and {len(videos)} videos of "
        f"together {sum(counts)} tokens are given",
        param=where,
    )


def runs_of(token_ids: Sequence[int], placeholder: int) -> list[tuple[int, int]]:
    """[start, end) of consecutive placeholders."""
    runs: list[tuple[int, int]] = []
    start = -1
    for place, token_id in enumerate(token_ids):
        if token_id == placeholder:
            start = place if start < 0 else start
        elif start >= 0:
            runs.append((start, place))
            start = -1
    if start >= 0:
        runs.append((start, len(token_ids)))
    return runs
