"""What templates expect of messages: strings or parts, developers or not."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from quire.tokenization.template_content import adapt_message, knows_role, wants_parts

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages[1:] %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}", True),
        (
            "{% set all = messages[1:] %}{% for m in all %}{% for c in m.content | list %}x{% endfor %}{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{% for c in m.tool_calls %}x{% endfor %}{% endfor %}", False),
        ("{% for m in other %}{% for c in m.content %}x{% endfor %}{% endfor %}", False),
        ("{% for i, m in messages %}{% for c in m.content %}x{% endfor %}{% endfor %}", False),
        ("{% set a = b %}{% set b = a %}{% for m in b %}{{ m }}{% endfor %}", False),
    ],
)
def test_templates_that_loop_over_content(source: str, expected: bool) -> None:
    assert wants_parts(jinja2.Environment().parse(source)) == expected


def test_templates_that_know_developers() -> None:
    parse = jinja2.Environment().parse
    assert knows_role(parse("{% if m.role == 'developer' %}x{% endif %}"), "developer")
    assert knows_role(parse("{% if m.role in ['system', 'developer'] %}x{% endif %}"), "developer")
    assert not knows_role(parse("{{ m.role }} developer"), "developer")


@pytest.mark.parametrize(
    ("role", "content", "as_parts", "expected"),
    [
        ("user", PARTS[:1], False, "a"),
        ("user", PARTS, False, "a\nb"),
        ("user", PARTS, True, PARTS),
        ("assistant", None, False, ""),
        ("assistant", None, True, []),
        ("tool", PARTS, True, "a\nb"),
    ],
)
def test_content(role: str, content: Any, as_parts: bool, expected: Any) -> None:
    message = {"role": role, "content": content, "fields": {}}
    assert adapt_message(message, as_parts=as_parts, knows_developer=False)["content"] == expected


def test_developers() -> None:
    message = {"role": "developer", "content": PARTS[:1], "fields": {"tools": [{}]}}
    expected = {"role": "developer", "content": "a", "tools": [{}]}
    assert adapt_message(message, as_parts=False, knows_developer=True) == expected
    assert adapt_message(message, as_parts=False, knows_developer=False) == {"role": "system", "content": "a"}
