"""Files of pictures and videos of each format, damaged.

The promises: sound files are read, a damaged one gives pixels of the size that its tokens say or is refused in one line
that names its field, within the memory and time of a child (tests/fuzz/child.py).
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from random import Random

from quire.errors import UserError
from quire.multimodal.preparing import Preparation
from quire.multimodal.processors import Normalisation, QwenProcessor
from quire.multimodal.video_marks import ReadyVideo
from quire.multimodal.videos import VideoProcessor
from quire.prompt_image import ReadyImage
from tests.fuzz.child import cases_of
from tests.fuzz.harness import Fuzzer
from tests.fuzz.tokenizer_files import LONGEST_MESSAGE, damaged
from tests.multimodal.pictures import FORMATS, draw, encoded

WHERE = "messages[0].content[1]"
IMAGE = QwenProcessor(4, 2, 2, 64, 4096, 3, True, Normalisation(1 / 255, (0.5,) * 3, (0.5,) * 3))
VIDEO = VideoProcessor(IMAGE, 64, 2**14, 2.0, None, 4, 64, None)
PICTURES = Preparation(IMAGE, (255, 255, 255))


@cache
def sound_files() -> dict[str, bytes]:
    """File of each format; of videos where a decoder is installed."""
    found = {format: encoded(draw(1, size=(40, 32)), format) for format in FORMATS}
    found["progressive"] = encoded(draw(2, size=(64, 48)), "JPEG", progressive=True)
    found["palette"] = encoded(draw(3, "P", size=(33, 20)))
    found["animation"] = encoded(draw(4), "GIF", save_all=True, append_images=[draw(5)])
    if find_spec("av") is not None:
        from tests.multimodal.clips import CODECS, recorded  # skips its importer without a decoder

        frames = [draw(seed, size=(32, 16)) for seed in range(6)]
        found |= {kind: recorded(frames, kind) for kind in CODECS}
    return found


def case(line: str) -> None:
    """line: the seed of a case."""
    rng = Random(line)
    kind, sound = rng.choice(sorted(sound_files().items()))
    data, refused, param = damaged(sound, rng), "", WHERE
    is_picture = kind in FORMATS or kind in ("progressive", "palette", "animation")
    found: ReadyImage | ReadyVideo | None = None
    try:
        found = PICTURES.prepare(data, WHERE) if is_picture else VIDEO.prepare(data, WHERE)
    except UserError as error:
        refused, param = error.message, error.param or ""
    assert param == WHERE, param
    assert not refused or refused.startswith(f"{WHERE}: "), refused
    assert len(refused) < LONGEST_MESSAGE, "the error is very long"
    assert "\n" not in refused, refused
    assert "0x" not in refused, refused
    assert not (refused and data == sound), refused
    for part in [] if found is None else found.parts if isinstance(found, ReadyVideo) else [found]:
        height, width = part.size
        assert 0 < part.num_tokens * 64 == height * width, part.size
        assert len(part.pixels) in (3 * height * width, 6 * height * width), len(part.pixels)


FUZZER = Fuzzer("media", lambda: cases_of("tests.fuzz.media_files:case"), num_test_cases=60)
