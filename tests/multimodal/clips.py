"""Small video files, made as tests need them."""

from __future__ import annotations

import io
import resource
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from PIL import Image

from quire.errors import UserError
from quire.multimodal import videos

av = pytest.importorskip("av", reason="needs PyAV")

CODECS = {"mp4": "mpeg4", "webm": "libvpx", "avi": "mjpeg", "matroska": "ffv1"}


def recorded(frames: Sequence[Image.Image], kind: str = "mp4", fps: int = 10) -> bytes:
    """A file of the container `kind`, whose frames have lost something, except in Matroska."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(CODECS[kind], rate=fps)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = {"mjpeg": "yuvj420p", "ffv1": "bgr0"}.get(CODECS[kind], "yuv420p")
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def packets(data: bytes) -> Iterator[bytes]:
    with av.open(io.BytesIO(data), format="matroska") as source:
        yield from (bytes(packet) for packet in source.demux(video=0) if packet.size)


def changed(data: bytes, kind: str, change: Callable[[int, av.Packet], bytes]) -> bytes:
    """A copy of a file. change: returns the bytes of the packet with this number, and may shift its times."""
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(data), format="mov" if kind == "mp4" else "matroska") as source,
        av.open(file, "w", format=kind) as container,
    ):
        stream = container.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if packet.dts is not None:
                copied = av.Packet(change(number, packet))
                copied.pts, copied.dts, copied.time_base = packet.pts, packet.dts, packet.time_base
                copied.is_keyframe, copied.stream = packet.is_keyframe, stream
                container.mux(copied)
    return file.getvalue()


def growth(argument: str, data: bytes) -> bytes:
    """In a helper: bytes by which a file that is refused raises the most memory that the process has taken."""
    before = _peak()
    with pytest.raises(UserError, match="damaged"):
        videos.prepare_video(argument, data)
    return str(_peak() - before).encode()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
