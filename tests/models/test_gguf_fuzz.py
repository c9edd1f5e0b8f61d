"""A GGUF file with anything in it: it loads, or a ModelLoadError says why not. No other error, no huge allocation."""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.errors import ModelLoadError
from quire.models.loader import load_model
from quire.parallel.single import SINGLE_RANK
from quire.tokenization.tokenizer import load_tokenizer
from tests.fakes.gguf import GGUFWriter, Typed, string, typed
from tests.fakes.gguf_model import to_gguf
from tests.models.families import llama
from tests.tokenization.build import byte_level_backend
from tests.tokenization.test_gguf import writer_of

ROOM_BYTES = 2**30
"""What a file of a hundred kilobytes may take: far more than it needs, far less than what its numbers can ask for."""
NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    8,
    31,
    32,
    33,
    64,
    255,
    256,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63,
    2**64 - 1,
]

Change = tuple[str, int, int]
CHANGES = st.tuples(
    st.sampled_from(["byte", "word", "long", "cut", "repeat", "remove"]),
    st.integers(0, 2**20),
    st.one_of(st.integers(0, 2**64 - 1), st.sampled_from(NUMBERS)),
)


def whole_file() -> GGUFWriter:
    sizes = {"vocab_size": 340, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model, _ = to_gguf(llama(**sizes, **heads), "llama", {"ffn_up": "Q8_0", "attn_q": "Q4_0", "ffn_down": "F16"})
    writer = writer_of(byte_level_backend(), "llama-bpe")
    model.metadata |= writer.metadata
    model.metadata["general.alignment"] = typed(32)
    model.metadata["tokenizer.chat_template"] = typed("{{ messages }}")
    model.metadata["other"] = Typed(10, [1, 2, 3])
    return model


@cache
def sound() -> tuple[bytes, tuple[int, ...]]:
    """The whole file, and where each key and each tensor's name ends."""
    writer = whole_file()
    data = writer.to_bytes()
    names = [string(name) for name in (*writer.metadata, *writer.tensors)]
    return data, tuple(data.index(name) + len(name) for name in names)


@contextmanager
def limited_memory() -> Iterator[None]:
    """More than ROOM_BYTES of new address space is a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def changed(data: bytes, changes: list[Change], end: int) -> bytes:
    """Change bytes before `end`. Numbers are put where they may hit a count or a length, often one that is there."""
    mutable = bytearray(data)
    for kind, place, number in changes:
        place %= max(1, min(end, len(mutable)))
        if kind == "byte":
            mutable[place : place + 1] = bytes([number % 256])
        elif kind == "word":
            mutable[place : place + 4] = struct.pack("<I", number % 2**32)
        elif kind == "long":
            mutable[place : place + 8] = struct.pack("<Q", number)
        elif kind == "cut":
            del mutable[place:]
        elif kind == "repeat":
            mutable[place:place] = mutable[place : place + number % 64]
        else:
            del mutable[place : place + number % 64]
    return bytes(mutable)


def use(path: Path) -> list[str]:
    """Do with a file all that an engine does. The errors."""
    errors = []
    try:
        config = load_model_config(str(path), dtype="auto", max_model_len=None, revision=None, config_only=False)
        load_model(config, LoadConfig("auto", 0), SINGLE_RANK)
    except ModelLoadError as error:
        errors.append(error.message)
    try:
        load_tokenizer(path).encode("The quick brown fox")
    except ModelLoadError as error:
        errors.append(error.message)
    return errors


def test_the_sound_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(sound()[0])
    with limited_memory():
        assert use(path) == []


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(CHANGES, min_size=1, max_size=3), whole=st.booleans())
def test_a_changed_file_loads_or_is_refused(changes: list[Change], whole: bool, tmp_path: Path) -> None:
    data, ends = sound()
    refuse_or_load(changed(data, changes, len(data) if whole else max(ends) + 100), tmp_path)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    which=st.integers(0, 2**20),
    distance=st.sampled_from([0, 4, 8, 12, 16, 20, 24, 28]),
    number=st.one_of(st.sampled_from(NUMBERS), st.integers(0, 2**64 - 1)),
    is_long=st.booleans(),
)
def test_other_numbers_behind_a_name(which: int, distance: int, number: int, is_long: bool, tmp_path: Path) -> None:
    """Changes where they hurt: the types, counts, sizes and offsets that follow a key or a tensor's name."""
    data, ends = sound()
    mutable = bytearray(data)
    place = ends[which % len(ends)] + distance
    if is_long:
        struct.pack_into("<Q", mutable, place, number)
    else:
        struct.pack_into("<I", mutable, place, number % 2**32)
    refuse_or_load(bytes(mutable), tmp_path)


def refuse_or_load(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with limited_memory():
        errors = use(path)
    assert all(str(path) in error for error in errors)
