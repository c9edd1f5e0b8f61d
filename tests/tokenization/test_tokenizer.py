"""Loading tokenizers from every kind of directory, and what a Tokenizer offers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from quire.errors import InternalError, ModelLoadError, UserError
from quire.tokenization.tokenizer import Tokenizer, load_tokenizer
from tests.fakes.panic import Panic
from tests.tokenization.build import byte_level, byte_level_backend, sentencepiece, sentencepiece_backend

TEXT = "def parse(self):\n    return 'Größe 日本 🦙'\n"


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    return tmp_path


def test_a_directory_with_tokenizer_json(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    ids = tokenizer.encode(TEXT)
    assert ids == byte_level_backend().encode(TEXT).ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.chat_template is None


def test_special_tokens_map_is_read(directory: Path) -> None:
    write_json(directory / "tokenizer_config.json", {"bos_token": None, "eos_token": "<s>"})
    write_json(directory / "special_tokens_map.json", {"eos_token": "<|im_start|>", "pad_token": {"content": "</s>"}})
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 2)
    assert tokenizer.special_tokens["pad_token"] == "</s>"


def test_vocabulary_and_merges_without_tokenizer_json(tmp_path: Path) -> None:
    """OPT ships GPT-2's files, and asks for a beginning-of-sequence token in its configuration."""
    reference = byte_level_backend()
    reference.model.save(str(tmp_path))
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "</s>", "eos_token": "</s>", "add_bos_token": True})
    tokenizer = load_tokenizer(tmp_path)
    plain = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(plain) == TEXT
    assert tokenizer.encode(TEXT) == [tokenizer.bos_token_id, *plain]
    assert tokenizer.is_special(1)
    assert tokenizer.decode([1, *plain]) == TEXT


def test_added_tokens_json_must_fit_the_vocabulary(tmp_path: Path) -> None:
    byte_level_backend().model.save(str(tmp_path))
    number = len(json.loads((tmp_path / "vocab.json").read_text()))
    write_json(tmp_path / "added_tokens.json", {"<|x|>": number})
    assert load_tokenizer(tmp_path).encode("<|x|>") == [number]
    write_json(tmp_path / "added_tokens.json", {"<|x|>": number + 7})
    with pytest.raises(ModelLoadError, match=r"added_tokens\.json.*<\|x\|>"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [1, 5]),
        ({"add_bos_token": True}, [1, 5]),
        ({"add_bos_token": False}, [1, 5]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 5]),
        ({"add_eos_token": True}, [1, 5]),
    ],
)
def test_what_tokenizer_json_adds_stays_whatever_flags_say(
    tmp_path: Path, flags: dict[str, bool], expected: list[int]
) -> None:
    sentencepiece_backend().save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", **flags})
    tokenizer = load_tokenizer(tmp_path)
    the = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [token for number in expected for token in (the if number == 5 else [number])]


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": {"type": "BPE"}}', "[1, 2]"])
def test_a_corrupt_tokenizer_is_one_clear_line(directory: Path, content: str) -> None:
    (directory / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a readable tokenizer: ") as caught:
        load_tokenizer(directory)
    assert "\n" not in str(caught.value)


def test_a_truncated_tokenizer(directory: Path) -> None:
    file = directory / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a readable tokenizer"):
        load_tokenizer(directory)


def test_a_corrupt_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("[]")
    (tmp_path / "merges.txt").write_text("a b\n")
    with pytest.raises(ModelLoadError, match=r"vocab\.json and merges\.txt are not readable"):
        load_tokenizer(tmp_path)


def test_a_directory_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no tokenizer \(looked for tokenizer\.json.*skip_tokenizer_init"):
        load_tokenizer(tmp_path)


def test_a_corrupt_configuration(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(directory)


def test_chat_templates_in_their_three_places(directory: Path) -> None:
    write_json(directory / "tokenizer_config.json", {"chat_template": "one"})
    assert load_tokenizer(directory).chat_template == "one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    write_json(directory / "tokenizer_config.json", {"chat_template": named})
    assert load_tokenizer(directory).chat_templates == {"default": "two", "tool_use": "three"}
    (directory / "chat_template.jinja").write_text("four")
    assert load_tokenizer(directory).chat_template == "four"


def test_the_chat_template_of_a_processor(directory: Path) -> None:
    """It counts most where there is a processor, but for conversations with tools; elsewhere it is the last."""
    write_json(directory / "chat_template.json", {"chat_template": "processor's"})
    assert load_tokenizer(directory).chat_templates == {"default": "processor's"}
    (directory / "chat_template.jinja").write_text("tokenizer's")
    assert load_tokenizer(directory).chat_templates == {"default": "tokenizer's"}
    write_json(directory / "preprocessor_config.json", {})
    assert load_tokenizer(directory).chat_templates == {"default": "processor's", "tool_use": "tokenizer's"}
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert load_tokenizer(directory).chat_templates == {"default": "processor's", "tool_use": "tools"}
    write_json(directory / "processor_config.json", {"chat_template": "of the configuration"})
    assert load_tokenizer(directory).chat_template == "of the configuration"
    write_json(directory / "processor_config.json", {"chat_template": 7})
    with pytest.raises(ModelLoadError, match=r"processor_config\.json: chat_template must be a string"):
        load_tokenizer(directory)


def test_too_many_chat_templates(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    for number in range(65):
        (directory / "additional_chat_templates" / f"{number}.jinja").touch()
    with pytest.raises(ModelLoadError, match="may hold 64 templates, and holds 65"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    ("eos_token", "ends"), [("</s>", [7, 1]), ("<|im_start|>", [7, 2]), (None, [7]), ("<|new|>", [7, 332])]
)
def test_what_ends_a_text(directory: Path, eos_token: str | None, ends: list[int]) -> None:
    write_json(directory / "tokenizer_config.json", {"eos_token": eos_token})
    assert load_tokenizer(directory).ends([7]) == ends
    assert load_tokenizer(directory).ends(ends) == ends


@pytest.mark.parametrize("value", [7, [{"name": "default"}], ["text"]])
def test_a_malformed_chat_template(directory: Path, value: object) -> None:
    write_json(directory / "tokenizer_config.json", {"chat_template": value})
    with pytest.raises(ModelLoadError, match="chat_template must be a string or a list"):
        load_tokenizer(directory)


def test_the_truncation_of_training_is_not_applied(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(TEXT) == byte_level().encode(TEXT)


def test_vocabulary_counts_added_tokens() -> None:
    tokenizer = byte_level()
    assert tokenizer.vocab_size == tokenizer.backend.get_vocab_size(with_added_tokens=True)
    assert tokenizer.token_to_id("日本") < tokenizer.vocab_size


def test_token_texts_and_bytes() -> None:
    tokenizer = byte_level()
    assert tokenizer.token_bytes(tokenizer.token_to_id("Ġthe")) == b" the"
    assert tokenizer.token_text(tokenizer.token_to_id("Ġthe")) == " the"
    half = tokenizer.encode("\U0001d11e", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in half).decode() == "\U0001d11e"
    assert tokenizer.token_text(half[0]) == "\ufffd"
    assert tokenizer.token_text(0) == "<s>"
    assert tokenizer.token_text(99_999) == ""


def test_sentencepiece_token_texts_keep_their_space() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.token_text(tokenizer.token_to_id("▁the")) == " the"
    assert tokenizer.token_bytes(tokenizer.token_to_id("<0xE6>")) == b"\xe6"
    assert tokenizer.token_text(tokenizer.token_to_id("<0x0A>")) == "\n"


def test_special_tokens_are_known_and_skipped() -> None:
    tokenizer = byte_level()
    assert [tokenizer.is_special(token_id) for token_id in (0, 2, 3)] == [True, True, False]
    ids = tokenizer.encode("<|im_start|>the")
    assert ids[0] == 2
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>the"


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(UserError, match="not valid Unicode: lone surrogate at position 2"):
        byte_level().encode("ab\ud800")


def test_encode_batch_equals_encode() -> None:
    tokenizer = byte_level()
    texts = [TEXT, "", "the fox"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("piece", ["def read(path):\n    ", " " * 4000 + "x", "é😀"])
def test_long_texts_are_cut_without_reading_all(
    bundled_model_path: Path, piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(bundled_model_path)
    texts = [piece * (200_000 // len(piece)), piece, "x"]
    whole = tokenizer.encodings(texts, add_special_tokens=False, with_offsets=True)
    read, encodings = [], tokenizer.encodings

    def counted(begun: list[str], *args: Any, **options: Any) -> list[Any]:
        read.append(sum(map(len, begun)))
        return encodings(begun, *args, **options)

    monkeypatch.setattr(tokenizer, "encodings", counted)
    for most in (1, 20, 70):
        wanted = [
            text if len(found.ids) <= most else text[: found.offsets[most - 1][1]]
            for text, found in zip(texts, whole, strict=True)
        ]
        assert tokenizer.beginnings(texts, most) == wanted
    assert piece.startswith(" ") or max(read) < 3000


def test_threads_share_one_tokenizer() -> None:
    tokenizer = byte_level()
    expected = tokenizer.encode(TEXT * 20)
    results: list[bool] = []

    def work() -> None:
        for _ in range(20):
            ids = tokenizer.encode(TEXT * 20)
            results.append(ids == expected and tokenizer.decode(ids) == TEXT * 20)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


def test_loading_imports_neither_torch_nor_transformers(directory: Path) -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from quire.tokenization.tokenizer import load_tokenizer\n"
        "print(len(load_tokenizer(sys.argv[1]).encode('the fox')))\n"
    )
    command = [sys.executable, "-c", script, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(byte_level().encode("the fox"))


def test_the_bundled_tokenizer(bundled_model_path: Path) -> None:
    tokenizer = load_tokenizer("bundled")
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.eos_token_id is not None
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(ids) == TEXT
    config = json.loads((bundled_model_path / "config.json").read_text())
    assert tokenizer.vocab_size <= config["vocab_size"]


@pytest.mark.parametrize("method", ["encode", "decode", "token_text", "token_bytes"])
def test_a_panic_of_the_library_is_an_ordinary_error(method: str) -> None:
    """A panic is no Exception: it would pass every handler between here and the end of the process."""

    class Panicking:
        def __getattr__(self, _name: str) -> object:
            raise Panic("index out of bounds")

    tokenizer = byte_level()
    tokenizer.backend = tokenizer.pieces = Panicking()  # type: ignore[assignment]
    argument = {"encode": "abc", "decode": [70]}.get(method, 70)
    with pytest.raises(InternalError, match="the tokenizer failed: Panic: index out of bounds") as caught:
        getattr(tokenizer, method)(argument)
    assert (caught.value.summary, type(caught.value.__cause__)) == ("the tokenizer failed", Panic)
