"""Chat templates that want all time or all memory, and what random edits make of them.

The promises: every conversation is rendered or refused with one clear error; the process stays within its memory; the
next conversation is rendered.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from quire.errors import ChatTemplateProcessError, UserError
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.helpers import Helpers
from quire.tokenization.jobs import TemplateLimits
from tests.fuzz.harness import Attack, Fuzzer
from tests.tokenization.build import written

LIMITS = TemplateLimits(cpu_seconds=0.1, seconds=60.0, memory=128 * 2**20, queue_seconds=600.0)
"""Little, so that a case costs little. The processor time does not depend on how busy the machine is."""
MAX_IDLE_MEMORY = 512 * 2**20
"""Address space of a helper that has rendered nothing yet. What the C library reserves for threads is most of it."""
MAX_CHARACTERS = 100_000
BENIGN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

_LOOP = "{% for a in range(99999) %}"
_END = "{% endfor %}"
_GROW = "{% set ns = namespace(t='xy', n=9, l=[1, 2]) %}{% for a in range(99) %}"
TEMPLATES: dict[str, str] = {
    # Loops and calls.
    "nested loops": _LOOP * 2 + _END * 2,
    "loops over messages": "{% for a in messages %}" * 14 + _END * 14,
    "product of ranges": _LOOP * 2 + "{% if a * b < 0 %}x{% endif %}" + _END * 2,
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "tree of macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "macro calls itself by its block": "{% macro f() %}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 9
    + "{% endcall %}" * 9,
    "filters over ranges": "{{ range(99999) | map('string') | map('length') | sum }}" * 200,
    "sorting": (_LOOP + "{% set s = range(99999) | map('string') | sort(reverse=true) %}" + _END),
    "unique and group": _LOOP + "{{ range(9999) | unique | list | length }}{{ range(999) | groupby('real') }}" + _END,
    # Text without end.
    "endless output": _LOOP + "{{ messages[0].content * 100 }}" + _END,
    "long constants": _LOOP * 2 + "x" * 10_000 + _END * 2,
    "constants in a block": "{% set t %}" + _LOOP + "x" * 10_000 + _END + "{% endset %}",
    "multiplied text": "{{ ('x' * 9999) * 99999 }}",
    "multiplied list": "{{ ([1] * 9999999) * 9999 }}",
    "multiplied variable": "{% set x = 'x' * 99999 %}{{ x * 99999 }}",
    "doubling by +": _GROW + "{% set ns.t = ns.t + ns.t %}" + _END,
    "doubling by ~": _GROW + "{% set ns.t = ns.t ~ ns.t %}" + _END,
    "doubling lists": _GROW + "{% set ns.l = ns.l + ns.l %}" + _END,
    "doubling by blocks": _GROW + "{% set b %}{{ ns.t }}{{ ns.t }}{% endset %}{% set ns.t = b %}" + _END,
    "nested lists printed": _GROW + "{% set ns.l = [ns.l, ns.l] %}" + _END + "{{ ns.l }}",
    "nested lists as JSON": _GROW + "{% set ns.l = [ns.l, ns.l] %}" + _END + "{{ ns.l | tojson }}",
    "nested lists compared": "{% set ns = namespace(k=[1], l=[1]) %}{% for a in range(99) %}"
    "{% set ns.k = [ns.k, ns.k] %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.k == ns.l }}{{ ns.l | pprint }}",
    "deep list": "{% set ns = namespace(l=[]) %}" + _LOOP + "{% set ns.l = [ns.l] %}" + _END + "{{ ns.l }}",
    "deep list as JSON": "{% set ns = namespace(l=[]) %}"
    + _LOOP
    + "{% set ns.l = [ns.l] %}"
    + _END
    + "{{ ns.l|tojson }}",
    "tojson": "{{ ([messages] * 99999) | tojson(indent=9) }}",
    "join": "{{ ([('x' * 9999)] * 99999) | join('') }}",
    "join method": "{{ ('x' * 9999).join(['a'] * 99999) }}",
    "replace filter": "{{ ('x' * 99999) | replace('x', 'y' * 9999) }}",
    "replace method": "{{ ('x' * 99999).replace('x', 'y' * 9999) }}",
    "replace nothing": "{{ ('x' * 9999999).replace('', 'y' * 9999) }}",
    "translate": "{{ ('x' * 99999).translate({120: 'y' * 99999}) }}",
    "expandtabs": "{{ ('\\t' * 99999).expandtabs(99999) }}",
    # Numbers.
    "x*x": _GROW + "{% set ns.n = ns.n * ns.n %}" + _END,
    "power": "{{ 9 ** 99999999 }}",
    "tower": "{{ 9 ** 9 ** 9 }}",
    "shown number": "{{ (10 ** 4000) | string | length }}" * 999,
    "to_bytes": "{{ (5).to_bytes(999999999, 'big') | length }}",
    "encoded": "{{ 'a'.encode() * 999999999 }}",
    "encoded and listed": "{{ ('a'.encode() * 99999999) | list | length }}",
    # Widths.
    "centre": "{{ 'x' | center(999999999) }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "zfill": "{{ 'x'.zfill(999999999) }}",
    "indent": "{{ ('x\n' * 9999) | indent(9999) }}",
    "wordwrap": "{{ ('x ' * 999999) | wordwrap(1) }}",
    "wordwrap one word": "{{ ('x' * 9999999) | wordwrap(1, wrapstring='y' * 999) }}",
    "batch": "{{ [1] | batch(999999999, 'x') | list }}",
    "slice": "{{ [1] | slice(999999999) | list }}",
    "lipsum": "{{ lipsum(n=99999, min=999, max=1000) }}",
    "round": "{{ 9.5 | round(999999999) }}",
    "format width": "{{ '{:>999999999}'.format('x') }}",
    "format width from argument": "{{ '{:{}}'.format('x', 999999999) }}",
    "format precision": "{{ '{:.999999999f}'.format(1.5) }}",
    "format many": "{{ ('{0}' * 300).format('x' * 9999999) }}",
    "format map": "{{ ('{a}' * 300).format_map({'a': 'x' * 9999999}) }}",
    "percent width": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    # One call over many elements.
    "in a long list": "{% set l = [1] * 16000000 %}" + _LOOP + "{{ 2 in l }}" + _END,
    "count": "{% set l = [1] * 9000000 %}" + _LOOP + "{{ l.count(2) }}" + _END,
    "count in text": "{% set t = 'x' * 16000000 %}" + _LOOP + "{{ t.count('xy') }}" + _END,
    "find": "{% set t = 'x' * 16000000 %}" + _LOOP + "{{ t.find('xy') }}{{ t.rfind('yx') }}" + _END,
    "index": "{% set l = [1] * 9000000 %}" + _LOOP + "{{ l.index(1, 8999999) }}" + _END,
    "split": _LOOP + "{{ ('x ' * 999999).split() | length }}" + _END,
    "striptags": "{{ ('<' * 999999) | striptags }}",
    "urlize": "{{ ('http://a.' * 999999) | urlize }}",
    "title": _LOOP + "{{ ('x-' * 999999) | title | wordcount }}" + _END,
    "compared texts": _LOOP + "{{ 'x' * 9999999 == 'x' * 9999999 }}" + _END,
    # For the compiler.
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "brackets": "{{ " + "[" * 150 + "]" * 150 + " }}",
    "long sum": "{{ 1" + " + 1" * 50_000 + " }}",
    "long negation": "{{ " + "not " * 50_000 + "1 }}",
    "nested ifs": "{% if 1 %}" * 500 + "x" + "{% endif %}" * 500,
    "nested loops for the compiler": "{% for a in [1] %}" * 60 + _END * 60,
    "long filters": "{{ 1" + " | string" * 20_000 + " }}",
    "folded constant": "{{ 'x' * 99999999 }}{{ [1] * 99999999 }}",
    "unclosed": "{% for a in messages %}{{ a",
    "unclosed comment": "{#" * 100_000,
    "many blocks": "".join(f"{{% set a{i} = {i} %}}" for i in range(20_000)),
    # Into Python, and errors that are large.
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}{{ lipsum.__globals__ }}{{ messages.append(1) }}",
    "attr": "{{ '' | attr('__class__') }}{{ '{0.__class__}'.format(1) }}{{ ('{0.__class__}' | attr('format'))(1) }}",
    "map attr": "{{ ['{0.__class__}'] | map('format', 1) | list }}{{ [''] | map(attribute='__class__') | list }}",
    "namespace": "{% set ns = namespace(_x=1) %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}{{ ns['__attrs'] }}",
    "long rejected": "{{ raise_exception('x' * 9999999) }}",
    "rejected that is no text": "{{ raise_exception(messages) }}{{ raise_exception() }}",
    "long error": "{{ {}['x' * 9999999].y }}",
    "surrogate": "{{ '\\ud800' }}",
    "surrogate in an error": "{{ raise_exception('\\ud800') }}",
    "include": "{% include 'other' %}",
    "division": "{{ 1 / 0 }}",
}

_SHORT: list[dict[str, Any]] = [{"role": "user", "content": "a short one"}]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "short": _SHORT,
    "long": [{"role": "user", "content": "x " * 2**20}],
    "many": [{"role": "user", "content": ""}] * 20_000,
    "template in the content": [{"role": "user", "content": "{{ 9 ** 99999999 }}{% for %}"}],
    "deep": [{"role": "user", "content": "x", "extra": json.loads("[" * 90 + "]" * 90)}],
    "odd": [{"role": "user", "content": "\x00\x1b\u2028", "n": 2**63, "f": float("inf"), "": None}],
}
_PIECES = re.compile(r"\{%.*?%\}|\{\{.*?\}\}|\d+|'[^']*'|\w+|.", re.DOTALL)


class TemplateAttack:
    """Tries one template on some conversations, and then an honest template in the same process or its successor."""

    def __call__(self, rng: random.Random) -> None:
        source = _mutated(rng)
        conversation = CONVERSATIONS[rng.choice(["short"] * 5 + list(CONVERSATIONS))]
        chat = ChatTemplate({"default": source, "tool_use": BENIGN}, {"bos_token": "<s>"}, limits=LIMITS)
        try:
            check_outcome(lambda: written(chat, conversation, max_characters=MAX_CHARACTERS))
            check_memory(chat.helpers)
            # The pair of templates is one model's, so the second one has the same process or its successor.
            assert written(chat, _SHORT, tools=[{"name": "f"}]) == "<user>a short one"
        except AssertionError as error:
            raise AssertionError(f"{error}\nthe template: {source[:2000]!r}") from error
        finally:
            chat.helpers.close()


def check_outcome(render: Callable[[], str]) -> None:
    """A text within the limit, or one clear error."""
    outcome = _outcome(render)
    if isinstance(outcome, str):
        assert len(outcome) <= MAX_CHARACTERS
        outcome.encode()
    elif isinstance(outcome, UserError):
        assert outcome.param == "messages"
        assert len(outcome.message) < 2_000, f"an error of {len(outcome.message)} characters"
        outcome.message.encode()
    else:
        # Of Python's own C stack, or for memory that Python cannot do without: this conversation alone fails.
        assert "killed by signal" in str(outcome), str(outcome)


def _outcome(render: Callable[[], str]) -> str | UserError | ChatTemplateProcessError:
    try:
        return render()
    except (UserError, ChatTemplateProcessError) as error:
        return error


def check_memory(helpers: Helpers) -> None:
    """The processes never had more address space than what they began with and the limit. (Linux tells; elsewhere there
    is no limit.)"""
    for pid in helpers.pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            limit, _ = psutil.Process(pid).rlimit(psutil.RLIMIT_AS)
        except (OSError, psutil.NoSuchProcess, AttributeError):
            continue
        peak = re.search(r"VmPeak:\s*(\d+) kB", status)
        if peak is not None:  # a zombie has no memory
            assert LIMITS.memory < limit < LIMITS.memory + MAX_IDLE_MEMORY
            assert int(peak[1]) * 1024 <= limit, f"{peak[1]} kB"


def _mutated(rng: random.Random) -> str:
    """A template of the corpus, several of them, or one with pieces of another in it."""
    names = list(TEMPLATES)
    source = TEMPLATES[rng.choice(names)]
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        other = TEMPLATES[rng.choice(names)]
        kind = rng.randrange(4)
        if kind == 0:
            source += other
        elif kind == 1:
            source = f"{{% for z in range({rng.choice([2, 99, 99999])}) %}}{source}{{% endfor %}}"
        elif kind == 2:
            source = _spliced(rng, source, other)
        else:
            source = re.sub(r"\d+", lambda match: match[0] * rng.choice([1, 1, 2]), source, count=20)
    return source


def _spliced(rng: random.Random, source: str, other: str) -> str:
    pieces, others = _PIECES.findall(source)[:5000], _PIECES.findall(other)[:5000]
    place = rng.randrange(len(pieces) + 1)
    start = rng.randrange(len(others) + 1)
    length, removed = rng.randrange(4), rng.randrange(3)
    return "".join(pieces[:place] + others[start : start + length] + pieces[place + removed :])


@contextmanager
def _target() -> Iterator[Attack]:
    yield TemplateAttack()


FUZZER = Fuzzer("templates", _target, num_test_cases=15)
