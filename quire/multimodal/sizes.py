"""Sizes in `limit_mm_per_prompt`, for which memory is planned."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from quire.config.media import MediaSize
from quire.errors import ConfigError, UserError

if TYPE_CHECKING:
    from quire.multimodal.processors import QwenProcessor, SquareProcessor

NO_LIMIT = 2**32
OPTION = "limit_mm_per_prompt"


def check_tokens(num_tokens: int, limit: int, what: str, where: str) -> None:
    """Raise UserError for an image or a video of more than `limit` tokens."""
    if num_tokens > limit:
        raise UserError(
            f"{where}: {what} of {num_tokens} tokens is larger than the {limit} that the engine has planned memory for "
            f"({OPTION}): send a smaller one, or start with a larger size",
            param=where,
        )


def sides(size: MediaSize, max_pixels: int) -> tuple[int, int]:
    """Height and width; one that the size lacks is that of the largest square."""
    square = math.isqrt(max_pixels)
    return size.height or square, size.width or square


def image_limit(processor: QwenProcessor | SquareProcessor, size: MediaSize) -> int:
    """Tokens of an image of the size; NO_LIMIT if the model has none as large. Raises ConfigError."""
    from quire.multimodal.processors import SquareProcessor  # imports NumPy

    if not size.has_sides or isinstance(processor, SquareProcessor):
        return NO_LIMIT
    height, width = sides(size, processor.max_pixels)
    if height * width > processor.max_pixels and processor.resizes:
        return NO_LIMIT
    try:
        return processor.num_tokens_of(height, width, f"{OPTION}.image")
    except UserError as error:
        raise ConfigError(str(error), param=OPTION) from None
