"""What renders chat templates, called here in this process: what a template can reach, and what its errors become."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest

from quire.tokenization.conversation import messages_of
from quire.tokenization.jobs import Failed, Render, Rendered, Setup, TemplateLimits
from quire.tokenization.template_renderer import MAX_REASON_CHARACTERS, TemplateRenderer
from tests.architecture.source import ROOT

MESSAGES = bytes(messages_of([{"role": "user", "content": "x"}]).encoded)


def answer(source: str, *, max_characters: int = 1000, **variables: Any) -> Rendered | Failed:
    renderer = TemplateRenderer(Setup({"default": source}, {"bos_token": "<s>"}, TemplateLimits()))
    return renderer.answer(Render("default", variables, datetime(2026, 11, 21), max_characters), MESSAGES)


def test_variables_win_over_special_tokens() -> None:
    assert answer("{{ bos_token }}{{ a }}", a=1) == Rendered("<s>1")
    assert answer("{{ bos_token }}", bos_token="<x>") == Rendered("<x>")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ lipsum.__globals__.x }}",
        "{{ strftime_now.__globals__.x }}",
        "{{ '{0.__class__}'.format(1) }}{{ ''.format_map.__self__.x }}",
        "{% set ns = namespace(__class__=1) %}{{ ns.__class__.__mro__ }}",
        "{{ (namespace() | attr('__init__')).__globals__ }}",
        "{{ cycler(1).__init__.__globals__.x }}",
        "{% include 'other' %}",
        "{{ range(1000000) | list }}",
        "{{ undefined_name.attribute }}",
        "{{ messages[0].content.missing() }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ '\\ud800' }}",
    ],
)
def test_what_fails(source: str) -> None:
    failed = answer(source)
    assert isinstance(failed, Failed)
    assert failed.kind == "failed"
    assert failed.reason


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ a",
        "{{ 1 | no_such_filter }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    ],
)
def test_what_does_not_compile(source: str) -> None:
    failed = answer(source)
    assert isinstance(failed, Failed)
    assert failed.kind == "invalid"
    assert failed.reason


def test_a_refusal_is_cut() -> None:
    assert answer("{{ raise_exception('no ' ~ messages[0].role) }}") == Failed("refused", "no user")
    assert answer("{{ raise_exception('x' * 9999) }}") == Failed("refused", "x" * MAX_REASON_CHARACTERS)
    assert answer("{{ raise_exception('\\ud800') }}") == Failed("refused", "?")


def test_a_text_is_rendered_no_further_than_to_its_limit() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    assert answer(endless, max_characters=10) == Failed("length")
    assert answer("{{ 'x' * 10 }}", max_characters=10) == Rendered("x" * 10)


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = TemplateRenderer(Setup({"default": "{{ n }}"}, {}, TemplateLimits()))
    compiled: list[str] = []
    parse = renderer._environment.parse

    def count(source: str) -> Any:
        compiled.append(source)
        return parse(source)

    monkeypatch.setattr(renderer._environment, "parse", count)
    for number in range(3):
        render = Render("default", {"n": number}, datetime(2026, 11, 21), 9)
        assert renderer.answer(render, MESSAGES) == Rendered(str(number))
    assert compiled == ["{{ n }}"]


LIST_MODULES = "import json, sys; import {}; print(json.dumps(sorted(sys.modules)))"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("quire.tokenization.helper_process", {"torch", "numpy", "tokenizers", "fastapi", "transformers", "zmq"}),
        # The server's own process does without Jinja.
        ("quire.engine.input_processor", {"jinja2", "torch"}),
    ],
)
def test_what_is_imported(module: str, absent: set[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIST_MODULES.format(module)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    imported = set(json.loads(run.stdout))
    assert module in imported
    assert not absent & imported
    if module == "quire.tokenization.helper_process":
        ours = {name for name in imported if name.startswith("quire.")}
        assert ours == {
            "quire.tokenization",
            "quire.tokenization.helper_process",
            "quire.tokenization.jobs",
            "quire.tokenization.template_content",
            "quire.tokenization.template_renderer",
            "quire.utils",
            "quire.utils.child_process",
            "quire.utils.frames",
            "quire.version",
        }
