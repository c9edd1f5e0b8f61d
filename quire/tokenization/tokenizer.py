"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers

from quire.config.eagle import with_verifier
from quire.config.hf_config import find_model
from quire.config.hf_json import read_optional_json, shown
from quire.config.options import EngineOptions
from quire.errors import InternalError, ModelLoadError, UserError, panics_are_errors
from quire.tokenization.chat_template_files import read_chat_templates, read_template
from quire.tokenization.detokenizer import IncrementalDetokenizer, decode_tokens
from quire.tokenization.gguf import KNOWN_PATTERNS, read_gguf_tokenizer
from quire.tokenization.hf_tokenizer import (
    MERGES_FILE,
    VOCABULARY_FILE,
    Directory,
    HFTokenizer,
    is_there,
    read_tokenizer_json,
    read_vocabulary,
    read_vocabulary_and_merges,
    tokenizer_file,
    with_bos_eos,
)
from quire.tokenization.library_errors import first_line, refusing
from quire.tokenization.pieces import REPLACEMENT, LocalPieces, compile_pieces
from quire.tokenization.pipeline_checks import check_growth, check_word_length, other_patterns
from quire.tokenization.ranked_bpe import added_tokens, read_tekken, read_tiktoken
from quire.tokenization.sentencepiece import (
    BPE,
    SentencePieces,
    TextPreparation,
    read_sentencepiece,
    sentencepiece_backend,
    special_pieces,
)
from quire.tokenization.special_tokens import SPECIAL_NAMES, SPECIAL_TOKENS_FILE
from quire.tokenization.vocabulary_limits import check_num_values, max_values
from quire.utils.garbage import without_collections
from quire.utils.gguf import GGUFFile, find_gguf
from quire.utils.model_files import read_model_file

MAX_TOKEN_ID = 2**24
MAX_SENTENCEPIECE_BYTES = 2**24
TEKKEN_FILE, TIKTOKEN_FILE = "tekken.json", "tiktoken.model"
OTHER_FILES = (TEKKEN_FILE, TIKTOKEN_FILE, "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Files of a directory without tokenizer.json: Mistral's, Kimi's, and sentencepiece's."""
PATTERN_LIMITS = ("retry-limit-in-match", "retry-limit-in-search", "match-stack limit")
"""Words in the library's panics when a pattern backtracks too long."""
SPACES_LEFT_OUT = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)
SAMPLE = "The quick brown fox, 42 naïve cafés; \n\tdef f(x): return x"


class Tokenizer:
    """Loaded tokenizer. Thread-safe; long encodings release the GIL except for the list of ids. special_tokens: name
    ("bos_token", "eos_token" ...) -> text. chat_templates: name -> Jinja source; "default" is the usual one. pieces:
    sentencepiece model, whose texts are prepared here. extra_special_tokens: texts of special tokens without a name.
    cleans_up: `decode` drops spaces before punctuation."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        name: str = "tokenizer",
        pieces: SentencePieces | None = None,
        extra_special_tokens: Sequence[str] = (),
        cleans_up: bool = False,
    ) -> None:
        # A tokenizer.json may carry its training's truncation; prompts are never cut silently.
        backend.no_truncation()
        backend.no_padding()
        self.name = name
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.extra_special_tokens = tuple(extra_special_tokens)
        self._cleans_up = cleans_up
        self.chat_templates = dict(chat_templates or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        special = [token.content for token in added.values() if token.special]
        self._prepare = None if pieces is None else TextPreparation(pieces, special)
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added), 0)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.padding_token_id = self._special_id("pad_token")
        self.pieces = compile_pieces(backend)
        self.has_own_patterns = bool(other_patterns(backend, KNOWN_PATTERNS))
        """True if its files have regular expressions of unknown cost."""
        self._texts: dict[int, str] = {}
        self.encode_elsewhere: Callable[[str, bool], list[int]] | None = None
        """Function that encodes texts longer than `inline_characters` in another process; servers set both."""
        self.inline_characters = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises UserError for invalid Unicode (lone surrogates)."""
        if self.encode_elsewhere is not None and len(text) > self.inline_characters:
            check_unicode(text)
            return self.encode_elsewhere(text, add_special_tokens)
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encode several texts on several cores."""
        # The batch call, even for one text: it releases the GIL and computes no offsets.
        return [each.ids for each in self.encodings(texts, add_special_tokens)]

    def beginnings(self, texts: list[str], max_tokens: int) -> list[str]:

        def cut(text: str, found: tokenizers.Encoding) -> str:
            if len(found.ids) <= max_tokens:
                return text
            if self._prepare is not None:  # offsets refer to the prepared text
                return self.decode(found.ids[:max_tokens], skip_special_tokens=False)
            return text[: found.offsets[max_tokens - 1][1]]

        # Read as much of each text as usually has enough tokens, and more of those that have fewer. The tokens behind
        # the cut keep the end of what was read from changing those before it.
        enough = max_tokens + 64
        size, found, left = 8 * enough, list(texts), list(range(len(texts)))
        while left:
            begun = [texts[index][:size] for index in left]
            encodings = self.encodings(begun, add_special_tokens=False, with_offsets=True)
            read, left = zip(left, encodings, strict=True), []
            for index, encoding in read:
                if len(texts[index]) > size and len(encoding.ids) < enough:
                    left.append(index)
                else:
                    found[index] = cut(texts[index], encoding)
            size *= 4
        return found

    def encodings(
        self, texts: list[str], add_special_tokens: bool, *, with_offsets: bool = False
    ) -> list[tokenizers.Encoding]:
        """Encode to the library's objects, see `encode_batch`. with_offsets: include each token's place in the text."""
        for text in texts:
            check_unicode(text)
        try:
            with panics_are_errors("the tokenizer"):
                encode = self.backend.encode_batch if with_offsets else self.backend.encode_batch_fast
                found: list[tokenizers.Encoding] = encode(
                    texts if self._prepare is None else [self._prepare(text) for text in texts],
                    is_pretokenized=self._prepare is not None,
                    add_special_tokens=add_special_tokens,
                )
        except InternalError as error:
            if any(limit in str(error) for limit in PATTERN_LIMITS):
                raise UserError(
                    "the tokenizer cannot split the text into words: its pattern takes too many attempts"
                ) from None
            raise
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"the tokenizer cannot encode the text: {first_line(error)}") from None
        return found

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole token sequence, equal to its streamed text.

        It differs from the library for byte tokens that are not valid UTF-8: only invalid bytes become U+FFFD. Unknown
        ids have no text.
        """
        with panics_are_errors("the tokenizer"):
            text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        if REPLACEMENT in text and isinstance(self.pieces, LocalPieces):
            text = decode_tokens(self.pieces, token_ids, self._skipped(skip_special_tokens))
        return _cleaned(text) if self._cleans_up else text

    def detokenizer(
        self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.pieces, self._skipped(skip_special_tokens), prompt_token_ids)

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a text, with its leading space; U+FFFD for incomplete characters."""
        text = self._texts.get(token_id)
        if text is None:
            with panics_are_errors("the tokenizer"):
                text = self._texts[token_id] = self.pieces.token_text(token_id)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token inside a text, perhaps part of a character."""
        with panics_are_errors("the tokenizer"):
            return self.pieces.token_bytes(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Id of a vocabulary entry by exact name; None: no entry."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def ends(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens that end a text: the model's and the tokenizer's end-of-sequence token. token_ids: from
        generation_config.json or config.json."""
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        return list(dict.fromkeys((*token_ids, *own)))

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def _skipped(self, skip_special_tokens: bool) -> frozenset[int]:
        return self.special_ids if skip_special_tokens else frozenset()

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)


def _cleaned(text: str) -> str:
    for written, read in SPACES_LEFT_OUT:
        text = text.replace(written, read)
    return text


def check_unicode(text: str, *, param: str | None = None) -> None:
    """Raise UserError if `text` has lone surrogates, which no encoding can express."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{param or 'the text'} is not valid Unicode: lone surrogate at position {error.start}", param=param
        ) from None


def load_tokenizer(
    path_or_id: str | Path,
    revision: str | None = None,
    *,
    vocab_size: int | None = None,
    download_dir: str | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """Load the tokenizer of a directory, a GGUF file, a hub id or "bundled". Raises ModelLoadError. vocab_size: the
    model's; it limits the tokenizer's entries. download_dir: folder for downloads; None: the hub library's cache.
    chat_template: file or text of a template instead of the model's."""
    limit = max_values(vocab_size)
    path = find_model(str(path_or_id), revision=revision, config_only=True, download_dir=download_dir)
    config = read_optional_json(path / "tokenizer_config.json")
    directory = Directory(path, str(path_or_id), config, read_optional_json(path / "config.json"), limit)
    pieces: SentencePieces | None = None
    if is_there(file := tokenizer_file(path, config)):
        found = read_tokenizer_json(file, directory)
    elif is_there(path / VOCABULARY_FILE) and is_there(path / MERGES_FILE):
        found = read_vocabulary_and_merges(directory)
    elif (name := next((name for name in OTHER_FILES if is_there(path / name)), None)) is not None:
        backend, own, pieces = _read_other(path / name, config, limit)
        found, config = _with_flags(path, backend, own, config)
    elif (gguf := path if path.is_file() else find_gguf(path)) is not None:
        refused = refusing(gguf, "holds a tokenizer that cannot be used")
        with GGUFFile(gguf) as opened, refused, without_collections():
            backend, own, pieces = read_gguf_tokenizer(opened, limit)
        found, config = _with_flags(path, backend, own, config)
    else:
        raise ModelLoadError(
            f"{path} has no tokenizer (looked for tokenizer.json, vocab.json with merges.txt, *.gguf, "
            f"{', '.join(OTHER_FILES)}); name one with the option tokenizer, or set skip_tokenizer_init to work on "
            "token ids"
        )
    templates = (
        read_chat_templates(path, config) if chat_template is None else {"default": read_template(chat_template)}
    )
    with refusing(path, "has a tokenizer that cannot be used"):
        check_growth(found.backend)
        check_word_length(found.backend)
        tokenizer = Tokenizer(
            found.backend,
            special_tokens=found.special,
            extra_special_tokens=found.extra,
            chat_templates=templates,
            name=str(path_or_id),
            pieces=pieces,
            cleans_up=found.cleans_up,
        )
        # Some mistakes show only when text is encoded and decoded: better here than in every request.
        with suppress(UserError):  # a vocabulary without an unknown token
            tokenizer.decode(tokenizer.encode(SAMPLE))
    if tokenizer.vocab_size > MAX_TOKEN_ID:
        raise ModelLoadError(f"{path}: the tokenizer has the id {tokenizer.vocab_size - 1}, more than {MAX_TOKEN_ID}")
    return tokenizer


def _read_other(
    file: Path, config: dict[str, Any], limit: int
) -> tuple[tokenizers.Tokenizer, dict[str, Any], SentencePieces | None]:
    if file.name == TEKKEN_FILE:
        content = read_vocabulary(file, limit)
        with refusing(file, "is not a readable tokenizer"):
            return *read_tekken(json.loads(content), file), None
    content = read_model_file(file, MAX_SENTENCEPIECE_BYTES)
    with refusing(file, "is not a readable tokenizer"):
        if file.name == TIKTOKEN_FILE:
            check_num_values(file, 2 * content.count(b"\n"), limit)
            return read_tiktoken(content, file, config), {"add_bos_token": False}, None
        model = read_sentencepiece(content, file)
        check_num_values(file, 2 * len(model.pieces), limit)
        backend = sentencepiece_backend(model)
        for token_id, text in sorted(added_tokens(config, file).items()):
            backend.add_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
            if backend.token_to_id(text) != token_id:
                raise ModelLoadError(f"{file}: {shown(text)} cannot have the id {token_id} of added_tokens_decoder")
        own = {"add_bos_token": model.model == BPE, "add_eos_token": model.model != BPE}
        return backend, special_pieces(model) | own, model


def _with_flags(
    path: Path, backend: tokenizers.Tokenizer, own: dict[str, Any], config: dict[str, Any]
) -> tuple[HFTokenizer, dict[str, Any]]:
    """Add a post-processor by `add_bos_token` and `add_eos_token`. own: the files' equivalent of tokenizer_config.json.
    Also returns the merged config."""
    stated = own | config
    named = stated | read_optional_json(path / SPECIAL_TOKENS_FILE)
    entries = {name: named.get(name) for name in SPECIAL_NAMES}
    texts = {name: each.get("content") if isinstance(each, dict) else each for name, each in entries.items()}
    special = {name: text for name, text in texts.items() if isinstance(text, str)}
    flags = {name: bool(stated.get(f"{name}_token")) for name in ("add_bos", "add_eos")}
    with refusing(path, "has a tokenizer that cannot be used"):
        backend.post_processor = with_bos_eos(backend, special, adds_bos=flags["add_bos"], adds_eos=flags["add_eos"])
    return HFTokenizer(backend, special, [], False), stated


def open_tokenizer(options: EngineOptions, vocab_size: int) -> Tokenizer | None:
    if options.skip_tokenizer_init:
        return None
    name = options.tokenizer
    is_own = name is None or name == options.model
    if is_own:
        options = with_verifier(options)
    return load_tokenizer(
        options.model if name is None or is_own else name,
        options.tokenizer_revision or (options.revision if is_own else None),
        vocab_size=vocab_size,
        download_dir=options.download_dir,
        chat_template=options.chat_template,
    )
