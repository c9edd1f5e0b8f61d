"""Directories of tokenizers drawn at random: every kind of vocabulary, class, post-processor and file that says which
tokens are special. What each means is what Transformers makes of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from tests.tokenization.build import CORPUS
from tests.tokenization.reference_pieces import charsmap

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MARKS = ("<s>", "</s>", "<unk>", "<pad>", "[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]", "<mask>", "<|im_end|>")
TEXTS = (
    "",
    " ",
    "the",
    " the fox",
    "The quick brown fox, 42 naïve cafés!",
    "  two  spaces \n\n and\ttabs \r\n",
    "don't I'M we'Ve 1234567 日本語 🦙 ＦＵＬＬ ﬁ",
    "a<s>b </s> c<|im_end|> [MASK]d <mask> <unk> <image>e<|x|>  <|y|>f",
    "e\N{COMBINING ACUTE ACCENT}\N{COMBINING DIAERESIS} Ünïcode ẞ \x00 \u200b",
    "Hello . , ! ? do n't it 's we 've ' x",
    "thefox" * 300,
    "日" * 400 + " " * 600 + "a" * 101,
    "<s>" * 50 + "fox" * 200 + "<|x|> " * 50,
)
PAIRS = (("the fox", "a dog"), (" x", "the<s> y "), ("the", ""))
CLASSES: Mapping[str, tuple[str, ...]] = {
    "bytes": (
        *("GPT2Tokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer"),
        *("RobertaTokenizer", "CodeGenTokenizer", "LlamaTokenizer", "BartTokenizer"),
    ),
    "pieces": ("LlamaTokenizer", "GemmaTokenizer", "CodeLlamaTokenizer"),
    "unigram": ("XLMRobertaTokenizer",),
    "words": ("BertTokenizer", "DistilBertTokenizer"),
}
OTHER_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer", "TheirOwnTokenizer")
TYPES = (None, None, "llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "mistral", "gemma2", "cohere", "phi3", "bert")
MORE_TYPES = (
    "roberta",
    "xlm-roberta",
    "opt",
    "olmo2",
    "starcoder2",
    "granite",
    "qwen3_5",
    "their_own_type",
    "modernbert",
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{{ image_token }}{{ pad_token }}"
)


@dataclass
class Drawn:
    """files: name -> content, a text or what JSON is written of."""

    files: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        for name, content in self.files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            (path / name).write_text(text, encoding="utf-8", newline="")


def draw(number: int) -> Drawn:
    """The directory of this number."""
    rng = random.Random(number)
    kind = rng.choice(("bytes", "bytes", "pieces", "unigram", "words"))
    backend = _BACKENDS[kind](rng)
    present = [token.content for token in backend.get_added_tokens_decoder().values()]
    if rng.random() < 0.7:
        backend.post_processor = _post_processor(rng, backend, present)
    if rng.random() < 0.1:
        backend.enable_truncation(4, direction=rng.choice(("left", "right")))
    if rng.random() < 0.15:
        backend.enable_padding(length=12, pad_token=rng.choice(present), direction=rng.choice(("left", "right")))
    drawn = Drawn()
    config: dict[str, Any] = {}
    name = rng.choice(OTHER_CLASSES if rng.random() < 0.35 else CLASSES[kind])
    if name is not None:
        suffix = "Fast" if name.endswith("Tokenizer") and rng.random() < 0.4 else ""
        config["tokenizer_class"] = name + suffix
    _options(rng, config)
    _special_tokens(rng, config, drawn.files, present)
    _templates(rng, config, drawn.files)
    if rng.random() < 0.1:
        config["auto_map"] = {"AutoTokenizer": [None, "code.TheirTokenizer"]} if name != "TheirOwnTokenizer" else {}
    model = _model(rng)
    if model is not None:
        drawn.files["config.json"] = model
    if kind == "bytes" and name in ("GPT2Tokenizer", "Qwen2Tokenizer") and model is None and rng.random() < 0.3:
        content = json.loads(backend.to_str())["model"]
        drawn.files["vocab.json"] = content["vocab"]
        drawn.files["merges.txt"] = "#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in content["merges"])
    else:
        drawn.files["tokenizer.json"] = _written(rng, backend)
    if config or rng.random() < 0.5:
        drawn.files["tokenizer_config.json"] = config
    return drawn


def plain(kind: str, config: Mapping[str, Any]) -> Drawn:
    """A directory of one kind of vocabulary, with this tokenizer_config.json."""
    backend = _BACKENDS[kind](random.Random(3))
    backend.add_special_tokens([text for text in MARKS if backend.token_to_id(text) is None])
    return Drawn({"tokenizer.json": backend.to_str(), "tokenizer_config.json": dict(config)})


def _written(rng: random.Random, backend: Tokenizer) -> str:
    """As new releases of the library write it, or older ones."""
    content = json.loads(backend.to_str())
    if content["model"]["type"] == "BPE" and rng.random() < 0.3:
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    if rng.random() < 0.2:
        del content["truncation"], content["padding"]
    return json.dumps(content, ensure_ascii=rng.random() < 0.5)


def _added(rng: random.Random, backend: Tokenizer) -> Tokenizer:
    """With special tokens and others behind the vocabulary, or names for some of it."""
    for text in rng.sample(MARKS, rng.randrange(3, len(MARKS))):
        backend.add_special_tokens([AddedToken(text, special=True, lstrip=rng.random() < 0.1)])
    more = [("<image>", True), ("<|x|>", False), ("fox", False)]
    for text, special in rng.sample(more, rng.randrange(len(more))):
        strips = rng.random() < 0.3
        backend.add_tokens([AddedToken(text, special=special, rstrip=strips, single_word=rng.random() < 0.3)])
    return backend


def _bytes(rng: random.Random) -> Tokenizer:
    backend = Tokenizer(models.BPE(ignore_merges=rng.random() < 0.2))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=rng.choice((290, 330)),
        special_tokens=rng.sample(("<s>", "</s>", "<|endoftext|>"), 2),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if rng.random() < 0.5:
        split = pre_tokenizers.Split(Regex(rng.choice((r"\p{N}{1,3}", r"\s+", r" ?\p{L}+"))), behavior="isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < 0.5, use_regex=rng.random() < 0.5)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    if rng.random() < 0.4:
        backend.normalizer = rng.choice((normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase()))
    backend.decoder = decoders.ByteLevel()
    return _added(rng, backend)


def _piece_vocabulary(rng: random.Random) -> list[str]:
    words = [SPACE, f"{SPACE}the", "the", f"{SPACE}a", "a", "b", "c", "x", "y", "é", f"{SPACE}fox", ",", ".", "日"]
    letters = [letter for letter in "defghijklmnopqrstuvwz" if rng.random() < 0.8]
    return ["<s>", "<pad>", "</s>", "<unk>", *words, *letters, "th", "he", "fo", "ox"]


def _pieces(rng: random.Random) -> Tokenizer:
    vocabulary = [*_piece_vocabulary(rng), *(f"<0x{byte:02X}>" for byte in range(256)), "fox"]
    merges = [("t", "h"), ("th", "e"), ("h", "e"), (SPACE, "the"), ("f", "o"), ("o", "x"), ("fo", "x")]
    merges = [pair for pair in merges if "".join(pair) in vocabulary and all(part in vocabulary for part in pair)]
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    backend = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if rng.random() < 0.5:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=rng.choice(("first", "always", "never")))
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if rng.random() < 0.5 else steps)
    return _added(rng, backend)


def _unigram(rng: random.Random) -> Tokenizer:
    vocabulary = _piece_vocabulary(rng)
    if rng.random() < 0.3:
        vocabulary[3], vocabulary[0] = vocabulary[0], vocabulary[3]
    scores = [(piece, -1.0 - number * 7919 % 101 / 9.0) for number, piece in enumerate(vocabulary)]
    backend = Tokenizer(models.Unigram(scores, unk_id=vocabulary.index("<unk>")))
    if rng.random() < 0.5:
        table = charsmap({"Ｆ": "F", "ﬁ": "fi", "\t": " ", "\n": " "})
        steps = [normalizers.Precompiled(table), normalizers.Replace(Regex(" {2,}"), " ")]
        backend.normalizer = normalizers.Sequence(steps) if rng.random() < 0.5 else steps[0]
    spaces = pre_tokenizers.Metaspace(prepend_scheme=rng.choice(("first", "always")))
    words = pre_tokenizers.WhitespaceSplit()
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, spaces]) if rng.random() < 0.5 else spaces
    backend.decoder = decoders.Metaspace()
    return _added(rng, backend)


def _words(rng: random.Random) -> Tokenizer:
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = "abcdefghijklmnopqrstuvwxyzTHü,.!?'"
    vocabulary = [*marks, *letters, *(f"##{letter}" for letter in letters), "the", "fox", "##ox", "qui", "##ck", "日"]
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    backend = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=rng.choice((8, 100))))
    if rng.random() < 0.7:
        backend.normalizer = normalizers.BertNormalizer(lowercase=rng.random() < 0.5)
    backend.pre_tokenizer = rng.choice((pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Whitespace()))
    backend.decoder = decoders.WordPiece(cleanup=rng.random() < 0.5)
    return _added(rng, backend)


_BACKENDS: Mapping[str, Callable[[random.Random], Tokenizer]] = {
    "bytes": _bytes,
    "pieces": _pieces,
    "unigram": _unigram,
    "words": _words,
}


def _post_processor(rng: random.Random, backend: Tokenizer, present: list[str]) -> processors.PostProcessor:
    start, end = ((text, backend.token_to_id(text)) for text in rng.choices(present, k=2))
    single = rng.choice(("{0} $A {1}", "{0} $A", "$A {1}", "$A:0", "{0} $A {1} {1}")).format(start[0], end[0])
    pair = rng.choice((f"{single} $B:1 {end[0]}:1", "$A $B:1", f"$A {start[0]}:1 $B:1"))
    template = processors.TemplateProcessing(
        single=single, special_tokens=list({start, end}), **({"pair": pair} if rng.random() < 0.7 else {})
    )
    plain = processors.ByteLevel(trim_offsets=rng.random() < 0.5)
    return rng.choice(
        (
            template,
            template,
            processors.BertProcessing(end, start),
            processors.RobertaProcessing(end, start),
            plain,
            processors.Sequence([plain, template]),
        )
    )


def _options(rng: random.Random, config: dict[str, Any]) -> None:
    """Each option stands in some of the directories."""
    choices: Mapping[str, tuple[Any, ...]] = {
        "add_bos_token": (True, False),
        "add_eos_token": (True, False),
        "add_prefix_space": (True, False),
        "legacy": (True, False),
        "do_lower_case": (True, False),
        "strip_accents": (True, False, None),
        "tokenize_chinese_chars": (True, False),
        "split_special_tokens": (True, False),
        "clean_up_tokenization_spaces": (True, False),
        "model_max_length": (512, 10**30),
        "padding_side": ("left", "right"),
    }
    for name, values in choices.items():
        if rng.random() < 0.25:
            config[name] = rng.choice(values)


def _special_tokens(rng: random.Random, config: dict[str, Any], files: dict[str, Any], present: list[str]) -> None:
    texts = [*present, *MARKS, "<image>", "<|x|>", "<|y|>", "<|new|>"]

    def entry(text: str, *, legacy: bool = False) -> Any:
        described = {key: rng.random() < 0.2 for key in ("lstrip", "rstrip", "single_word", "normalized")}
        if rng.random() < 0.6:
            return text
        return {"content": text, **described} | ({} if legacy else {"__type": "AddedToken", "special": True})

    def named(*, legacy: bool = False) -> dict[str, Any]:
        found = {name: entry(rng.choice(texts), legacy=legacy) for name in NAMES if rng.random() < 0.35}
        found |= {name: None for name in NAMES if rng.random() < 0.05}
        return found

    config |= named()
    if rng.random() < 0.2:
        config["image_token"] = rng.choice(("<image>", "<|y|>"))
    extra = rng.random()
    if extra < 0.15:
        config["extra_special_tokens"] = [entry(text) for text in rng.sample(texts, 2)]
    elif extra < 0.3:
        config["extra_special_tokens"] = {"image_token": "<image>", "audio_token": rng.choice(texts)}
    if rng.random() < 0.25:
        config["additional_special_tokens"] = [entry(text) for text in rng.sample(texts, 2)]
    if rng.random() < 0.35:
        listed = {}
        for number, text in enumerate(dict.fromkeys(rng.sample(texts, 4))):
            described = {
                key: rng.random() < 0.3 for key in ("lstrip", "rstrip", "single_word", "normalized", "special")
            }
            listed[str(rng.choice((number, 400 + number)))] = {"content": text, **described}
        config["added_tokens_decoder"] = listed
    if rng.random() < 0.4:
        map_file = named(legacy=True)
        if rng.random() < 0.4:
            map_file["additional_special_tokens"] = rng.sample(texts, 2)
        if rng.random() < 0.3:
            map_file["extra_special_tokens"] = rng.choice((["<|y|>", "<s>"], {"video_token": "<|y|>"}))
        if rng.random() < 0.3:
            map_file["image_token"] = "<image>"
        files["special_tokens_map.json"] = map_file
    if rng.random() < 0.25:
        older = rng.sample(("<|old|>", "<|y|>", "<|im_end|>", "fox"), 2)
        files["added_tokens.json"] = {text: 500 + number for number, text in enumerate(older)}
    if rng.random() < 0.1:
        config["model_specific_special_tokens"] = {"audio_token": rng.choice(texts)}


def _templates(rng: random.Random, config: dict[str, Any], files: dict[str, Any]) -> None:
    def template(mark: str) -> str:
        return mark + TEMPLATE

    if rng.random() < 0.6:
        config["chat_template"] = rng.choice(
            (
                template("config "),
                [{"name": name, "template": template(name)} for name in ("default", "tool_use", "rag")],
                {"default": template("named "), "tool_use": template("named tools ")},
                [{"name": "default", "template": template("alone ")}],
            )
        )
    if rng.random() < 0.4:
        files["chat_template.jinja"] = template("file\r\n") + rng.choice(("", "\n", "\n\n"))
    if rng.random() < 0.3:
        for name in rng.sample(("tool_use", "rag", "default"), 2):
            files[f"additional_chat_templates/{name}.jinja"] = template(f"{name} of the folder ")


def _model(rng: random.Random) -> dict[str, Any] | None:
    kind = rng.choice((*TYPES, *MORE_TYPES))
    if kind is None:
        return None
    model: dict[str, Any] = {"model_type": kind}
    if rng.random() < 0.15:
        model["tokenizer_class"] = rng.choice(("GPT2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"))
    return model
