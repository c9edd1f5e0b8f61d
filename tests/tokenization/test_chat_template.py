"""Chat templates: the conventions of Transformers, checked against it, and what is refused.

test_helpers.py has the limits on what a template may do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quire.errors import PromptTooLongError, UserError
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.jobs import TemplateLimits
from quire.tokenization.tokenizer import load_tokenizer
from tests.tokenization.build import written

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


@cache
def template(source: str) -> ChatTemplate:
    """Each starts a process, so tests share them."""
    return opened(ChatTemplate({"default": source}, SPECIAL))


def opened(chat: ChatTemplate) -> ChatTemplate:
    OPENED.append(chat)
    return chat


OPENED: list[ChatTemplate] = []


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().helpers.close()
    template.cache_clear()  # a process that runs tests may come back to this module


def render(source: str, messages: list[dict[str, Any]] = CONVERSATION, **arguments: Any) -> str:
    return written(template(source), messages, **arguments)


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


REWRITES = (
    "", "| trim", "| upper", "| lower", "| title", "| capitalize", "| e", "| replace('<', '&lt;')",
    "| replace('_', ' ')", "| replace(' ', '')", "| tojson",
    "| urlencode", "| truncate(12)", "| reverse", "| wordwrap(5)", "| striptags",
    ".split('</think>')[-1]", ".split('</think>')[-1].lstrip()", "[:4]", ".strip() + ' '", "| replace('|', '')",
)  # fmt: skip
"""What templates do to the content of a message."""


def continued(write: Callable[..., str], source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """The text that ends inside the final message; None for a refusal."""
    try:
        return write(source, messages, continue_final_message=True, **options)
    except (UserError, ValueError):
        return None


def rewriting(how: str) -> str:
    """A template that does something to the content of each message."""
    return "{% for m in messages %}[{{ m.content " + how + " }}];{% endfor %}"


@pytest.mark.parametrize("source", [CHATML, *map(rewriting, REWRITES)])
def test_the_final_message_is_continued_as_in_transformers(source: str) -> None:
    contents = (
        "The answer is ", "The answer", "x", "", " ", "A < B", "a_b  c", "<think>a</think> b", "<|im_end|> x", "GO ON",
        "\n\ta\n", "12", "it's &amp;",
    )  # fmt: skip
    for content in contents:
        messages = [*CONVERSATION, {"role": "assistant", "content": content}]
        ours = continued(render, source, messages, add_generation_prompt=False)
        assert ours == continued(theirs, source, messages), (source, content)


def test_continuing_a_message_of_parts() -> None:
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text | trim }}]{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "One. "}, {"type": "text", "text": "Two "}]
    asked = {"role": "user", "content": [{"type": "text", "text": "Say."}]}
    messages = [asked, {"role": "assistant", "content": parts}]
    ours = continued(render, source, messages, add_generation_prompt=False)
    assert ours == continued(theirs, source, messages) == "[Say.][One.][Two"


def test_options_reach_the_template() -> None:
    assert render(CHATML).endswith("assistant\n")
    assert render(CHATML, options={"enable_thinking": False}).endswith("<think></think>")


def test_tool_template_is_taken_when_there_are_tools() -> None:
    chat = opened(ChatTemplate({"default": "plain", "tool_use": "tools"}, {}))
    assert written(chat, CONVERSATION) == "plain"
    assert written(chat, CONVERSATION, tools=[{"name": "f"}]) == "tools"


def test_content_parts_are_flattened() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_an_assistant_may_have_no_content() -> None:
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    source = "{{ messages[0].content == '' }} {{ messages[0].tool_calls[0].function.name }}"
    assert render(source, messages) == "True f"


def test_strftime_now() -> None:
    now = datetime(2026, 11, 21, 8, 0)
    chat = opened(ChatTemplate({"default": "{{ strftime_now('%d %b %Y') }}"}, {}, now=lambda: now))
    assert written(chat, CONVERSATION) == "21 Nov 2026"


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
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]\.content\[0\]\.image_url: an image needs a URL",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "needs a text"),
        ([{"role": "user", "content": [7]}], "must be a string or an object, not 7"),
    ],
)
def test_malformed_messages(messages: list[Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        render(CHATML, messages)
    assert (caught.value.param or "").startswith("messages")
    assert caught.value.message.startswith((caught.value.param or "").partition(".")[0])


def test_raise_exception_is_the_users_error() -> None:
    with pytest.raises(UserError, match="refuses these messages: roles must alternate") as caught:
        render(STRICT, [{"role": "assistant", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "name", ["messages", "tokenize", "chat_template", "add_generation_prompt", "tools", "raise_exception", "namespace"]
)
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
        written(ChatTemplate({}, {}), CONVERSATION)
    assert caught.value.param == "messages"


def test_an_invalid_template_is_refused_by_the_first_request_and_all_others() -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="chat template is not valid: Expected an expression") as caught:
            render("{% for %}")
        assert caught.value.param == "messages"


def test_a_template_that_is_no_unicode() -> None:
    with pytest.raises(UserError, match="chat template is not valid: it is not valid Unicode"):
        render("\ud800")


def test_a_template_that_is_too_large() -> None:
    with pytest.raises(UserError, match=r"chat template is not valid: it is larger than 16\.0 MiB"):
        render("x" * 2**24)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("\ud800", "messages is not valid Unicode"),
        (object(), "objects of type object cannot be given to a chat template"),
        (2**64, "cannot be given"),
    ],
)
def test_values_that_cannot_be_sent(extra: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        render(CHATML, [{"role": "user", "content": "x", "extra": extra}])
    assert caught.value.param == "messages"


def test_values_nested_too_deeply() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(UserError, match="nested too deeply"):
        render(CHATML, [{"role": "user", "content": "x", "extra": nested}])


def test_a_conversation_that_is_too_large() -> None:
    chat = ChatTemplate({"default": CHATML}, {}, limits=TemplateLimits(memory=2**20))
    with pytest.raises(UserError, match="a chat template is given at most 131072") as caught:
        written(chat, [{"role": "user", "content": "x" * 2**18}])
    assert caught.value.param == "messages"
    assert chat.helpers.pids == []


def test_values_of_other_kinds() -> None:
    message = MappingProxyType({"role": "user", "content": "x", "t": (1, 2), "m": MappingProxyType({"k": None})})
    assert render("{{ messages[0].t[1] }}{{ messages[0].m.k }}", [message]) == "2None"  # type: ignore[list-item]


def test_a_text_that_is_too_long() -> None:
    assert len(render("{{ messages[0].content }}", [{"role": "user", "content": "xy"}], max_characters=2)) == 2
    with pytest.raises(PromptTooLongError, match="more than 1 characters") as caught:
        render("{{ messages[0].content }}", [{"role": "user", "content": "xy"}], max_characters=1)
    assert caught.value.param == "messages"


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(UserError, match="failed"):
        render("{{ messages[0].update({'role': 'system'}) }}", messages)
    render(CHATML, messages, continue_final_message=True, add_generation_prompt=False)
    assert messages == [{"role": "user", "content": "x"}]


def test_a_long_honest_conversation_is_within_the_limits() -> None:
    turn = {"role": "user", "content": "line of text * 123456\n" * 400}
    answer = {"role": "assistant", "content": "{a: 1}\n" * 400}
    messages = [turn, answer] * 400 + [turn]
    assert render(NAMESPACED, messages).count("<user>") == 401
    assert len(render(CHATML, messages)) > 4_000_000


def test_the_bundled_template(bundled_model_path: Any) -> None:
    chat = opened(ChatTemplate.of(load_tokenizer(bundled_model_path)))
    text = written(chat, [{"role": "user", "content": "Sort a list"}], add_generation_prompt=True)
    assert "Sort a list" in text
    assert text.startswith("<|endoftext|>")
