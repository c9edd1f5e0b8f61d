"""Shared parts of the engines' public classes: `repr`, tokenizer, and errors for missing names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from quire.config.engine_keywords import EngineKeywords
from quire.config.option import options_of
from quire.config.options import EngineOptions
from quire.errors import UserError, nearest_name
from quire.tokenization.conversation import conversation_of
from quire.tokenization.tokenizer import Tokenizer
from quire.tokenization.user_tokenizer import UserTokenizer

if TYPE_CHECKING:
    from quire.engine.input_processor import InputProcessor

F = TypeVar("F", bound=Callable[..., None])

_OF_WORKERS = "no code of users runs in the workers"
REASONS: Mapping[str, str] = {
    "llm_engine": "the engine's facts are in `model_config` and `ready`",
    "collective_rpc": _OF_WORKERS,
    "apply_model": _OF_WORKERS,
    "start_profile": "step_log writes what each step computed and how long it took",
    "stop_profile": "step_log writes what each step computed and how long it took",
    "get_metrics": "stats() has the counters and gauges, a server's /metrics the histograms",
    "set_tokenizer": "the option tokenizer names another one",
    "encode_with_tokenizer": "get_tokenizer() has Transformers' methods",
}
"""Names of vLLM's engines that do not exist here, with the alternative."""


def described(options: EngineOptions) -> str:
    """Options that differ from the defaults, and the model, as Python source."""
    usual = EngineOptions()
    values = {name: getattr(options, name) for name in options.__struct_fields__}
    parts = [f"{name}={value!r}" for name, value in values.items() if name != "model" and value != getattr(usual, name)]
    return ", ".join([repr(options.model), *parts])


def user_tokenizer(tokenizer: Tokenizer | None, inputs: InputProcessor) -> UserTokenizer:
    """Tokenizer with the methods of Transformers' ones. Raises UserError if there is none."""
    if tokenizer is None:
        raise UserError("this model has no tokenizer")

    def render(messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return inputs.write_text(inputs.prepare_chat(conversation_of(messages, **options))).text

    return UserTokenizer(tokenizer, render)


def missing(engine: object, name: str) -> AttributeError:
    kind = type(engine)
    known = [each for each in dir(kind) if not each.startswith("_")]
    why = f": {REASONS[name]}" if name in REASONS else nearest_name(name, known)
    return AttributeError(f"{kind.__name__} has no attribute {name!r}{why}", name=name, obj=engine)


def spelled_out(constructor: F) -> F:
    """Add all options to an engine's constructor, for help() and notebooks."""
    signature = inspect.signature(constructor)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    known = {field.name: field.default for field in msgspec.structs.fields(EngineOptions)}
    others = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=known[name], annotation=kind.__forward_arg__)
        for name, kind in EngineKeywords.__annotations__.items()
    ]
    constructor.__signature__ = signature.replace(parameters=[*own, *others])  # type: ignore[attr-defined]
    lines = [f"{name}: {option.help}" for name, option in options_of(EngineOptions).items()]
    constructor.__doc__ = "\n".join([*filter(None, [constructor.__doc__]), "", *lines])
    return constructor
