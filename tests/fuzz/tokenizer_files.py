"""Tokenizer files besides tokenizer.json: sentencepiece's and tiktoken's models and tekken.json, damaged.

The promises: sound files are read, what is read encodes and decodes, anything else is refused in one line, within the
memory and time of a child (tests/fuzz/child.py).
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from quire.errors import ModelLoadError, UserError
from quire.tokenization.sentencepiece import BPE, UNIGRAM
from quire.tokenization.tokenizer import load_tokenizer
from tests.fuzz.child import cases_of
from tests.fuzz.harness import Fuzzer
from tests.tokenization.reference_pieces import sentencepiece_vocabulary, to_proto
from tests.tokenization.test_other_files import ranked, tekken

NUMBERS = (0, -1, 1, 255, 2**31, 2**32 - 1, 2**63, 1e308, float("nan"), float("inf"), None, True, "", "YQ==", [], {})
PATTERNS = (r"(a+)+$", r"(?:(?:(?:.*)*)*)*x", "(", r"[^\r\n]{1,1000}{1,1000}", r"\p{L}" * 2000, "", "\x00", r"(?=.*)")
LONGEST_MESSAGE = 4000
TIKTOKEN_CONFIG = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"300": {"content": "[EOS]"}}}
BYTES = (0x00, 0x01, 0x7F, 0x80, 0xFF, 0x0A, 0x20)


@cache
def sound_files() -> dict[str, bytes]:
    """Of each kind one."""
    pieces, scores, kinds = sentencepiece_vocabulary()
    tokens = ranked(20)
    lines = b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    return {
        "bpe": to_proto(pieces, scores, kinds, BPE, add_dummy_prefix=1, remove_extra_whitespaces=0),
        "unigram": to_proto(pieces, scores, kinds, UNIGRAM, add_dummy_prefix=0, remove_extra_whitespaces=1),
        "tiktoken": lines,
        "tekken": json.dumps(tekken(tokens)).encode(),
    }


NAMES = {"bpe": "tokenizer.model", "unigram": "tokenizer.model", "tiktoken": "tiktoken.model", "tekken": "tekken.json"}


def damaged(data: bytes, rng: Random) -> bytes:
    for _ in range(rng.randint(0, 3)):
        place = rng.randint(0, len(data))
        match rng.randrange(5):
            case 0:
                data = data[:place] + bytes([rng.choice(BYTES)]) + data[place + 1 :]
            case 1:
                data = data[:place]
            case 2:
                data = data[:place] + data[place : place + rng.randint(1, 64)] * rng.choice((2, 1000)) + data[place:]
            case 3:
                data = data[:place] + data[place + rng.randint(1, 64) :]
            case _:
                data = data[:place] + struct.pack("<Q", rng.getrandbits(64)) + data[place + 8 :]
    return data


def changed(values: Any, rng: Random) -> Any:
    """A JSON value of which some parts have become something else."""
    if rng.random() < 0.004:
        return rng.choice(NUMBERS)
    if isinstance(values, dict):
        return {name: changed(value, rng) for name, value in values.items() if rng.random() > 0.002}
    return [changed(value, rng) for value in values] if isinstance(values, list) else values


def case(line: str) -> None:
    """line: the seed of a case."""
    rng = Random(line)
    kind, sound = rng.choice(sorted(sound_files().items()))
    data = sound
    if kind == "tekken" and rng.random() < 0.8:
        values = changed(json.loads(data), rng)
        if rng.random() < 0.3 and isinstance(values, dict) and isinstance(values.get("config"), dict):
            values["config"]["pattern"] = rng.choice(PATTERNS)
        data = json.dumps(values).encode()
    else:
        data = damaged(data, rng)
    is_sound = True
    directory = Path(tempfile.mkdtemp(prefix="quire-fuzz-"))
    try:
        (directory / NAMES[kind]).write_bytes(data)
        if kind == "tiktoken":
            own = changed(TIKTOKEN_CONFIG, rng)
            is_sound = own == TIKTOKEN_CONFIG
            (directory / "tokenizer_config.json").write_text(json.dumps(own))
        refused = ""
        try:
            tokenizer = load_tokenizer(directory)
            tokenizer.decode(tokenizer.encode("the fox  jumps\n\n" + "a" * 200 + "é\U0001f600 12345"))
        except ModelLoadError as error:
            refused = str(error)
        except UserError as error:  # a pattern may take too many attempts at this text
            assert kind == "tekken", "only tekken.json brings a pattern"
            refused = str(error)
        assert len(refused) < LONGEST_MESSAGE, "the error is very long"
        assert "\n" not in refused, refused
        assert not (refused and is_sound and data == sound), refused
    finally:
        shutil.rmtree(directory)


FUZZER = Fuzzer("tokenizers", lambda: cases_of("tests.fuzz.tokenizer_files:case"), num_test_cases=60)
