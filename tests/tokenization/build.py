"""Small tokenizers of every kind of decoder, built in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.trainers import BpeTrainer

from quire.tokenization.chat_template import MAX_CHARACTERS, ChatTemplate
from quire.tokenization.conversation import conversation_of
from quire.tokenization.tokenizer import Tokenizer

CORPUS = [
    "def parse(self, text):\n    return [word for word in text.split() if word]\n",
    "The quick brown fox jumps over the lazy dog, then the dog sleeps.\n\n",
    "Größe über Äpfel, naïve café, 日本語のテキスト, привет мир, 🦙🦙 emoji 👩‍👩‍👧\n",
] * 3
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_level_backend() -> Backend:
    """GPT-2's kind: every token is a string of bytes. Ids: <s> 0, </s> 1, <|im_start|> 2, then the vocabulary."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<|im_start|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["日本", " spaced out"])
    return backend


def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend(), special_tokens=SPECIAL)


def sentencepiece_backend(*, strip: bool = True) -> Backend:
    """LLaMA 2's kind: words begin with U+2581, unknown characters fall back to byte tokens, <0x0A> is newline."""
    words = ["▁", "▁the", "the", "▁a", "a", "b", "c", "▁b", "é", "▁é", "fox", "▁fox", ",", ".", "日"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Backend(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_backend(), special_tokens=SPECIAL)


def sentencepiece_unstripped() -> Tokenizer:
    return Tokenizer(sentencepiece_backend(strip=False), special_tokens=SPECIAL)


def with_decoder(decoder: decoders.Decoder | None, pieces: list[str]) -> Tokenizer:
    """A tokenizer of whole words with the given decoder; "[CLS]" (id 0) is special."""
    vocabulary = {piece: number for number, piece in enumerate(["[CLS]", *pieces])}
    backend = Backend(models.WordLevel(vocab=vocabulary, unk_token="[CLS]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("[CLS]", special=True)])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend)


def wordpiece() -> Tokenizer:
    pieces = ["the", "fox", "##es", "do", "n't", "##n't", ".", ",", "##.", "##", "é", "##日", "'", "s", "!"]
    return with_decoder(decoders.WordPiece(), pieces)


def metaspace() -> Tokenizer:
    return with_decoder(decoders.Metaspace(), ["▁the", "▁", "fox", "▁▁x", "é▁", "日", "a"])


def undecoded() -> Tokenizer:
    """No decoder: tokens are joined by spaces."""
    return with_decoder(None, ["the", "fox", "é", "日", "."])


def suffixed() -> Tokenizer:
    """Word ends are marked, and the mark of the last word is no space: only whole sequences can be decoded."""
    return with_decoder(decoders.BPEDecoder("</w>"), ["the</w>", "fo", "x</w>", "é", "日</w>", "a"])


def mixed() -> Tokenizer:
    """Byte level inside a sequence with another step: decoded by whole sequences."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    return with_decoder(decoders.Sequence([decoders.Replace("!", "?"), decoders.ByteLevel()]), pieces)


BUILDERS = {
    builder.__name__: builder
    for builder in (
        byte_level,
        sentencepiece,
        sentencepiece_unstripped,
        wordpiece,
        metaspace,
        undecoded,
        suffixed,
        mixed,
    )
}


def written(
    chat: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_characters: int = MAX_CHARACTERS,
    options: dict[str, Any] | None = None,
    **fields: Any,
) -> str:
    """A conversation as a template writes it. options: its variables; fields: others of a Conversation."""
    conversation = conversation_of(messages, chat_template_kwargs=options, **fields)
    return chat.write(chat.prepare(conversation, max_characters)).text
