"""Tokenizer classes that Transformers builds itself, whatever pipeline tokenizer.json describes.

Most use tokenizer.json unchanged (FROM_FILE), the others only its vocabulary and merges. Other classes are refused.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from quire.config.hf_json import Fields
from quire.errors import ModelLoadError

FROM_FILE = "TokenizersBackend"
"""Class that uses tokenizer.json unchanged."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" rf"|{_SPACES}"
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    rf"|{_SPACES}"
)
MISTRAL_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
Tokens = Mapping[str, str | None]
Build = Callable[[tokenizers.Tokenizer, Fields, Tokens], None]


@dataclass(frozen=True)
class TokenizerClass:
    """Recipe of a Transformers tokenizer class. model: kind of vocabulary. build: sets a tokenizer's pipeline, given
    the options and the named special tokens. tokens: default named special tokens. extra: further ones. own_tokens:
    special tokens with names of the class. template: tokens around a text: "file" (tokenizer.json's), "flags"
    (add_bos_token, by default `adds_bos`, and add_eos_token), or a function. special_again: add special tokens again at
    the end, "plain" (without stripping) or "same"."""

    model: str
    build: Build
    tokens: Tokens
    extra: tuple[str, ...] = ()
    own_tokens: Tokens = field(default_factory=dict)
    template: str | Callable[[tokenizers.Tokenizer, Fields, Tokens], processors.PostProcessor] = "file"
    adds_bos: bool = False
    special_again: Literal["", "plain", "same"] = ""


def _set_bpe(
    backend: tokenizers.Tokenizer, *, unknown: str | None = None, fuses: bool = False, byte_fallback: bool = False
) -> None:
    model = backend.model
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        raise ModelLoadError("its merges have a prefix or a suffix, and tokens of its tokenizer_class have none")
    model.unk_token, model.fuse_unk, model.byte_fallback = unknown, fuses, byte_fallback
    model.ignore_merges = False


def _byte_level(backend: tokenizers.Tokenizer, options: Fields, _: Tokens, *, nfc: bool = False) -> None:
    _set_bpe(backend)
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=options.boolean("add_prefix_space", False))
    backend.decoder = decoders.ByteLevel()


def _neox(backend: tokenizers.Tokenizer, options: Fields, tokens: Tokens) -> None:
    _byte_level(backend, options, tokens, nfc=True)


def _cohere(backend: tokenizers.Tokenizer, options: Fields, tokens: Tokens) -> None:
    _byte_level(backend, options, tokens, nfc=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])


def _split_by(pattern: str) -> Build:
    def build(backend: tokenizers.Tokenizer, options: Fields, _: Tokens) -> None:
        _set_bpe(backend)
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        space = options.boolean("add_prefix_space", False)
        letters = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
        backend.decoder = decoders.ByteLevel()

    return build


def _llama(backend: tokenizers.Tokenizer, options: Fields, _: Tokens) -> None:
    _set_bpe(backend, fuses=True, byte_fallback=True)
    space = options.boolean("add_prefix_space", True)
    scheme = "never" if not space else "always" if options.boolean("legacy", False) else "first"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    backend.decoder = _pieces_decoder(strips=space)


def _code_llama(backend: tokenizers.Tokenizer, options: Fields, tokens: Tokens) -> None:
    _set_bpe(backend, unknown=str(tokens["unk_token"]), fuses=True, byte_fallback=True)
    scheme = "first" if options.boolean("add_prefix_space", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    backend.decoder = _pieces_decoder(strips=True)


def _gemma(backend: tokenizers.Tokenizer, _: Fields, tokens: Tokens) -> None:
    _set_bpe(backend, unknown=str(tokens["unk_token"]), fuses=True, byte_fallback=True)
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = _pieces_decoder(strips=False)


def _pieces_decoder(*, strips: bool) -> decoders.Decoder:
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)


def _bert(backend: tokenizers.Tokenizer, options: Fields, tokens: Tokens) -> None:
    model = backend.model
    if model.continuing_subword_prefix != "##":
        raise ModelLoadError(f"its continuing_subword_prefix is {model.continuing_subword_prefix!r}, not '##'")
    model.unk_token, model.max_input_chars_per_word = str(tokens["unk_token"]), 100
    strips = options.boolean("strip_accents", False) if options.values.get("strip_accents") is not None else None
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=options.boolean("tokenize_chinese_chars", True),
        strip_accents=strips,
        lowercase=options.boolean("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")


def _xlm_roberta(backend: tokenizers.Tokenizer, options: Fields, _: Tokens) -> None:
    state = json.loads(backend.model.__getstate__())
    if state.get("unk_id") != 3 or state.get("byte_fallback"):
        vocabulary = [(piece, score) for piece, score in state["vocab"]]
        backend.model = models.Unigram(vocabulary, unk_id=3, byte_fallback=False)
    scheme = "always" if options.boolean("add_prefix_space", True) else "never"
    words = pre_tokenizers.WhitespaceSplit()
    spaces = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, spaces])
    backend.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)


def charsmap_of(normalizer: normalizers.Normalizer | None) -> normalizers.Normalizer | None:
    """Step with a character table, of a normalizer or its steps; None: none."""
    description = {} if normalizer is None else json.loads(normalizer.__getstate__())
    for step in description["normalizers"] if description.get("type") == "Sequence" else [description]:
        if step.get("type") == "Precompiled":
            return normalizers.Precompiled(base64.b64decode(step["precompiled_charsmap"]))
    return None


def _id_of(backend: tokenizers.Tokenizer, tokens: Tokens, name: str) -> tuple[str, int]:
    text = str(tokens.get(name))
    token_id = backend.token_to_id(text)
    if token_id is None:
        raise ModelLoadError(f"its {name} {text!r} is no token, and stands at the ends of each text")
    return text, token_id


def _bert_template(backend: tokenizers.Tokenizer, _: Fields, tokens: Tokens) -> processors.PostProcessor:
    start, end = (_id_of(backend, tokens, name) for name in ("cls_token", "sep_token"))
    single = f"{start[0]}:0 $A:0 {end[0]}:0"
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1 {end[0]}:1", special_tokens=[start, end])


def _roberta_template(backend: tokenizers.Tokenizer, options: Fields, tokens: Tokens) -> processors.PostProcessor:
    return processors.RobertaProcessing(
        _id_of(backend, tokens, "sep_token"),
        _id_of(backend, tokens, "cls_token"),
        options.boolean("trim_offsets", True),
        options.boolean("add_prefix_space", False),
    )


def _xlm_roberta_template(backend: tokenizers.Tokenizer, _: Fields, tokens: Tokens) -> processors.PostProcessor:
    start, end = (_id_of(backend, tokens, name) for name in ("bos_token", "eos_token"))
    single = [start[0], "$A", end[0]]
    return processors.TemplateProcessing(
        single=single, pair=[*single, end[0], "$B", end[0]], special_tokens=[start, end]
    )


_END = "<|endoftext|>"
_ENDS: Tokens = {"bos_token": _END, "eos_token": _END, "unk_token": _END}
_LLAMA_TOKENS: Tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_ROBERTA_TOKENS: Tokens = {
    **_LLAMA_TOKENS,
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
_QWEN_TOKENS: Tokens = {**_ENDS, "bos_token": None, "pad_token": _END}
_BERT_TOKENS: Tokens = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_INFILLING: Tokens = {
    "prefix_token": f"{_SPACE}<PRE>",
    "middle_token": f"{_SPACE}<MID>",
    "suffix_token": f"{_SPACE}<SUF>",
    "eot_token": f"{_SPACE}<EOT>",
    "fill_token": "<FILL_ME>",
}
_BERT = TokenizerClass("WordPiece", _bert, _BERT_TOKENS, template=_bert_template)
_ROBERTA = TokenizerClass("BPE", _byte_level, _ROBERTA_TOKENS, template=_roberta_template)
CLASSES: Mapping[str, TokenizerClass] = MappingProxyType(
    {
        "BertTokenizer": _BERT,
        "DistilBertTokenizer": _BERT,
        "LxmertTokenizer": _BERT,
        "MobileBertTokenizer": _BERT,
        "SqueezeBertTokenizer": _BERT,
        "RobertaTokenizer": _ROBERTA,
        "BartTokenizer": _ROBERTA,
        "LEDTokenizer": _ROBERTA,
        "MvpTokenizer": _ROBERTA,
        "XLMRobertaTokenizer": TokenizerClass("Unigram", _xlm_roberta, _ROBERTA_TOKENS, template=_xlm_roberta_template),
        "GPT2Tokenizer": TokenizerClass("BPE", _byte_level, {**_ENDS, "pad_token": None}),
        "CodeGenTokenizer": TokenizerClass("BPE", _byte_level, {**_ENDS, "pad_token": None}),
        "GPTNeoXTokenizer": TokenizerClass("BPE", _neox, {**_ENDS, "pad_token": "<|padding|>"}, template="flags"),
        "Qwen2Tokenizer": TokenizerClass("BPE", _split_by(_QWEN2), _QWEN_TOKENS, special_again="plain"),
        "Qwen3_5Tokenizer": TokenizerClass("BPE", _split_by(_QWEN35), _QWEN_TOKENS),
        "LlamaTokenizer": TokenizerClass("BPE", _llama, _LLAMA_TOKENS),
        "CodeLlamaTokenizer": TokenizerClass(
            "BPE",
            _code_llama,
            _LLAMA_TOKENS,
            extra=tuple(text for text in _INFILLING.values() if text is not None),
            own_tokens=_INFILLING,
            template="flags",
            adds_bos=True,
        ),
        "GemmaTokenizer": TokenizerClass(
            "BPE",
            _gemma,
            {
                "bos_token": "<bos>",
                "eos_token": "<eos>",
                "unk_token": "<unk>",
                "pad_token": "<pad>",
                "mask_token": "<mask>",
            },
        ),
        "CohereTokenizer": TokenizerClass(
            "BPE",
            _cohere,
            {
                "bos_token": "<BOS_TOKEN>",
                "eos_token": "<|END_OF_TURN_TOKEN|>",
                "unk_token": "<UNK>",
                "sep_token": "<SEP>",
                "pad_token": "<PAD>",
                "cls_token": "<CLS>",
                "mask_token": "<MASK_TOKEN>",
            },
            special_again="same",
        ),
    }
)
