"""Train the byte-level BPE tokenizer on the training files and write it as a Hugging Face tokenizer.

The text is first cut into pieces that no token crosses. The cut is made for Python: the indentation of a
line is a piece of its own, and line ends close the piece before them, so a prompt that stops after a line
end, or after a line's indentation, is cut just as the training text was.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from corpus import split_corpus
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

PIECE_PATTERN = "|".join(
    (
        r"(?<=\n)[ \t]+",  # indentation
        r" ?[^\s\p{L}\p{N}_]?[\p{L}_]+",  # a word, with a space and one sign before it
        r" ?\p{N}{1,3}",  # up to three digits
        r" ?[^\s\p{L}\p{N}_]+[\r\n]*",  # signs, with the line ends after them
        r"\s*[\r\n]+",  # line ends
        r"\s+(?!\S)",  # spaces, less the one that belongs to the next piece
        r"\s+",
    )
)

CHAT_TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")


def train(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer learnt from ``texts``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = lead_with_end_of_text(tokenizer)
    return tokenizer


def lead_with_end_of_text(tokenizer: Tokenizer) -> processors.PostProcessor:
    """Put the document separator before a text, as it stood before every file in training."""
    return processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON with a final line end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write ``tokenizer`` in the files that Transformers' ``AutoTokenizer`` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    roles = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **roles,
            "added_tokens_decoder": added,
            "additional_special_tokens": [TURN_START, TURN_END],
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            "chat_template": CHAT_TEMPLATE_FILE.read_text(encoding="utf-8"),
        },
    )
    write_json(
        directory / "special_tokens_map.json",
        {**roles, "additional_special_tokens": [TURN_START, TURN_END]},
    )


def main() -> None:
    """Train a tokenizer on the training files and report how far it shortens the held-out ones."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("output", type=Path, help="directory to write the tokenizer's files to")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--max-length", type=int, default=2048, help="context length to note")
    parser.add_argument("--root", type=Path, help="library to read (default: the running interpreter's)")
    arguments = parser.parse_args()
    training, held_out = split_corpus(arguments.root)
    tokenizer = train([file.text for file in training], arguments.vocab)
    save(tokenizer, arguments.output, arguments.max_length)
    encodings = tokenizer.encode_batch([file.text for file in held_out], add_special_tokens=False)
    tokens = sum(len(encoding.ids) for encoding in encodings)
    size = sum(file.size for file in held_out)
    print(f"vocabulary {tokenizer.get_vocab_size()}; held out: {size} bytes, {tokens} tokens,")
    print(f"{size / tokens:.3f} bytes a token")


if __name__ == "__main__":
    main()
