"""Chat templates: the conventions of Transformers, checked against it, and the limits on what a template may do."""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quire.errors import UserError
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import load_tokenizer

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}
        {{- message['content'] | trim }}
    {%- endif %}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{% endif %}
"""
STRICT = """\
{{ bos_token }}
{%- for message in messages -%}
    {%- if message.role == 'system' %}{% continue %}{% endif -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- set text = message.content %}
    {%- if loop.last %}{{ '[' ~ loop.length ~ '] ' }}{% endif -%}
    {{ message.role ~ ': ' ~ text }}{{ eos_token }}
{% endfor %}
"""
NAMESPACED = """\
{%- set ns = namespace(system='', seen=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.system = ns.system + message.content %}{% endif %}
    {%- set ns.seen = ns.seen + 1 %}
{%- endfor %}
{%- macro turn(role, text) %}<{{ role }}>{{ text | replace('<', '(') | indent(2) }}</{{ role }}>{% endmacro %}
{%- set body %}{% for message in messages if message.role != 'system' %}{{ turn(message.role, message.content) }}
{% endfor %}{% endset %}
{{- ns.system ~ '|' ~ ns.seen ~ '|' ~ messages | map(attribute='role') | join(',') ~ '|' ~ body }}
{{- '%s-%05.1f' % ('x', 2.5) }} {{ '{} {}'.format('a', 1) }} {{ messages[-1].content.split(' ')[-1].upper() }}
{{- messages | selectattr('role', 'equalto', 'user') | list | length }}
"""
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": " Größe * 1234567 <b> "},
    {"role": "assistant", "content": "Fine\nthanks "},
    {"role": "user", "content": "日本 & 'quotes'"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, SPECIAL)


def render(source: str, messages: list[dict[str, Any]] = CONVERSATION, **arguments: Any) -> str:
    return template(source).render(messages, **arguments)


def theirs(source: str, messages: list[dict[str, Any]] = CONVERSATION, **arguments: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, **SPECIAL, **arguments)
    return str(rendered[0])


@pytest.mark.parametrize("source", [CHATML, STRICT, NAMESPACED])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(source: str, add_generation_prompt: bool) -> None:
    ours = render(source, add_generation_prompt=add_generation_prompt)
    assert ours == theirs(source, add_generation_prompt=add_generation_prompt)
    assert "Größe" in ours


def test_tools_are_written_as_transformers_does() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "größer <than>"}}]
    ours = render(CHATML, tools=tools)
    assert ours == theirs(CHATML, tools=tools, add_generation_prompt=True)
    assert '"description": "größer <than>"' in ours


@pytest.mark.parametrize("source", [CHATML, "{% for m in messages %}{{ m.content | trim }};{% endfor %}"])
@pytest.mark.parametrize("content", ["The answer is ", "The answer", "x"])
def test_the_final_message_is_continued_as_in_transformers(source: str, content: str) -> None:
    messages = [*CONVERSATION, {"role": "assistant", "content": content}]
    ours = render(source, messages, continue_final_message=True, add_generation_prompt=False)
    assert ours == theirs(source, messages, continue_final_message=True)
    assert ours.endswith((content, content.rstrip()))


def test_options_reach_the_template() -> None:
    assert render(CHATML).endswith("assistant\n")
    assert render(CHATML, options={"enable_thinking": False}).endswith("<think></think>")


def test_tool_template_is_taken_when_there_are_tools() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert chat.render(CONVERSATION) == "plain"
    assert chat.render(CONVERSATION, tools=[{"name": "f"}]) == "tools"


def test_content_parts_are_flattened() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_an_assistant_may_have_no_content() -> None:
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    source = "{{ messages[0].content is none }} {{ messages[0].tool_calls[0].function.name }}"
    assert render(source, messages) == "True f"


def test_strftime_now() -> None:
    chat = ChatTemplate({"default": "{{ strftime_now('%d %b %Y') }}"}, {}, now=lambda: datetime(2026, 11, 21, 8, 0))
    assert chat.render(CONVERSATION) == "21 Nov 2026"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\] needs a role"),
        ([{"role": 7, "content": "x"}], "needs a role"),
        ([{"role": "user"}], "needs content"),
        ([{"role": "user", "content": None}], "needs content"),
        ([{"role": "user", "content": 7}], "must be a string or a list of parts"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "must be text, not 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "must be text"),
        ([{"role": "user", "content": ["x"]}], "must be text, not 'x'"),
    ],
)
def test_malformed_messages(messages: list[Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        render(CHATML, messages)
    assert caught.value.param == "messages"


def test_raise_exception_is_the_users_error() -> None:
    with pytest.raises(UserError, match="refuses these messages: roles must alternate") as caught:
        render(STRICT, [{"role": "assistant", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", ["messages", "tokenize", "chat_template", "add_generation_prompt", "tools"])
def test_reserved_options(name: str) -> None:
    with pytest.raises(UserError, match=f"must not set '{name}'") as caught:
        render(CHATML, options={name: True})
    assert caught.value.param == "chat_template_kwargs"


def test_continuing_excludes_a_generation_prompt() -> None:
    with pytest.raises(UserError, match="exclude each other"):
        render(CHATML, continue_final_message=True)


def test_continuing_needs_a_message_that_is_written() -> None:
    with pytest.raises(UserError, match="does not write the final message"):
        render("fixed", continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(UserError, match="has no content"):
        render(CHATML, [{"role": "assistant"}], continue_final_message=True, add_generation_prompt=False)


def test_no_template() -> None:
    with pytest.raises(UserError, match="no chat template") as caught:
        ChatTemplate({}, {}).render(CONVERSATION)
    assert caught.value.param == "messages"


def test_an_invalid_template() -> None:
    with pytest.raises(UserError, match="chat template is not valid"):
        render("{% for %}")


HOSTILE = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over messages": "{% for a in messages %}" * 14 + "{% endfor %}" * 14,
    "endless output": "{% for a in range(99999) %}{{ messages[0].content * 100 }}{% endfor %}",
    "long constants in loops": "{% for a in range(99999) %}" * 3 + "x" * 10_000 + "{% endfor %}" * 3,
    "constants kept in a block": "{% set t %}{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
    "multiplied text": "{{ ('x' * 9999) * 99999 }}",
    "multiplied list": "{{ ([1] * 9999999) * 9999 }}",
    "power": "{{ 9 ** 99999999 }}",
    "doubling by +": "{% set ns = namespace(t='x') %}{% for a in range(99) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(t='x') %}{% for a in range(99) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
    "doubling by blocks": "{% set ns = namespace(t='x') %}{% for a in range(99) %}"
    "{% set b %}{{ ns.t }}{{ ns.t }}{% endset %}{% set ns.t = b %}{% endfor %}",
    "doubling by macros": "{% macro d(n, t) %}{% if n %}{{ d(n - 1, t ~ t) }}{% endif %}{{ t }}{% endmacro %}"
    "{{ d(99, 'x') }}",
    "buffers in macros": "{% set t = 'x' * 9999999 %}"
    "{% macro f() %}{% for a in range(9999) %}{{ t }}{% endfor %}{% endmacro %}{{ f() | length }}",
    "centre": "{{ 'x' | center(999999999) }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "zfill": "{{ 'x'.zfill(999999999) }}",
    "indent": "{{ ('x\n' * 9999) | indent(9999) }}",
    "batch": "{{ [1] | batch(999999999, 'x') | list }}",
    "format width": "{{ '{:>999999999}'.format('x') }}",
    "percent width": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "replace filter": "{{ ('x' * 99999) | replace('x', 'y' * 9999) }}",
    "replace method": "{{ ('x' * 99999).replace('x', 'y' * 9999) }}",
    "join": "{{ ([('x' * 9999)] * 99999) | join('') }}",
    "join method": "{{ ('x' * 9999).join(['a'] * 99999) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(name: str) -> None:
    with pytest.raises(UserError, match="chat template was stopped"):
        render(HOSTILE[name])


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}{{ 1 / 0 }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{% include 'other' %}",
        "{{ range(1000000) | list }}",
        "{{ undefined_name.attribute }}",
        "{{ messages[0].content.missing() }}",
    ],
)
def test_what_fails_in_a_template_is_a_user_error(source: str) -> None:
    with pytest.raises(UserError, match=r"chat template (failed|was stopped)") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(UserError, match="failed"):
        render("{{ messages[0].update({'role': 'system'}) }}", messages)
    render(CHATML, messages, continue_final_message=True, add_generation_prompt=False)
    assert messages == [{"role": "user", "content": "x"}]


def test_a_long_honest_conversation_is_within_the_budget() -> None:
    turn = {"role": "user", "content": "line of text * 123456\n" * 400}
    answer = {"role": "assistant", "content": "{a: 1}\n" * 400}
    messages = [turn, answer] * 400 + [turn]
    assert render(NAMESPACED, messages).count("<user>") == 401
    assert len(render(CHATML, messages)) > 4_000_000


def test_an_exhausted_budget_does_not_outlive_its_rendering() -> None:
    chat = ChatTemplate(
        {"default": "{{ 'x' * n }}{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}"}, {}
    )
    with pytest.raises(UserError, match="too much work"):
        chat.render(CONVERSATION, options={"n": 1900})
    assert chat.render(CONVERSATION, options={"n": 3}) == "xxx"


def test_threads_render_on_their_own_budgets() -> None:
    chat = template("{% for a in range(n) %}{% for b in range(1000) %}{% endfor %}{% endfor %}done")
    results: list[str] = []
    barrier = threading.Barrier(2)

    def work() -> None:
        barrier.wait()
        results.append(chat.render(CONVERSATION, options={"n": 1200}))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["done"] * 2


def test_the_bundled_template(bundled_model_path: Any) -> None:
    chat = ChatTemplate.of(load_tokenizer(bundled_model_path))
    text = chat.render([{"role": "user", "content": "Sort a list"}], add_generation_prompt=True)
    assert "Sort a list" in text
    assert text.startswith("<|endoftext|>")
