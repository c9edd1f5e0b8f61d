"""A Jinja sandbox whose templates run on a budget: they cannot loop, recurse or grow text without end."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARACTERS = 16 * 2**20
"""Longest text that a rendering may end in, or make on the way."""
MAX_WORK = 2_000_000
"""Units of work of one rendering: a loop round, a call or an attribute costs 1 and takes less than a microsecond."""
CHARACTERS_PER_UNIT = 32
"""Text costs one unit per so many characters wherever an expression makes or prints it."""
MAX_WIDTH = 10_000
WIDENING = frozenset({"batch", "slice", "center", "ljust", "rjust", "zfill", "indent", "wordwrap", "expandtabs"})
"""Methods and filters that make as much as a number says."""
FORMATTING = frozenset({"format", "format_map"})
WIDE_FORMAT = re.compile(r"\d{5,}|\*")


class BudgetError(jinja2.TemplateError):
    """A template asked for more work or more text than one rendering may take."""


class MeteredSandbox(ImmutableSandboxedEnvironment):
    """ImmutableSandboxedEnvironment with a budget per rendering. Thread-safe: each thread renders on its own budget.

    Only templates from `compile_metered`, rendered by `render_metered`, are metered.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self.charge, **options)
        self._budget = threading.local()
        self.filters = {name: self._metered(name, function) for name, function in self.filters.items()}
        self.filters["_each"] = self._each
        self.filters["_text"] = self.charge
        self.globals["namespace"] = TemplateNamespace
        del self.globals["lipsum"]

    def compile_metered(self, source: str) -> jinja2.Template:
        """Compile with loops and `~` passing through the meter. Raises TemplateSyntaxError."""
        self._budget.left = MAX_WORK  # constant expressions are worked out now
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            printed = sum(len(text.data) for text in loop.find_all(nodes.TemplateData))
            cost = nodes.Const(1 + printed // CHARACTERS_PER_UNIT, lineno=loop.lineno)
            loop.iter = nodes.Filter(loop.iter, "_each", [cost], [], None, None, lineno=loop.lineno)
        for parent in [tree, *tree.find_all(nodes.Node)]:
            for field, value in parent.iter_fields():
                setattr(parent, field, _wrap_concat(value))
        return self.from_string(tree)

    def render_metered(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render on a fresh budget. Raises BudgetError, or whatever the template raises."""
        self._budget.left = MAX_WORK
        chunks, length = [], 0
        for chunk in template.generate(variables):
            length += len(chunk)
            self._check_size(length)
            chunks.append(chunk)
        return "".join(chunks)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # The names begin with underscores so that a template may pass any keyword, as in the method overridden.
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str):
            __self._check_method(method.__name__, subject, [*args, *kwargs.values()])
        return __self.charge(super().call(__context, __obj, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        return self.charge(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return self.charge(super().getitem(obj, argument))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            self._check_size(_length(left) * _number(right) + _length(right) * _number(left))
        elif operator == "**" and max(_number(left), _number(right)) > MAX_WIDTH:
            raise BudgetError(f"it raises to a power with a number above {MAX_WIDTH}")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return self.charge(super().call_binop(context, operator, left, right))

    def charge(self, value: Any) -> Any:
        """Pay for making or printing `value`, and return it."""
        size = _length(value)
        self._pay(1 + size // CHARACTERS_PER_UNIT)
        self._check_size(size)
        return value

    def _pay(self, units: int) -> None:
        self._budget.left -= units
        if self._budget.left < 0:
            raise BudgetError("it takes too much work")

    def _check_size(self, characters: int) -> None:
        if characters > MAX_CHARACTERS:
            raise BudgetError(f"it makes a text of more than {MAX_CHARACTERS} characters")

    def _check_method(self, name: str, subject: Any, arguments: list[Any]) -> None:
        """Refuse, before it runs, what turns little text into much. `subject`: the method's object, or the filtered."""
        texts = [argument for argument in arguments if isinstance(argument, str)]
        if name in FORMATTING:
            _check_format(subject)
        elif name == "replace" and len(texts) >= 2:
            self._check_size(str(subject).count(texts[0]) * len(texts[1]))
        elif name == "join":
            items = subject if isinstance(subject, list | tuple) else next(iter(arguments), ())
            separator = subject if isinstance(subject, str) else next(iter(texts), "")
            if isinstance(items, list | tuple):
                self._check_size(sum(len(separator) + _length(item) for item in items))
        elif name in WIDENING:
            width = max(map(_number, arguments), default=0)
            if width > MAX_WIDTH:
                raise BudgetError(f"it uses a width above {MAX_WIDTH}")
            text = subject if isinstance(subject, str) else ""
            self._check_size(width * (1 + text.count("\n") + text.count("\t")))

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is checked first and pays for its result. Jinja's mark of what it wants first is kept."""
        start = 1 if hasattr(function, "jinja_pass_arg") else 0

        def filtered(*args: Any, **kwargs: Any) -> Any:
            self._check_method(name, args[start], [*args[start + 1 :], *kwargs.values()])
            return self.charge(function(*args, **kwargs))

        if start:
            filtered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return filtered

    def _each(self, items: Iterable[Any], cost: int) -> Iterator[Any]:
        for item in items:
            self._pay(cost)
            yield item


class TemplateNamespace(Namespace):
    """`namespace()` without attributes that begin with an underscore: they reach into Python."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _wrap_concat(value: Any) -> Any:
    if isinstance(value, nodes.Concat):
        return nodes.Filter(value, "_text", [], [], None, None, lineno=value.lineno)
    if isinstance(value, list):
        return [_wrap_concat(item) for item in value]
    return value


def _check_format(template: Any) -> None:
    if isinstance(template, str) and WIDE_FORMAT.search(template):
        raise BudgetError("it formats with too large a width")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0
