"""Transformers as the home of models that have no file of their own here. It is imported only for those."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

from quire.errors import ConfigError
from quire.utils.extras import how_to_install

MODEL_IMPLS = ("auto", "quire", "transformers")
HINT = how_to_install("transformers")


def import_transformers() -> ModuleType:
    """Raises ConfigError that names the extra when it is not installed."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"this model runs through Transformers, which is not installed: {HINT}") from None
    return transformers


def has_transformers() -> bool:
    """Whether it is installed. Imports nothing."""
    return find_spec("transformers") is not None


def knows_class(name: str) -> bool:
    """Whether the installed Transformers has a language model of this class name. Imports Transformers, not its
    modelling code."""
    return name.endswith(("ForCausalLM", "LMHeadModel")) and name in dir(import_transformers())
