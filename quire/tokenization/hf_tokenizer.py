"""Tokenizer of a Hugging Face directory, as Transformers builds it: by the class that the files name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from quire.config.hf_json import Fields, read_optional_json, shown
from quire.errors import ModelLoadError
from quire.tokenization.library_errors import refusing
from quire.tokenization.pipeline_checks import check_charsmaps
from quire.tokenization.special_tokens import ADDED_TOKENS_FILE, SpecialTokens, read_special_tokens
from quire.tokenization.tokenizer_classes import MISTRAL_PATTERN, TokenizerClass, charsmap_of
from quire.tokenization.tokenizer_names import AS_IT_IS, find_class
from quire.tokenization.vocabulary_limits import check_num_values, check_text_lengths, count_values
from quire.utils.model_files import file_bytes, read_model_file

MAX_TOKENIZER_BYTES = 2**26
"""Maximum size of tokenizer.json, vocab.json or merges.txt in bytes."""
FILE, VOCABULARY_FILE, MERGES_FILE = "tokenizer.json", "vocab.json", "merges.txt"
TRANSFORMERS_VERSION = (5, 23)
"""Release that decides between files for several releases."""
_MISTRALS = (None, "mistral", "mistral3", "voxtral", "ministral", "pixtral")
_MISTRAL_TOKENS = 100_000
"""Minimum size of the Mistral vocabularies with a wrong pattern."""
_VERSIONED = re.compile(r"tokenizer\.(.*)\.json")


class HFTokenizer(NamedTuple):
    """Tokenizer as built, for `load_tokenizer`. special: named special tokens. extra: special tokens without a name.
    cleans_up: decoding drops spaces before punctuation."""

    backend: tokenizers.Tokenizer
    special: dict[str, str]
    extra: list[str]
    cleans_up: bool


class Directory(NamedTuple):
    """Model directory. config, model: tokenizer_config.json and config.json. name: given by the user. limit: maximum
    values in a file."""

    path: Path
    name: str
    config: Mapping[str, Any]
    model: Mapping[str, Any]
    limit: int


def tokenizer_file(path: Path, config: Mapping[str, Any]) -> Path:
    """tokenizer.json, or the file that tokenizer_config.json names for this Transformers release."""
    listed = config.get("fast_tokenizer_files")
    found = FILE
    for name in sorted(listed) if isinstance(listed, list) and all(isinstance(each, str) for each in listed) else []:
        match = _VERSIONED.fullmatch(name)
        if match and re.fullmatch(r"\d+(\.\d+)*", match[1]):
            if tuple(map(int, match[1].split("."))) > TRANSFORMERS_VERSION:
                break
            found = name
    return path / found


def read_tokenizer_json(file: Path, directory: Directory) -> HFTokenizer:
    """Read a tokenizer.json. Raises ModelLoadError."""
    content = read_vocabulary(file, directory.limit)
    with refusing(file, "is not a readable tokenizer"):
        check_charsmaps(content)
        described = tokenizers.Tokenizer.from_buffer(content)
    with refusing(directory.path, "has a tokenizer that cannot be used"):
        kind = _class_of(directory, is_byte_level=b'"ByteLevel"' in content)
        special = read_special_tokens(directory.path, directory.config, kind, described)
        backend = described
        if kind is not None:
            if type(described.model).__name__ != kind.model:
                raise ModelLoadError(
                    f"its tokenizer_class takes a vocabulary of the kind {kind.model}, and tokenizer.json has "
                    f"{type(described.model).__name__}; {AS_IT_IS}"
                )
            backend = tokenizers.Tokenizer(described.model)
            backend.normalizer = charsmap_of(described.normalizer) if kind.model == "Unigram" else None
            if described.post_processor is not None:
                backend.post_processor = described.post_processor
            kind.build(backend, _options(directory), _tokens(kind, special))
        _set_certain(backend)
        special.add_to(backend, "" if kind is None else kind.special_again)
        _mend_splitting(backend, directory)
        if kind is not None:
            _set_template(backend, directory, kind, special, flags={})
        return _finished(backend, directory, special)


def read_vocabulary_and_merges(directory: Directory) -> HFTokenizer:
    """Read GPT-2's format (also OPT's): vocab.json and merges.txt. Raises ModelLoadError."""
    path, config = directory.path, directory.config
    for name in (VOCABULARY_FILE, MERGES_FILE):
        read_vocabulary(path / name, directory.limit)
    with refusing(path, "holds no tokenizer: vocab.json and merges.txt are not readable"):
        model = models.BPE.from_file(str(path / VOCABULARY_FILE), str(path / MERGES_FILE))
        backend = tokenizers.Tokenizer(model)
        kind = _class_of(directory, is_byte_level=True)
        special = read_special_tokens(path, config, kind, None)
        if kind is None:
            space = _options(directory).boolean("add_prefix_space", False)
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
            backend.decoder = decoders.ByteLevel()
        elif kind.model != "BPE":
            raise ModelLoadError(f"its tokenizer_class takes a vocabulary of the kind {kind.model}")
        else:
            kind.build(backend, _options(directory), _tokens(kind, special))
        _set_certain(backend)
        special.add_to(backend, "" if kind is None else kind.special_again)
        for text, token_id in read_optional_json(path / ADDED_TOKENS_FILE).items():
            if backend.token_to_id(text) != token_id:
                raise ModelLoadError(f"{path / ADDED_TOKENS_FILE}: {shown(text)} cannot have the id {shown(token_id)}")
        _set_template(backend, directory, kind, special, flags=config)
        return _finished(backend, directory, special)


def read_vocabulary(file: Path, limit: int) -> bytes:
    """Content of a vocabulary or merges file with at most `limit` values. Raises ModelLoadError."""
    content = read_model_file(file, MAX_TOKENIZER_BYTES)
    check_num_values(file, count_values(content, is_text=file.suffix == ".txt"), limit)
    check_text_lengths(file, content)
    return content


def is_there(file: Path) -> bool:
    return file_bytes(file) is not None


def with_bos_eos(
    backend: tokenizers.Tokenizer, special: Mapping[str, str], *, adds_bos: bool, adds_eos: bool
) -> processors.PostProcessor:
    """Post-processor that puts the beginning-of-sequence token before each text, also of a pair, and the
    end-of-sequence token after it."""
    used = {}
    for name, is_added in (("bos_token", adds_bos), ("eos_token", adds_eos)):
        text = special.get(name)
        token_id = None if text is None else backend.token_to_id(text)
        if is_added and text is not None and token_id is not None:
            used[name] = (text, token_id)
    parts = {}
    for kind, letter in enumerate("AB"):
        around = [f"${letter}:{kind}"]
        if "bos_token" in used:
            around.insert(0, f"{used['bos_token'][0]}:{kind}")
        if "eos_token" in used:
            around.append(f"{used['eos_token'][0]}:{kind}")
        parts[letter] = around
    return processors.TemplateProcessing(
        single=parts["A"], pair=[*parts["A"], *parts["B"]], special_tokens=list({*used.values()})
    )


def _class_of(directory: Directory, *, is_byte_level: bool) -> TokenizerClass | None:
    return find_class(directory.name, directory.config, directory.model, is_byte_level=is_byte_level)


def _options(directory: Directory) -> Fields:
    return Fields(directory.config, str(directory.path / "tokenizer_config.json"))


def _tokens(kind: TokenizerClass, special: SpecialTokens) -> dict[str, str | None]:
    return {**dict.fromkeys(kind.tokens), **special.texts}


def _set_certain(backend: tokenizers.Tokenizer) -> None:
    """Turn off BPE dropout: equal texts must have equal tokens."""
    model = backend.model
    if isinstance(model, models.BPE) and model.dropout:
        model.dropout = None


def _mend_splitting(backend: tokenizers.Tokenizer, directory: Directory) -> None:
    """Apply `fix_mistral_regex`, if set, to a wrong word pattern in tokenizer.json."""
    model, splitter = directory.model, backend.pre_tokenizer
    if not _options(directory).boolean("fix_mistral_regex", False) or splitter is None or not model:
        return
    release = re.match(r"\d+", str(model.get("transformers_version") or 0))
    is_old = release is not None and int(release[0]) < 5
    if not is_old or model.get("model_type") not in _MISTRALS or backend.get_vocab_size() <= _MISTRAL_TOKENS:
        return
    split = pre_tokenizers.Split(tokenizers.Regex(MISTRAL_PATTERN), behavior="isolated")
    if isinstance(splitter, pre_tokenizers.Sequence):
        splitter[0] = split
        return
    if isinstance(splitter, pre_tokenizers.Metaspace):
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, splitter])


def _set_template(
    backend: tokenizers.Tokenizer,
    directory: Directory,
    kind: TokenizerClass | None,
    special: SpecialTokens,
    *,
    flags: Mapping[str, Any],
) -> None:
    """Set the tokens around a text. flags: config in which add_bos_token and add_eos_token count."""
    template = "file" if kind is None else kind.template
    if not isinstance(template, str):
        assert kind is not None, "only a class has a template of its own"
        backend.post_processor = template(backend, _options(directory), _tokens(kind, special))
    elif template == "flags" or backend.post_processor is None:
        stated = Fields(flags, str(directory.path / "tokenizer_config.json"))
        backend.post_processor = with_bos_eos(
            backend,
            special.texts,
            adds_bos=stated.boolean("add_bos_token", kind is not None and kind.adds_bos),
            adds_eos=stated.boolean("add_eos_token", False),
        )


def _finished(backend: tokenizers.Tokenizer, directory: Directory, special: SpecialTokens) -> HFTokenizer:
    options = _options(directory)
    backend.encode_special_tokens = options.boolean("split_special_tokens", False)
    forced = options.boolean("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    cleans_up = options.boolean("clean_up_tokenization_spaces", False)
    is_bpe = isinstance(backend.model, models.BPE)
    extra = [token if isinstance(token, str) else str(token.content) for token in special.extra]
    return HFTokenizer(backend, special.texts, extra, cleans_up and (forced or not is_bpe))
