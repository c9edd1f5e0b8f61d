"""A tokenizer of more entries than its model can use is refused before the library, which takes hundreds of bytes for
each, gets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from quire.config.hf_config import BUNDLED_DIRECTORIES
from quire.errors import ModelLoadError
from quire.tokenization.tokenizer import load_tokenizer
from quire.tokenization.vocabulary_limits import (
    LONGEST_PIECE,
    MAX_PATTERN,
    MAX_TOKENIZER_VALUES,
    check_text_lengths,
    count_values,
    max_values,
)
from tests.tokenization.build import byte_level_backend

GUARDED = """
import resource, sys
from quire.errors import ModelLoadError
from quire.tokenization.tokenizer import load_tokenizer
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 3 * int(sys.argv[2]), -1))
try:
    load_tokenizer(sys.argv[1])
except ModelLoadError as error:
    print(error)
"""


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what the library is given."""
    sizes: list[int] = []
    monkeypatch.setattr(tokenizers.Tokenizer, "from_buffer", lambda content: sizes.append(len(content)))
    return sizes


def vocabulary(num_entries: int) -> str:
    entries = ",".join(f'"{number:x}z":{number}' for number in range(num_entries))
    return f'{{"model":{{"type":"BPE","merges":[],"vocab":{{{entries}}}}}}}'


@pytest.mark.parametrize(("vocab_size", "num_entries"), [(300, 6 * (300 + 2**15)), (None, 6 * (2**18 + 2**15))])
def test_more_entries_than_the_model_can_use(
    tmp_path: Path, handed_over: list[int], vocab_size: int | None, num_entries: int
) -> None:
    (tmp_path / "tokenizer.json").write_text(vocabulary(num_entries))
    with pytest.raises(ModelLoadError, match=f"holds some {num_entries + 1} values .*; {num_entries} are allowed"):
        load_tokenizer(tmp_path, vocab_size=vocab_size)
    assert handed_over == []


def test_a_large_vocabulary_in_the_config_has_a_limit_too() -> None:
    assert max_values(2**31 - 1) == MAX_TOKENIZER_VALUES


@pytest.mark.parametrize(
    ("num_tokens", "num_values"),
    [
        (256_000, 256_000 + 2 * 580_604 + 7 * 250),  # merges as pairs, and objects of added tokens
        (262_144, 262_144 + 2 * 514_906 + 7 * 6_415),
        (201_135, 201_135 + 2 * 439_802 + 7 * 1_135),
        (250_112, 2 * 250_112),  # with scores
    ],
)
def test_the_largest_vocabularies_that_are_published_have_room(num_tokens: int, num_values: int) -> None:
    assert num_values * 1.05 < max_values(num_tokens), "commas in tokens need some room too"


def test_lines_of_merges_count(tmp_path: Path) -> None:
    """merges.txt has no commas, and the library keeps both words of a line."""
    byte_level_backend().model.save(str(tmp_path))
    line = (tmp_path / "merges.txt").read_text().splitlines()[-1] + "\n"
    (tmp_path / "merges.txt").write_text(line * (3 * (300 + 2**15) + 1))
    with pytest.raises(ModelLoadError, match=r"merges\.txt holds some \d+ values"):
        load_tokenizer(tmp_path, vocab_size=300)


def test_every_value_counts() -> None:
    tokenizer = json.loads((BUNDLED_DIRECTORIES["bundled"] / "tokenizer.json").read_text())
    assert count_values(json.dumps(tokenizer).encode(), is_text=False) >= len(tokenizer["model"]["vocab"]) + len(
        tokenizer["model"]["merges"]
    )


LONG = "a" * (LONGEST_PIECE + 1)
MODELS: dict[str, dict[str, Any]] = {
    "BPE": {"type": "BPE", "merges": [], "vocab": {"a": 0, LONG: 1}},
    "Unigram": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], [LONG, -1.0]]},
    "WordPiece": {
        "type": "WordPiece",
        "unk_token": "a",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {"a": 0, LONG: 1},
    },
    "WordLevel": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, LONG: 1}},
}


@pytest.mark.parametrize("model", MODELS)
def test_an_entry_that_is_too_long(tmp_path: Path, handed_over: list[int], model: str) -> None:
    """The library's trees of one of ten million characters take gigabytes, and end the process."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": MODELS[model]}))
    with pytest.raises(
        ModelLoadError, match=r"tokenizer\.json: the entry 'a+'\.\.\. has 513 characters, more than 512"
    ):
        load_tokenizer(tmp_path)
    assert handed_over == []


@pytest.mark.parametrize("letter", ["a", '"', "\\", "é", "日", "🦙", " ", "-", ",", "\n"])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_characters_count_however_they_are_written(tmp_path: Path, letter: str, is_ascii: bool) -> None:
    file = tmp_path / "tokenizer.json"

    def content(length: int) -> bytes:
        texts = {"before": '"' * 5, letter * length: 1, "numbers": list(range(600)), "pattern": {"Regex": "a|" * 1000}}
        return json.dumps(texts, ensure_ascii=is_ascii).encode()

    check_text_lengths(file, content(LONGEST_PIECE))
    with pytest.raises(ModelLoadError, match="has 513 characters"):
        check_text_lengths(file, content(LONGEST_PIECE + 1))


def test_a_merge_may_be_two_entries_with_a_space(tmp_path: Path) -> None:
    longest = "b" * LONGEST_PIECE
    for name, text in (
        ("tokenizer.json", json.dumps([f"{longest} {longest}"])),
        ("merges.txt", f"{longest} {longest}\n"),
    ):
        check_text_lengths(tmp_path / name, text.encode())
        for wrong in (f"{longest}b {longest}", f"{longest} {longest} c"):
            with pytest.raises(ModelLoadError, match="characters, more than 512"):
                check_text_lengths(tmp_path / name, text.replace(f"{longest} {longest}", wrong).encode())


def test_a_pattern_has_a_length_too(tmp_path: Path) -> None:
    step = {"type": "Split", "pattern": {"Regex": "a" * (MAX_PATTERN + 1)}}
    with pytest.raises(ModelLoadError, match="a pattern has 16385 bytes"):
        check_text_lengths(tmp_path / "tokenizer.json", json.dumps(step).encode())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"eos_token": LONG}),
        ("tokenizer_config.json", {"extra_special_tokens": [LONG]}),
        ("tokenizer_config.json", {"image_token": LONG}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": LONG}}}),
        ("special_tokens_map.json", {"eos_token": {"content": LONG}}),
        ("added_tokens.json", {LONG: 7}),
    ],
)
def test_a_special_token_that_is_too_long(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match="has 513 characters, more than 512"):
        load_tokenizer(tmp_path)


def test_two_million_entries_in_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(vocabulary(2_000_000))
    size = file.stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", GUARDED, str(tmp_path), str(size)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, "1999" in done.stdout or "2000" in done.stdout) == (0, True), done.stderr[-1000:]
