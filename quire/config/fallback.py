"""Transformers, which computes models without Quire code. It is imported only for those."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

from quire.errors import ConfigError
from quire.utils.extras import how_to_install

MODEL_IMPLS = ("auto", "quire", "transformers")
HINT = how_to_install("transformers")


def import_transformers() -> ModuleType:
    """Import Transformers. Raises ConfigError with the extra's name if the module is not installed."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"this model runs through Transformers, which is not installed: {HINT}") from None
    return transformers


def has_transformers() -> bool:
    return find_spec("transformers") is not None


def knows_class(name: str) -> bool:
    """True if the installed Transformers has this language-model class. Imports no modelling code."""
    return name.endswith(("ForCausalLM", "LMHeadModel")) and name in dir(import_transformers())
