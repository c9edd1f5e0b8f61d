"""The GGUF reader: what a sound file says, and one clear error for each way in which a file can lie."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.errors import ModelLoadError
from quire.utils import gguf
from quire.utils.gguf import GGUFFile, find_gguf
from tests.fakes.gguf import (
    ARRAY,
    BOOL,
    CODES,
    FLOAT32,
    FLOAT64,
    INT8,
    INT64,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    GGUFWriter,
    StoredTensor,
    Typed,
    string,
    typed,
)


def small() -> GGUFWriter:
    """Two tensors, 64 and 72 bytes at 0 and 64 of the data, and a few keys."""
    metadata = {
        "general.architecture": typed("llama"),
        "count": Typed(UINT64, 2**63),
        "tokens": typed(["a", "", "日本"]),
        "scores": Typed(FLOAT32, [0.5, -1.0]),
        "flag": typed(True),
    }
    tensors = {
        "first": StoredTensor(0, (4, 4), bytes(range(64))),
        "second": StoredTensor(2, (2, 64), bytes(72)),
    }
    return GGUFWriter(metadata, tensors)


def opened(tmp_path: Path, data: bytes | GGUFWriter) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(data if isinstance(data, bytes) else data.to_bytes())
    return GGUFFile(path)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 8, 64])
def test_a_sound_file(version: int, alignment: int | None, tmp_path: Path) -> None:
    writer = small()
    writer.version = version
    if alignment is not None:
        writer.metadata["general.alignment"] = typed(alignment)
        writer.alignment = alignment
    with opened(tmp_path, writer) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["count"] == 2**63
        assert file.metadata["flag"] is True
        assert file.strings("tokens") == ["a", "", "日本"]
        assert file.places("tokens", {"a", "日本", "other"}) == {"a": 0, "日本": 2}
        assert file.numbers("scores") == [0.5, -1.0]
        assert (file.strings("absent"), file.numbers("absent"), file.places("absent", {"a"})) == (None, None, {})
        assert [(entry.shape, entry.type.name) for entry in file.tensors.values()] == [
            ((4, 4), "F32"),
            ((2, 64), "Q4_0"),
        ]
        assert bytes(file.data(file.tensors["first"])) == bytes(range(64))
        assert file.tensors["second"].num_bytes == 72


@pytest.mark.parametrize("kind", sorted(CODES))
def test_every_kind_of_number(kind: int, tmp_path: Path) -> None:
    value: object = {"f": 0.25, "d": 0.1, "?": False}.get(CODES[kind], 7)
    writer = GGUFWriter({"one": Typed(kind, value), "many": Typed(kind, [value, value])})
    with opened(tmp_path, writer) as file:
        assert (file.metadata["one"], file.numbers("many")) == (value, [value, value])
        assert type(file.metadata["one"]) is type(value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """At every byte of the header, and in the data of the last tensor."""
    whole = small().to_bytes()
    data_start = whole.index(bytes(range(64)))
    for end in [*range(data_start), data_start + 64 + 71]:
        with pytest.raises(ModelLoadError):
            opened(tmp_path, whole[:end])
    opened(tmp_path, whole[: data_start + 64 + 72]).close()


def header(num_tensors: int, num_pairs: int, rest: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs) + rest


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def entry(name: str, sizes: list[int], kind: int, offset: int, num_dimensions: int | None = None) -> bytes:
    count = len(sizes) if num_dimensions is None else num_dimensions
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", count, *sizes, kind, offset)


def aligned(head: bytes, data: bytes) -> bytes:
    return head + bytes(-len(head) % 32) + data


MANY = 2**64 - 1
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a GGUF file"),
    "another kind": (b"PK\x03\x04" + bytes(100), "does not begin with GGUF"),
    "version 1": (header(0, 0, bytes(64), 1), "its version is 1"),
    "version 4": (header(0, 0, bytes(64), 4), "its version is 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensors": (header(MANY, 0, bytes(64)), "claims to have 18446744073709551615 tensors"),
    "tensors within the limit": (header(3, 0, bytes(64)), "claims to have 3 tensors"),
    "pairs": (header(0, 2**40, bytes(64)), "claims to have 1099511627776 metadata keys"),
    "key length": (header(0, 1, struct.pack("<Q", MANY) + bytes(64)), "a metadata key has 18446744073709551615 bytes"),
    "key past the end": (header(0, 1, struct.pack("<Q", 1000) + bytes(64)), "reaches beyond the end"),
    "key not text": (header(0, 1, string(b"\xff\xfe") + bytes(64)), "not valid UTF-8"),
    "key twice": (header(0, 2, 2 * pair("key", UINT8, b"\1") + bytes(64)), "'key' occurs twice"),
    "value type": (header(0, 1, pair("key", 13, bytes(64))), "key is of the unknown type 13"),
    "boolean": (header(0, 1, pair("key", BOOL, b"\2" + bytes(64))), r"key must be true \(1\) or false"),
    "string length": (header(0, 1, pair("key", STRING, struct.pack("<Q", 2**40) + bytes(64))), "key has 10995"),
    "string not text": (header(0, 1, pair("key", STRING, string(b"\xc3\x28")) + bytes(64)), "key is not valid UTF-8"),
    "array count": (header(0, 1, pair("key", ARRAY, struct.pack("<IQ", UINT32, MANY) + bytes(64))), "beyond the end"),
    "array type": (header(0, 1, pair("key", ARRAY, struct.pack("<IQ", 99, 1) + bytes(64))), "a list of the type 99"),
    "array of arrays": (header(0, 1, pair("key", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64))), "of the type 9"),
    "strings count": (header(0, 1, pair("key", ARRAY, struct.pack("<IQ", STRING, MANY) + bytes(64))), "has 184467"),
    "strings past the end": (
        header(0, 1, pair("key", ARRAY, struct.pack("<IQQ", STRING, 2, 1 << 60) + bytes(64))),
        "beyond the end",
    ),
    "alignment of 3": (header(0, 1, pair("general.alignment", UINT32, struct.pack("<I", 3))), "not 3"),
    "alignment of 24": (header(0, 1, pair("general.alignment", UINT32, struct.pack("<I", 24))), "not 24"),
    "alignment of 0": (header(0, 1, pair("general.alignment", UINT32, struct.pack("<I", 0))), "not 0"),
    "alignment too large": (header(0, 1, pair("general.alignment", UINT32, struct.pack("<I", 2**31))), "not 21474"),
    "alignment of a float": (header(0, 1, pair("general.alignment", FLOAT32, struct.pack("<f", 32))), "not 32.0"),
    "tensor name length": (header(1, 0, struct.pack("<Q", 10_000) + bytes(20_000)), "name has 10000 bytes"),
    "no dimensions": (header(1, 0, entry("t", [], 0, 0) + bytes(64)), "'t' has 0 dimensions"),
    "dimensions": (header(1, 0, entry("t", [1], 0, 0, 2**32 - 1) + bytes(64)), "'t' has 4294967295 dimensions"),
    "a size of 0": (header(1, 0, entry("t", [4, 0], 0, 0) + bytes(64)), r"cannot have the shape \[0, 4\]"),
    "sizes that overflow": (aligned(header(1, 0, entry("t", [2**63, 2], 0, 0)), bytes(64)), "truncated"),
    "a large size": (aligned(header(1, 0, entry("t", [17], 0, 0)), bytes(64)), "truncated"),
    "part of a block": (header(1, 0, entry("t", [48, 2], 8, 0) + bytes(64)), r"Q8_0 cannot have the shape \[2, 48\]"),
    "unread type": (header(1, 0, entry("t", [256], 15, 0) + bytes(64)), "'t' is stored as Q8_K, which is not supp"),
    "unknown type": (header(1, 0, entry("t", [256], 4711, 0) + bytes(64)), "stored as the unknown type 4711"),
    "off the alignment": (header(1, 0, entry("t", [4], 0, 8) + bytes(64)), "lies at 8, which is no multiple"),
    "offset": (aligned(header(1, 0, entry("t", [4], 0, 2**64 - 32)), bytes(64)), "truncated"),
    "name twice": (
        aligned(header(2, 0, entry("t", [4], 0, 0) + entry("t", [4], 0, 32)), bytes(64)),
        "'t' occurs twice",
    ),
    "overlap": (aligned(header(2, 0, entry("t", [16], 0, 0) + entry("u", [4], 0, 32)), bytes(64)), "'u' overlaps"),
    "the same place": (aligned(header(2, 0, entry("t", [4], 0, 0) + entry("u", [4], 0, 0)), bytes(64)), "overlaps"),
}


@pytest.mark.parametrize("name", list(DAMAGED))
def test_what_a_file_may_not_say(name: str, tmp_path: Path) -> None:
    data, message = DAMAGED[name]
    with pytest.raises(ModelLoadError, match=message) as raised:
        opened(tmp_path, data)
    assert str(tmp_path / "model.gguf") in raised.value.message


def test_the_last_byte_of_the_file_is_part_of_it(tmp_path: Path) -> None:
    """The checks of "a large size" and its like do not refuse what just fits."""
    with opened(tmp_path, aligned(header(1, 0, entry("t", [16], 0, 0)), bytes(64))) as file:
        assert file.tensors["t"].num_bytes == 64


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda file: file.strings("scores"), "scores must be a list of strings"),
        (lambda file: file.numbers("tokens"), "tokens must be a list of numbers"),
        (lambda file: file.numbers("flag"), "flag must be a list, not bool"),
        (lambda file: file.strings("broken"), "broken holds a string that is not valid UTF-8"),
    ],
)
def test_arrays_of_another_kind(read: Callable[[GGUFFile], object], message: str, tmp_path: Path) -> None:
    writer = small()
    writer.metadata["broken"] = Typed(STRING, [b"\xff"])
    with opened(tmp_path, writer) as file, pytest.raises(ModelLoadError, match=message):
        read(file)


def test_limits_of_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small().to_bytes()
    monkeypatch.setattr(gguf, "MAX_HEADER_BYTES", 100)
    with pytest.raises(ModelLoadError, match="beyond the 100 bytes that a header may have"):
        opened(tmp_path, whole)
    monkeypatch.setattr(gguf, "MAX_HEADER_BYTES", 2**20)
    monkeypatch.setattr(gguf, "MAX_STRINGS", 2)
    with pytest.raises(ModelLoadError, match="tokens has 3 strings; there may be 2 in all"):
        opened(tmp_path, whole)


def test_strange_numbers_are_read_as_they_are(tmp_path: Path) -> None:
    writer = GGUFWriter({"nan": Typed(FLOAT32, math.nan), "small": Typed(INT8, -128), "big": Typed(INT64, -(2**63))})
    writer.metadata["infinite"] = Typed(FLOAT64, math.inf)
    with opened(tmp_path, writer) as file:
        assert math.isnan(file.metadata["nan"])
        assert (file.metadata["small"], file.metadata["big"]) == (-128, -(2**63))
        assert file.metadata["infinite"] == math.inf


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not a file"):
        GGUFFile(tmp_path)
    with pytest.raises(ModelLoadError, match="is not a file"):
        GGUFFile(tmp_path / "absent.gguf")


def test_find(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    (tmp_path / "folder.gguf").mkdir()
    assert find_gguf(tmp_path) is None
    first = small().write(tmp_path / "a.gguf")
    assert find_gguf(tmp_path) == first
    small().write(tmp_path / "b.gguf")
    with pytest.raises(ModelLoadError, match=r"holds 2 GGUF files: name the one to load, such as .*a\.gguf"):
        find_gguf(tmp_path)


def test_the_files_of_a_split_model(tmp_path: Path) -> None:
    writer = small()
    first, second = writer.write_split(tmp_path, 2)
    with GGUFFile(first) as file:
        assert file.paths == [first, second]
        assert list(file.tensors) == ["first", "second"]
        for name, tensor in writer.tensors.items():
            file.release(file.tensors[name])
            assert bytes(file.data(file.tensors[name])) == tensor.data
        assert file.strings("tokens") == ["a", "", "日本"]
    assert find_gguf(tmp_path) == first
    with pytest.raises(ModelLoadError, match="part 2 of a split model: name the first of its files"):
        GGUFFile(second)
    (tmp_path / "another.gguf").write_bytes(writer.to_bytes())
    with pytest.raises(ModelLoadError, match="3 GGUF files"):
        find_gguf(tmp_path)


def test_files_that_make_no_split_model(tmp_path: Path) -> None:
    first, second, third = small().write_split(tmp_path, 3)

    def reason() -> str:
        with pytest.raises(ModelLoadError) as refused:
            GGUFFile(first)
        return refused.value.message.removeprefix(str(tmp_path))

    content = third.read_bytes()
    third.write_bytes(second.read_bytes())
    assert reason() == "/model-00003-of-00003.gguf says that it is part 2 of 3"
    own = {"split.no": typed(2), "split.count": typed(3)}
    GGUFWriter(own, {"second": small().tensors["second"]}).write(third)
    assert reason() == "/model-00003-of-00003.gguf: tensor 'second' is in another part too"
    GGUFWriter(own, {"other": small().tensors["second"]}).write(third)
    assert reason() == "/model-00001-of-00003.gguf: its model has 2 tensors, and its files hold 3"
    third.write_bytes(content[:40])
    assert "not a valid GGUF file" in reason()
    third.unlink()
    assert reason().endswith("model-00003-of-00003.gguf is not a file")
    for count in (typed(1001), Typed(INT64, -1), typed("2")):
        GGUFWriter({"split.count": count}, {}).write(first)
        assert "split" in reason()
