"""`quire quantize`: writes a GGUF file from a Hugging Face directory, in llama.cpp's type mixes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.parser import Parser, number_of
from quire.config.gguf_mixes import MIXES
from quire.errors import UserError
from quire.utils.gguf import SUFFIX

if TYPE_CHECKING:
    from quire.config.gguf_export import Description, TensorPlace
    from quire.config.model import ModelConfig
    from quire.models.gguf.importance import Importance
    from quire.models.weight_files import WeightFiles
    from quire.tokenization.tokenizer import Tokenizer
    from quire.utils.gguf_writer import Value

MOST_TOKENS = 32_768


def build_parser() -> Parser:
    parser = Parser(
        prog="quire quantize",
        usage="quire quantize MODEL --to MIX -o FILE.gguf [options]",
        description="Write a GGUF file, with its tokenizer, that Quire and llama.cpp read.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory in Hugging Face layout, or a hub id")
    add("--to", metavar="MIX", required=True, type=str.lower, help=f"one of {', '.join(MIXES)}")
    add("-o", "--output", metavar="FILE.gguf", required=True, type=Path, help="replaced when all of it is there")
    add("--imatrix", metavar="FILE", type=Path, help="an importance matrix of llama.cpp's tools, .dat or GGUF")
    add("--imatrix-text", metavar="FILE", type=Path, help="a text to compute the importance matrix from")
    add("--imatrix-tokens", metavar="N", type=number_of, help=f"of the text, at most (default: {MOST_TOKENS})")
    add("--no-tokenizer", action="store_true", help="leave the tokenizer out of the file")
    add("--threads", metavar="N", type=number_of, help="default: one for each core")
    add("--revision", metavar="REV", help="branch, tag or commit of a hub id")
    add("--download-dir", metavar="DIR", help="where a hub id is fetched to")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = build_parser().parse(arguments)
    _check(options)
    from quire.config.gguf_export import check_read_back, describe
    from quire.config.hf_config import ModelChoices, load_model_config
    from quire.envs import affinity_cores
    from quire.models.gguf.make import Recipe, open_weights, write_gguf
    from quire.tokenization.gguf_export import check_same_ids, describe_tokenizer
    from quire.tokenization.tokenizer import load_tokenizer
    from quire.utils.sizes import format_bytes
    from quire.worker.load_progress import LoadProgress

    began = time.monotonic()
    choices = ModelChoices(download_dir=options.download_dir)
    config = load_model_config(
        options.model, dtype="auto", max_model_len=None, revision=options.revision, config_only=False, choices=choices
    )
    config, files = open_weights(config)
    description = describe(config, config.path.name)
    num_threads = options.threads or affinity_cores()
    needs_tokenizer = options.imatrix_text is not None or not options.no_tokenizer
    tokenizer = load_tokenizer(config.path, vocab_size=config.vocab_size) if needs_tokenizer else None
    more: dict[str, Value] = {"general.file_type": MIXES[options.to].number, "tokenizer.ggml.model": "none"}
    if tokenizer is not None and not options.no_tokenizer:
        more |= describe_tokenizer(tokenizer, config.path, config.vocab_size, config.eos_token_ids)

    def check(partial: Path) -> None:
        found = load_model_config(str(partial), dtype="auto", max_model_len=None, revision=None, config_only=False)
        check_read_back(config, found)
        if tokenizer is not None and not options.no_tokenizer:
            check_same_ids(tokenizer, load_tokenizer(partial, vocab_size=config.vocab_size))

    importance = _importance(options, config, files, description, tokenizer)
    recipe = Recipe(options.to, importance, str(options.imatrix or options.imatrix_text or ""))
    with LoadProgress() as progress, _one_thread_each():
        sizes = write_gguf(config, files, description, recipe, (options.output, more), check, progress, num_threads)
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.most_common())
    print(f"{options.output}: {format_bytes(sum(sizes.values()))} ({held}) in {time.monotonic() - began:.1f} s")
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.to not in MIXES:
        raise UserError(f"--to must be one of {', '.join(MIXES)}, not {options.to!r}", param="to")
    if options.output.suffix != SUFFIX:
        raise UserError(f"--output must name a file *{SUFFIX}, not {str(options.output)!r}", param="output")
    if not options.output.parent.is_dir():
        raise UserError(f"--output: {str(options.output.parent)!r} is not a directory", param="output")
    if options.imatrix is not None and options.imatrix_text is not None:
        raise UserError("--imatrix and --imatrix-text say the same thing twice: give one of them", param="imatrix")
    if options.imatrix_tokens is not None and options.imatrix_text is None:
        raise UserError("--imatrix-tokens is of --imatrix-text, which is not given", param="imatrix_tokens")
    for name in ("imatrix_tokens", "threads"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1", param=name)


def _importance(
    options: argparse.Namespace,
    config: ModelConfig,
    files: WeightFiles,
    description: Description,
    tokenizer: Tokenizer | None,
) -> Importance | None:
    from quire.models.gguf.importance import read_importance

    if options.imatrix is not None:
        found = read_importance(options.imatrix)
        if not found.keys() & description.shapes.keys():
            raise UserError(f"{options.imatrix}: it names no matrix of this model", param="imatrix")
        return found
    if options.imatrix_text is None:
        return None
    assert tokenizer is not None, "a text needs one"
    try:
        text = options.imatrix_text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {options.imatrix_text}: {error}", param="imatrix_text") from None
    token_ids = tokenizer.encode(text)[: options.imatrix_tokens or MOST_TOKENS]
    if not token_ids:
        raise UserError(f"{options.imatrix_text} holds no text", param="imatrix_text")
    return _watched(config, files, description.places, token_ids)


def _watched(
    config: ModelConfig, files: WeightFiles, places: Mapping[str, TensorPlace], token_ids: Sequence[int]
) -> Importance:
    from quire.models.gguf.importance import by_tensor
    from quire.utils.progress import ProgressBar, ProgressLog
    from quire.worker.watch_inputs import watch_inputs

    title = "importance matrix (tokens)"
    plain, log = replace(config, dtype="float32", kv_cache_dtype="float32"), ProgressLog(title, len(token_ids))
    with ProgressBar(title, len(token_ids)) as bar:

        def report(done: int, _total: int) -> None:
            bar.update(done)
            log.update(done)

        found = watch_inputs(plain, files, token_ids, report)
    return by_tensor(found, places)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
