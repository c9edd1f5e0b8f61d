"""The algorithms of sentencepiece and tiktoken, written out plainly, and tiny vocabularies for them."""

from __future__ import annotations

import itertools
import random
import struct
from collections import Counter
from collections.abc import Mapping, Sequence

from quire.tokenization.sentencepiece import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED
from tests.tokenization.build import CORPUS

LETTERS = "aabcdefghilnoprstuw     .,!\n\tÄéß日本語テ🙂'1234"


def random_texts(count: int, longest: int = 14, seed: int = 0) -> list[str]:
    draws = random.Random(seed)
    words = " ".join(CORPUS).split(" ")
    texts = []
    for _ in range(count):
        if draws.random() < 0.5:
            texts.append("".join(draws.choices(LETTERS, k=draws.randint(0, longest))))
        else:
            texts.append(" ".join(draws.choices(words, k=draws.randint(1, 3))))
    return texts


def trained(words: Sequence[Sequence[str]], num_merges: int) -> list[str]:
    """Unions of the most frequent neighbours, one after another."""
    merged = [list(word) for word in words]
    made: list[str] = []
    for _ in range(num_merges):
        counts = Counter(pair for word in merged for pair in itertools.pairwise(word))
        (left, right), _ = max(counts.items(), key=lambda item: (item[1], item[0]))
        if left + right not in made:
            made.append(left + right)
        for word in merged:
            place = 0
            while place < len(word) - 1:
                if (word[place], word[place + 1]) == (left, right):
                    word[place : place + 2] = [left + right]
                place += 1
    return made


def join_best(symbols: list[str], ranks: Mapping[str, float]) -> list[str]:
    """Join the neighbours whose union has the lowest rank, the first of equals, while there are any."""
    while True:
        unions = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ranks]
        if not unions:
            return symbols
        _, place = min(unions)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and kinds of a model with byte pieces and a piece of the user's."""
    words = [SPACE + word for word in " ".join(CORPUS[:3]).split(" ") if "🦙" not in word]
    made = trained([list(word) for word in words], 120)
    letters = sorted({letter for word in words for letter in word})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\n\n", *made, *letters]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * (len(made) + len(letters))]
    scores = [0.0] * 260 + [-float(rank) for rank in range(len(made) + len(letters))]
    return pieces, scores, kinds


def bpe_ids(text: str, pieces: list[str], scores: list[float], kinds: list[int], *, adds_space: bool) -> list[int]:
    """What sentencepiece's BPE gives, with byte pieces for what is unknown. What is the user's joins nothing, and no
    space is put behind it."""
    ids = {piece: token_id for token_id, piece in enumerate(pieces)}
    ranks = {piece: -score for piece, score, kind in zip(pieces, scores, kinds, strict=True) if kind == NORMAL}
    found: list[int] = []
    spaced = ((" " if adds_space and text else "") + text).replace(" ", SPACE)
    for index, part in enumerate(spaced.split("\n\n")):
        found += [ids["\n\n"]] if index else []
        for symbol in join_best(list(part), ranks):
            if symbol in ranks:
                found.append(ids[symbol])
            else:
                found += [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


def unigram_ids(text: str, pieces: list[str], scores: list[float], unknown: int) -> list[int]:
    """The pieces whose scores add up to the most; neighbours that are unknown are one unknown piece."""
    ids = {piece: token_id for token_id, piece in enumerate(pieces) if token_id != unknown}
    penalty = min(scores) - 10.0
    best: list[tuple[float, int, int]] = [(0.0, 0, -1)]
    longest = max(map(len, pieces))
    for end in range(1, len(text) + 1):
        options = []
        for start in range(max(0, end - longest), end):
            token_id = ids.get(text[start:end])
            if token_id is not None:
                options.append((best[start][0] + scores[token_id], start, token_id))
        if end - 1 >= 0 and text[end - 1] not in ids:
            options.append((best[end - 1][0] + penalty, end - 1, unknown))
        best.append(max(options))
    found: list[int] = []
    end = len(text)
    while end:
        _, start, token_id = best[end]
        if not (token_id == unknown and found and found[-1] == unknown):
            found.append(token_id)
        end = start
    return found[::-1]


def mapped(text: str, rules: Mapping[str, str]) -> str:
    """`text` with the longest key at each place replaced."""
    found, place = "", 0
    while place < len(text):
        key = next((text[place:end] for end in range(len(text), place, -1) if text[place:end] in rules), text[place])
        found += rules.get(key, key)
        place += len(key)
    return found


def charsmap(rules: Mapping[str, str]) -> bytes:
    """The table of a normalizer: a double array of darts-clone, each node put where its children's places are free."""
    units, taken, bases, replacements = {0: 0}, {0}, {0}, b""
    values = {}
    for key, replacement in rules.items():
        values[key.encode()] = len(replacements)
        replacements += replacement.encode() + b"\0"

    def place_children(node: int, prefix: bytes) -> None:
        below = sorted({key[len(prefix)] for key in values if key.startswith(prefix) and key != prefix})
        wanted = below if prefix not in values else [0, *below]
        base = next(at for at in itertools.count() if at not in bases and not taken & {at ^ label for label in wanted})
        bases.add(base)
        taken.update(base ^ label for label in wanted)
        units[node] |= (base ^ node) << 10 | (prefix in values) << 8
        if prefix in values:
            units[base] = values[prefix] | 1 << 31
        for label in below:
            units[base ^ label] = label
            place_children(base ^ label, prefix + bytes([label]))

    place_children(0, b"")
    size = (max(units) // 256 + 1) * 256
    index = struct.pack(f"<{size}I", *(units.get(place, 0) for place in range(size)))
    return struct.pack("<I", len(index)) + index + replacements


def to_proto(
    pieces: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    model: int,
    table: bytes = b"",
    **options: int,
) -> bytes:
    """A `tokenizer.model`. table: of its normalizer. options: of it, add_dummy_prefix and so on, or
    treat_whitespace_as_suffix."""
    data = b""
    for piece, score, kind in zip(pieces, scores, kinds, strict=True):
        data += field(1, field(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + varint(kind))
    suffix = options.pop("treat_whitespace_as_suffix", 0)
    data += field(2, b"\x18" + varint(model) + varint(24 << 3) + varint(suffix))
    numbers = {"add_dummy_prefix": 3, "remove_extra_whitespaces": 4, "escape_whitespaces": 5}
    chosen = b"".join(varint(numbers[name] << 3) + varint(value) for name, value in options.items())
    return data + field(3, chosen + (field(2, table) if table else b""))


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    data = b""
    while value > 127:
        data += bytes([value & 127 | 128])
        value >>= 7
    return data + bytes([value])
