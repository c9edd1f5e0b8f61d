"""Tokenizers are those of Transformers: ids, special tokens, decoded texts and chats of directories drawn at random."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from quire.engine.pooling_processor import encode_pooled
from quire.errors import ModelLoadError
from quire.tokenization import tokenizer_names
from quire.tokenization.conversation import messages_of
from quire.tokenization.jobs import Render, Rendered, Setup, TemplateLimits
from quire.tokenization.template_renderer import TemplateRenderer
from quire.tokenization.tokenizer import Tokenizer, load_tokenizer
from quire.tokenization.tokenizer_classes import CLASSES, FROM_FILE
from quire.tokenization.user_tokenizer import UserTokenizer
from tests.long import one_in
from tests.tokenization.build import sentencepiece_backend
from tests.tokenization.directories import CLASSES as BY_KIND
from tests.tokenization.directories import PAIRS, TEXTS, draw, plain

MESSAGES = [{"role": "system", "content": "Be <s> brief."}, {"role": "user", "content": "Hi  \n there"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
REFUSALS = re.compile(
    "takes a vocabulary of the kind|tokenizer_class is .* not supported|prefix or a suffix|cannot have the id"
    "|'None' is no token"
)
"""Differences that are no surprise: each is refused when the tokenizer is loaded."""


def chat(tokenizer: Tokenizer, *, with_tools: bool) -> str | None:
    templates = tokenizer.chat_templates
    name = "tool_use" if with_tools and "tool_use" in templates else "default"
    if name not in templates:
        return None
    renderer = TemplateRenderer(Setup(templates, tokenizer.special_tokens, TemplateLimits()))
    variables = {"tools": TOOLS if with_tools else None, "documents": None, "add_generation_prompt": True}
    render = Render(name, variables, datetime.now(), 10_000)
    answer = renderer.answer(render, bytes(messages_of(MESSAGES).encoded))
    assert isinstance(answer, Rendered), answer
    return answer.text


def or_error(value: Callable[[], Any]) -> Any:
    """Some texts have no tokens in a vocabulary without a token for what it does not know."""
    try:
        return value()
    except Exception:
        return "an error"


def their_chat(theirs: Any, *, with_tools: bool) -> str | None:
    try:
        tools = TOOLS if with_tools else None
        text = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
    except ValueError:
        return None
    return str(text)


def differences(path: Path) -> list[tuple[str, object, object]] | None:
    """What differs: its name, Transformers' value and ours; None where Transformers or we refuse the directory."""
    try:
        theirs = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception:
        return None
    try:
        ours = load_tokenizer(path)
    except ModelLoadError as error:
        return None if REFUSALS.search(error.message) else [("refused", "", error.message)]
    user = UserTokenizer(ours, lambda *_, **__: "")
    compared: list[tuple[str, object, object]] = [
        ("special tokens", theirs.special_tokens_map, ours.special_tokens),
        ("all special tokens", theirs.all_special_tokens, user.all_special_tokens),
        ("all special ids", theirs.all_special_ids, user.all_special_ids),
        (
            "beginning, end and padding",
            (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id),
            (ours.bos_token_id, ours.eos_token_id, ours.padding_token_id),
        ),
        ("vocabulary", theirs.get_vocab(), user.get_vocab()),
    ]
    for text in TEXTS:
        for special in (True, False):
            ids = or_error(lambda: theirs(text, add_special_tokens=special)["input_ids"])  # noqa: B023
            compared.append((f"{text!r}, {special}", ids, or_error(lambda: ours.encode(text, special))))  # noqa: B023
            if isinstance(ids, str):
                continue
            for skips in (True, False):
                decoded = theirs.decode(ids, skip_special_tokens=skips)
                compared.append((f"decoded {text!r}, {special}, {skips}", decoded, ours.decode(ids, skips)))
    for first, second in PAIRS:
        pair = or_error(lambda: theirs(first, second)["input_ids"])  # noqa: B023
        joined = or_error(lambda: encode_pooled(ours, first, second or None, None).token_ids)  # noqa: B023
        compared.append((f"pair {first!r}, {second!r}", pair, joined))
    for with_tools in (False, True):
        compared.append(
            (f"chat, tools {with_tools}", their_chat(theirs, with_tools=with_tools), chat(ours, with_tools=with_tools))
        )
    return [(name, theirs_, ours_) for name, theirs_, ours_ in compared if theirs_ != ours_]


def check(path: Path, numbers: range) -> None:
    taken, different = 0, {}
    for number in numbers:
        directory = path / str(number)
        directory.mkdir()
        draw(number).write(directory)
        found = differences(directory)
        taken += found is not None
        if found:
            different[number] = found[:2]
    assert different == {}
    assert taken > len(numbers) // 2, "too few directories that both take"


@pytest.mark.long
def test_forty_directories(tmp_path: Path) -> None:
    check(tmp_path, range(40))


@pytest.mark.long
def test_two_hundred_directories(tmp_path: Path) -> None:
    check(tmp_path, range(1000, 1200))


OPTIONS: dict[str, tuple[Any, ...]] = {
    "legacy": (True, False),
    "add_prefix_space": (True, False),
    "do_lower_case": (False,),
    "strip_accents": (True, False, None),
    "tokenize_chinese_chars": (False,),
    "clean_up_tokenization_spaces": (True,),
    "split_special_tokens": (True,),
    "eos_token": ("<|im_end|>", None),
    "add_bos_token": (True,),
}


EACH_CLASS = [(kind, name) for kind, names in BY_KIND.items() for name in names]
OF_A_KIND = [(kind, name) for kind, names in BY_KIND.items() for name in names[:2]]


@pytest.mark.parametrize(
    ("kind", "name"), [pytest.param(*each, marks=() if each in OF_A_KIND else pytest.mark.long) for each in EACH_CLASS]
)
def test_each_class_with_each_option(tmp_path: Path, kind: str, name: str) -> None:
    refused = 0
    for number, (option, value) in enumerate((option, value) for option, values in OPTIONS.items() for value in values):
        directory = tmp_path / str(number)
        directory.mkdir()
        plain(kind, {"tokenizer_class": name, option: value}).write(directory)
        found = differences(directory)
        assert not found, (option, value)
        refused += found is None
    assert refused <= 1, "XLM-RoBERTa's class needs an end-of-sequence token"


def test_classes_that_are_not_built_here_are_refused(tmp_path: Path) -> None:
    sentencepiece_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "WhisperTokenizerFast"}')
    with pytest.raises(ModelLoadError, match=r"tokenizer_class is WhisperTokenizer.*PreTrainedTokenizerFast"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    assert load_tokenizer(tmp_path).token_to_id("fox") is not None, "its type counts more than the class"


@pytest.mark.parametrize(
    ("listed", "taken"),
    [
        (["tokenizer.json", "tokenizer.4.0.0.json"], "tokenizer.4.0.0.json"),
        (["tokenizer.99.0.json", "tokenizer.json"], "tokenizer.json"),
        ([], "tokenizer.json"),
    ],
)
def test_files_for_several_versions(tmp_path: Path, listed: list[str], taken: str) -> None:
    for name in ("tokenizer.json", "tokenizer.4.0.0.json", "tokenizer.99.0.json"):
        backend = sentencepiece_backend()
        backend.add_tokens([name])
        backend.save(str(tmp_path / name))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"fast_tokenizer_files": listed}))
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert taken in theirs.get_vocab()
    assert load_tokenizer(tmp_path).token_to_id(taken) is not None


def test_models_that_are_known_by_name() -> None:
    config = {"tokenizer_class": "LlamaTokenizerFast"}
    for name, expected in (("deepseek-ai/DeepSeek-Coder-6.7b", FROM_FILE), ("deepseek-ai/other", "LlamaTokenizer")):
        assert tokenizer_names.class_name(name, config, {}, is_byte_level=False) == expected
    assert tokenizer_names.class_name("other", config, {}, is_byte_level=True) == FROM_FILE


@pytest.mark.parametrize(("kind", "version"), one_in(3, ["sequence", "metaspace", "bytes"], ["4.50.0", "5.1.0"]))
def test_a_pattern_of_mistral_that_is_put_right(tmp_path: Path, kind: str, version: str) -> None:
    """Only vocabularies as large as Mistral's are looked at."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitters = {
        "sequence": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("a"), "isolated"), letters]),
        "metaspace": pre_tokenizers.Metaspace(split=False),
        "bytes": letters,
    }
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*alphabet, *(f"{number:x}z" for number in range(100_001))]
    backend = BackendTokenizer(models.BPE({entry: number for number, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = splitters[kind]
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"fix_mistral_regex": true}')
    model = {"model_type": "mistral", "transformers_version": version}
    (tmp_path / "config.json").write_text(json.dumps(model))
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ours = load_tokenizer(tmp_path)
    their_splitter, our_splitter = (each.pre_tokenizer for each in (theirs.backend_tokenizer, ours.backend))
    assert our_splitter.__getstate__() == their_splitter.__getstate__()


def test_the_tables_are_those_of_transformers() -> None:
    registered = {
        kind: name.removesuffix("Fast")
        for kind, name in tokenization_auto.TOKENIZER_MAPPING_NAMES.items()
        if name is not None
    }
    assert dict(tokenizer_names._REGISTERED) == registered
    assert set(tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS) == tokenizer_names._WRONGLY_NAMED
    assert tuple(tokenization_auto.MODEL_IDS_TO_TOKENIZERS_BACKEND) == tokenizer_names._FROM_FILE_NAMES
    known = {*CLASSES, *(f"{name}Tokenizer" for name in tokenizer_names._OTHER_CLASSES)}
    assert {name for name in registered.values() if name not in known} == {FROM_FILE, "ParakeetTokenizer"}
