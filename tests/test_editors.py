"""What an editor completes and an engine says of itself."""

from __future__ import annotations

import ast
import inspect
import typing
from pathlib import Path

import pytest

import quire.vllm
from quire import LLM, AsyncLLM, LLMEngine, SamplingParams
from quire.config.engine_keywords import EngineKeywords
from quire.config.option import options_of
from quire.config.options import EngineOptions
from quire.engine.public_names import REASONS, described, missing

KEYWORDS_FILE = Path(inspect.getfile(EngineKeywords))
STUB_FILE = KEYWORDS_FILE.with_suffix(".pyi")
"""What editors read: each keyword with the option's help."""


def keywords_text(*, is_stub: bool = False) -> str:
    """The text of quire/config/engine_keywords.py, or of its stub, made from the fields of EngineOptions."""
    text = KEYWORDS_FILE.read_text(encoding="utf-8")
    head, _ = text.split("    runner: ")
    lines, options = [], options_of(EngineOptions)
    for name, annotation in EngineOptions.__annotations__.items():
        node = ast.parse(annotation, mode="eval").body  # Annotated[kind, record]
        assert isinstance(node, ast.Subscript)
        assert isinstance(node.slice, ast.Tuple)
        if name != "model":
            lines.append(f"    {name}: {ast.unparse(node.slice.elts[0])}\n")
            lines += [f'    """{options[name].help}"""\n'] if is_stub else []
    if is_stub:
        head = head.replace("\n\n\nclass", "\n\nclass")
    return head + "".join(lines)


def test_keywords_are_the_options() -> None:
    assert KEYWORDS_FILE.read_text(encoding="utf-8") == keywords_text(), "`python -m tests.test_editors` writes it"
    assert STUB_FILE.read_text(encoding="utf-8") == keywords_text(is_stub=True)
    options = typing.get_type_hints(EngineOptions)
    assert typing.get_type_hints(EngineKeywords) == {name: kind for name, kind in options.items() if name != "model"}
    for engine in (LLM, LLMEngine, AsyncLLM):
        assert engine.__dict__["__init__"].__annotations__["engine_options"] == "Unpack[EngineKeywords]"


@pytest.mark.parametrize("engine", [LLM, LLMEngine, AsyncLLM])
def test_notebooks_see_every_option(engine: type) -> None:
    parameters = inspect.signature(engine).parameters
    for name in EngineOptions.__struct_fields__:
        assert parameters[name].default == getattr(EngineOptions(), name)
    assert parameters["max_num_seqs"].annotation == "int | None"
    assert "block_size: tokens per KV block\n" in (inspect.getdoc(engine.__dict__["__init__"]) or "")


def test_editors_see_fields_and_names() -> None:
    """A metaclass that takes any keywords hides the fields, and `__getattr__` the names, from all editors."""
    assert "if not TYPE_CHECKING:" in inspect.getsource(type(SamplingParams)).partition("def __call__")[0]
    assert "if TYPE_CHECKING:" in inspect.getsource(quire.vllm).partition("from quire import *")[0]


def test_an_engine_shows_what_it_was_given() -> None:
    assert described(EngineOptions()) == "'bundled'"
    assert described(EngineOptions(model="m", max_model_len=8, seed=3)) == "'m', seed=3, max_model_len=8"


@pytest.mark.parametrize("engine", [LLM, LLMEngine, AsyncLLM])
def test_names_that_an_engine_has_not(engine: type) -> None:
    bare = engine.__new__(engine)
    assert not hasattr(bare, "llm_engine")
    with pytest.raises(AttributeError, match=f"{engine.__name__} has no attribute 'get_metrics': stats"):
        bare.get_metrics  # noqa: B018  # the access is the test
    with pytest.raises(AttributeError, match="did you mean 'get_tokenizer'"):
        bare.get_tokeniser  # noqa: B018
    assert not set(REASONS) & set(dir(engine))
    assert "did you mean" not in str(missing(bare, "zzzzz"))


def test_a_wrong_sampling_parameter_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="SamplingParams has no field 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(3)  # type: ignore[misc]


if __name__ == "__main__":
    KEYWORDS_FILE.write_text(keywords_text(), encoding="utf-8")
    STUB_FILE.write_text(keywords_text(is_stub=True), encoding="utf-8")
