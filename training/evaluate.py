"""Measure an exported model on the held-out files, in bits a byte, beside what ``xz -9e`` needs for them.

Every file is read whole and starts after the end-of-text token. A window of ``--context`` tokens moves
over it by ``--stride``; each token is counted once, in the first window that holds it. The bytes are those
of the files' UTF-8 text.
"""

from __future__ import annotations

import argparse
import lzma
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from checkpoint import load_exported
from corpus import SourceFile, split_corpus
from data import encode_files
from model import LanguageModel
from tokenizers import Tokenizer
from torch import Tensor


@torch.inference_mode()
def total_nats(model: LanguageModel, tokens: Tensor, context: int, stride: int) -> float:
    """The negative log-likelihood of ``tokens[1:]``, in nats."""
    last = len(tokens) - 1
    nats = 0.0
    counted = 0
    while counted < last:
        end = min(last, context if counted == 0 else counted + stride)
        start = max(0, end - context)
        logits = model(tokens[None, start:end])[0, counted - start :]
        losses = F.cross_entropy(logits.float(), tokens[counted + 1 : end + 1], reduction="none")
        nats += losses.double().sum().item()
        counted = end
    return nats


def xz_sizes(files: list[SourceFile]) -> tuple[int, int]:
    """Bytes that ``xz -9e`` makes of the files joined into one, and of each by itself, in total."""

    def compressed_size(data: bytes) -> int:
        return len(lzma.compress(data, format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME))

    contents = [file.text.encode("utf-8") for file in files]
    return compressed_size(b"".join(contents)), sum(compressed_size(content) for content in contents)


def main() -> None:
    """Evaluate an exported model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path, help="the exported model")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=512)
    parser.add_argument("--root", type=Path, help="library to read (default: the running interpreter's)")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--per-file", action="store_true", help="also print each file's figure")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    model = load_exported(arguments.directory)
    tokenizer = Tokenizer.from_file(str(arguments.directory / "tokenizer.json"))
    files = split_corpus(arguments.root)[1]
    size = sum(file.size for file in files)
    nats, count = 0.0, 0
    for file, tokens in zip(files, encode_files(tokenizer, files), strict=True):
        of_file = total_nats(model, torch.from_numpy(tokens).long(), arguments.context, arguments.stride)
        if arguments.per_file:
            print(f"  {of_file / math.log(2) / file.size:.4f} {file.size:8d} {file.name}")
        nats += of_file
        count += len(tokens) - 1
    joined, separate = xz_sizes(files)
    print(f"held out: {len(files)} files, {size} bytes, {count} tokens")
    print(f"model:              {nats / math.log(2) / size:.4f} bits/byte ({nats / count:.4f} nats/token)")
    print(f"xz -9e, one file:   {joined * 8 / size:.4f} bits/byte")
    print(f"xz -9e, each file:  {separate * 8 / size:.4f} bits/byte")


if __name__ == "__main__":
    main()
