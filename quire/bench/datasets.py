"""Prompts of benchmarks: random ones, or from a file, drawn from one seed."""

from __future__ import annotations

import base64
import io
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.errors import UserError, reject_unknown
from quire.utils.extras import how_to_install


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """Request of a benchmark: exactly one of `token_ids`, `text` and `messages`, and the number of tokens to
    generate."""

    max_tokens: int
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Token lengths of a benchmark's prompts or outputs, drawn uniformly from `low`..`high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, option: str, *, minimum: int = 1) -> LengthRange:
        """Parse `"128"` or `"64:512"`. Raises UserError that names `option`."""
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high) if colon else int(low))
        except ValueError:
            lengths = cls(0, -1)
        if not minimum <= lengths.low <= lengths.high:
            raise UserError(
                f"{option} must be a length (128) or a range (64:512), at least {minimum}, not {text!r}", param=option
            )
        return lengths

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Random token ids. prefix_len: tokens that all prompts share, before their own `input_len`. token_ids: range of
    the ids, both ends included."""

    num_prompts: int
    input_len: LengthRange
    output_len: LengthRange
    token_ids: LengthRange
    prefix_len: int = 0

    def draw(self, rng: random.Random) -> list[PromptSpec]:
        prefix = tuple(self._ids(self.prefix_len, rng))
        return [
            PromptSpec(
                token_ids=prefix + tuple(self._ids(self.input_len.draw(rng), rng)),
                max_tokens=self.output_len.draw(rng),
            )
            for _ in range(self.num_prompts)
        ]

    def _ids(self, count: int, rng: random.Random) -> Iterator[int]:
        return (self.token_ids.draw(rng) for _ in range(count))


# Common short English words: most vocabularies have a token for each, so `n` words are about `n` tokens.
_WORDS = (
    "the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as", "by", "at", "from", "it", "his",
    "are", "which", "were", "be", "this", "or", "has", "had", "first", "one", "their", "new", "after", "but", "who",
    "not", "they", "have", "her", "she", "two", "been", "other", "when", "there", "all", "into", "time", "may",
    "more", "most", "only", "over", "city", "some", "world", "would", "where", "later", "up", "such", "used", "many",
)  # fmt: skip


def as_text(spec: PromptSpec) -> PromptSpec:
    """Prompt in words for servers, one per token id, so a shared prefix stays shared."""
    if spec.token_ids is None:
        return spec
    words = " ".join(_WORDS[token_id % len(_WORDS)] for token_id in spec.token_ids)
    return replace(spec, token_ids=None, text=words)


def as_messages(spec: PromptSpec, images: Sequence[str] = ()) -> PromptSpec:
    """Prompt as one user message, after images of these URLs."""
    if spec.messages is not None:
        return spec
    content: Any = as_text(spec).text
    if images:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        content = [*parts, {"type": "text", "text": content}]
    return PromptSpec(max_tokens=spec.max_tokens, messages=({"role": "user", "content": content},))


@dataclass(frozen=True, slots=True)
class RandomImages:
    """Pictures of noise, which no server has seen before. count: pictures of a request. sizes: (width, height) in
    pixels, drawn for each picture."""

    count: LengthRange
    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, count: str, sizes: str) -> RandomImages:
        """Read --images (a number or a range) and sizes, such as "448x448,1024x768" pixels. Raises UserError naming the
        option."""
        found = [re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", size) for size in sizes.split(",")]
        if not all(found):
            raise UserError(f"--image-size must be pixels as 448x448,1024x768, not {sizes!r}", param="image_size")
        pairs = tuple((int(each[1]), int(each[2])) for each in found if each is not None)
        return cls(LengthRange.parse(count, "--images", minimum=0), pairs)

    def draw(self, rng: random.Random) -> list[str]:
        """Random pictures of one request, as data URLs of JPEGs. Raises UserError without Pillow."""
        try:
            from PIL import Image
        except ImportError:
            raise UserError(f"--images needs Pillow: {how_to_install('images')}", param="images") from None
        urls = []
        for _ in range(self.count.draw(rng)):
            size = rng.choice(self.sizes)
            file = io.BytesIO()
            Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1])).save(file, "JPEG")
            urls.append(f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}")
        return urls


def read_dataset(path: Path, *, workload: str | None, default_max_tokens: int) -> list[PromptSpec]:
    """Prompts of a file, in its order. JSON lines: one object a line. JSON: a list of objects, or workloads by name
    (`workload` picks one; optional if there is only one). An object has `prompt`, `prompt_token_ids` or `messages`, and
    optionally `max_tokens`. Raises UserError with file and entry."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read data set {str(path)!r}: {error}", param="dataset") from None
    try:
        entries = _entries(text, path, workload)
    except json.JSONDecodeError as error:
        raise UserError(f"data set {str(path)!r} is not valid JSON: {error}", param="dataset") from None
    specs = [_prompt(entry, f"{path}[{index}]", default_max_tokens) for index, entry in enumerate(entries)]
    if not specs:
        raise UserError(f"data set {str(path)!r} holds no prompts", param="dataset")
    return specs


def _entries(text: str, path: Path, workload: str | None) -> list[Any]:
    if path.suffix == ".jsonl":
        if workload is not None:
            raise UserError("--workload needs a .json file of workloads by name", param="workload")
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    content = json.loads(text)
    if isinstance(content, dict):
        if workload is None and len(content) == 1:
            return _list(next(iter(content.values())), path)
        if workload is None:
            raise UserError(f"{str(path)!r} holds several workloads: pick one with --workload ({_known(content)})")
        reject_unknown([workload], content, "workload")
        return _list(content[workload], path)
    if workload is not None:
        raise UserError(f"{str(path)!r} holds one list, no workloads by name", param="workload")
    return _list(content, path)


def _known(names: Iterable[str]) -> str:
    return ", ".join(names)


def _list(value: Any, path: Path) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"data set {str(path)!r}: expected a list of prompts, not {type(value).__name__}")
    return value


def _prompt(entry: Any, place: str, default_max_tokens: int) -> PromptSpec:
    if not isinstance(entry, dict):
        raise UserError(f"{place}: expected an object, not {type(entry).__name__}", param="dataset")
    sources = [name for name in ("prompt", "prompt_token_ids", "messages") if entry.get(name)]
    if len(sources) != 1:
        raise UserError(f"{place}: expected one of prompt, prompt_token_ids and messages", param="dataset")
    max_tokens = entry.get("max_tokens", default_max_tokens)
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise UserError(f"{place}: max_tokens must be a positive integer, not {max_tokens!r}", param="dataset")
    value = entry[sources[0]]
    if sources == ["prompt"] and isinstance(value, str):
        return PromptSpec(max_tokens=max_tokens, text=value)
    if sources == ["prompt_token_ids"] and _all(value, int):
        return PromptSpec(max_tokens=max_tokens, token_ids=tuple(value))
    if sources == ["messages"] and _all(value, dict):
        return PromptSpec(max_tokens=max_tokens, messages=tuple(value))
    raise UserError(f"{place}: {sources[0]} has the wrong type", param="dataset")


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)
