"""Triton's interpreter, with what it repeats left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any


def _interpreter() -> Any:
    """None in a process that has not imported it."""
    return sys.modules.get("triton.runtime.interpreter")


def install() -> None:
    """Once in a process, when Triton has been imported.

    On every call of one Triton function by another the interpreter searches all of `triton.language`, to replace the
    same functions by the same ones: a third of the time of an interpreted model. Once in a launch is enough.
    """
    interpreter = _interpreter()
    if interpreter is None or hasattr(interpreter, "replaced_in_this_launch"):
        return
    replace_functions, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[tuple[bool, ...]] = set()
    interpreter.replaced_in_this_launch = replaced

    def replace_once(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values()}
        modules = tuple(id(module) in seen for module in (interpreter.tl, interpreter.tl.core))
        if modules in replaced:
            return None  # of use only to a launch, which is the first that asks
        replaced.add(modules)
        return replace_functions(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()  # the end of the last launch has undone its replacements
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_anew


@contextmanager
def without_overflow_checks() -> Iterator[None]:
    """Integers are added and multiplied once, not twice to see whether 64 bits give another result. For whole models:
    the tests of the kernels look for overflow."""
    interpreter = _interpreter()
    if interpreter is None:
        yield
        return
    builder = interpreter.interpreter_builder
    checked = builder.options
    builder.options = replace(checked, sanitize_overflow=False)
    try:
        yield
    finally:
        builder.options = checked
