"""Parsers by vLLM's names, and their detection from chat templates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.errors import ConfigError, nearest_name
from quire.parsers.brace_calls import BraceFormat
from quire.parsers.call_forms import ANY_TEXT, HARMONY_PREAMBLE, Form, Schemas, calls_or, harmony_calls, mistral_calls
from quire.parsers.harmony import MARKERS as HARMONY_MARKERS
from quire.parsers.harmony import parse_harmony
from quire.parsers.json_calls import JsonFormat, SectionFormat, parse_mistral
from quire.parsers.output import Output, call_id, short_call_id
from quire.parsers.pythonic import PythonicFormat
from quire.parsers.reader import Steps, TextReader
from quire.parsers.reasoning import Break, ThinkFormat
from quire.parsers.xml_calls import PairFormat, TagFormat

NONE = "none"
"""Name of no parser: text stays unchanged."""
AUTO = "auto"
"""Name that asks for detection from the chat templates."""

HARMONY, HARMONY_CALLS = "openai_gptoss", "openai"
"""Names of GPT-OSS's reasoning and tool parser."""


@dataclass(frozen=True)
class ToolFormat:
    """Format of a model family's calls. markers: texts that may be special tokens. breaks: beginnings of calls inside
    open reasoning. held: returns the constraint of an answer with optional calls (quire/parsers/call_forms.py); None:
    calls need no marker, or their arguments are not JSON. channels: the same for a format with channels. preamble:
    start of an answer in such a format. around: markers around content, which are omitted."""

    parse: Callable[[TextReader, Output], Steps[None]]
    markers: tuple[str, ...]
    new_id: Callable[[], str] = call_id
    breaks: tuple[Break, ...] = ()
    held: Callable[[Schemas, bool], Form] | None = None
    channels: Callable[[Schemas, Form | None], Form] | None = None
    preamble: Form | None = None
    around: tuple[str, ...] = ()

    def calls_or(self, schemas: Schemas, parallel: bool, answer: Form) -> Form:
        """Constraint to calls or to `answer`. Requires `held`."""
        assert self.held is not None
        if self.channels is not None:
            return self.channels(schemas, answer)
        return calls_or(self.held(schemas, parallel), answer)


def _of(form: JsonFormat | SectionFormat | TagFormat | PairFormat | PythonicFormat | BraceFormat) -> ToolFormat:
    held = None
    if isinstance(form, SectionFormat) or (isinstance(form, JsonFormat) and not form.is_bare):
        held = form.held
    around = form.around if isinstance(form, JsonFormat) else ()
    return ToolFormat(form.parse, form.markers, breaks=form.breaks, held=held, around=around)


_WRAPPERS = frozenset({"arguments", "input"})


def _dsml(section: str) -> ToolFormat:
    bar = "｜DSML｜"
    names = f"<{bar}{section}>", f"</{bar}{section}>", f"<{bar}invoke name=", f"</{bar}invoke>"
    form = TagFormat(*names, f"<{bar}parameter name=", f"</{bar}parameter>", is_bare=True, wrappers=_WRAPPERS)
    return ToolFormat(form.parse, (*form.markers, bar), breaks=form.breaks)


def _cohere(begin: str, end: str) -> ToolFormat:
    form = JsonFormat(
        ("<|START_ACTION|>",),
        ("<|END_ACTION|>",),
        name="tool_name",
        arguments="parameters",
        identifier="tool_call_id",
        around=(begin, end),
    )
    return _of(form)


def _functions(section: str) -> ToolFormat:
    section_tags = f"<{section}>", f"</{section}>"
    return _of(
        TagFormat(*section_tags, "<function=", "</function>", "<parameter=", "</parameter>", is_bare=True, trims=True)
    )


_HERMES = _of(JsonFormat(("<tool_call>",), ("</tool_call>",)))
_LLAMA_JSON = _of(JsonFormat(("<|python_tag|>",), is_bare=True, is_anywhere=True))
_DEEPSEEK = _of(
    SectionFormat(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    )
)
_GLM = _of(PairFormat())
_QWEN_CODER = _functions("tool_call")

_COMMAND3 = "<|START_RESPONSE|>", "<|END_RESPONSE|>"
_COMMAND4 = "<|START_TEXT|>", "<|END_TEXT|>"

TOOL_FORMATS: dict[str, ToolFormat] = {
    "cohere_command3": _cohere(*_COMMAND3),
    "cohere_command4": _cohere(*_COMMAND4),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "ernie45": _of(JsonFormat(("<tool_call>",), ("</tool_call>",), around=("<response>", "</response>"))),
    "functiongemma": _of(BraceFormat("<start_function_call>", "<end_function_call>", "<escape>")),
    "gemma4": _of(BraceFormat("<|tool_call>", "<tool_call|>", '<|"|>')),
    "gigachat3": _of(JsonFormat(("<|function_call|>", "function call<|role_sep|>"), around=("<|message_sep|>",))),
    "glm45": _GLM,
    "glm47": _GLM,
    "granite-20b-fc": _of(JsonFormat(("<function_call>",))),
    "granite": _of(JsonFormat(("<|tool_call|>", "<tool_call>"), ("</tool_call>",), is_bare=True)),
    "granite4": _HERMES,
    "hermes": _HERMES,
    "hunyuan_a13b": _of(JsonFormat(("<tool_calls>",), ("</tool_calls>",))),
    "internlm": _of(
        JsonFormat(
            ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), ("<|action_end|>",), arguments="parameters"
        )
    ),
    "jamba": _of(JsonFormat(("<tool_calls>",), ("</tool_calls>",))),
    "kimi_k2": _of(
        SectionFormat(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        )
    ),
    "lfm2": _of(PythonicFormat("<|tool_call_start|>", "<|tool_call_end|>", is_bare=False)),
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "llama4_pythonic": _of(PythonicFormat("<|python_start|>", "<|python_end|>")),
    "longcat": _of(JsonFormat(("<longcat_tool_call>",), ("</longcat_tool_call>",))),
    "mimo": _QWEN_CODER,
    "minicpm5": _of(
        TagFormat(
            "",
            "",
            "<function name=",
            "</function>",
            "<param name=",
            "</param>",
            is_bare=True,
            quotes=("<![CDATA[", "]]>"),
        )
    ),
    "minimax_m2": _of(
        TagFormat(
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            "<invoke name=",
            "</invoke>",
            "<parameter name=",
            "</parameter>",
        )
    ),
    "mistral": ToolFormat(
        parse_mistral,
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        short_call_id,
        breaks=(Break("[TOOL_CALLS]"),),
        held=mistral_calls,
    ),
    "olmo3": _of(PythonicFormat("<function_calls>", "</function_calls>", is_bare=False, has_brackets=False)),
    HARMONY_CALLS: ToolFormat(
        parse_harmony,
        HARMONY_MARKERS,
        held=lambda schemas, _: harmony_calls(schemas, ANY_TEXT),
        channels=harmony_calls,
        preamble=HARMONY_PREAMBLE,
    ),
    "phi4_mini_json": _of(JsonFormat(("functools", "<|tool_call|>"), ("<|/tool_call|>",))),
    "pythonic": _of(PythonicFormat()),
    "qwen3_coder": _QWEN_CODER,
    "qwen3_xml": _QWEN_CODER,
    "seed_oss": _functions("seed:tool_call"),
    "step3p5": _QWEN_CODER,
    "xlam": _of(
        JsonFormat(("```json", "```", "[TOOL_CALLS]", "<tool_call>"), ("```", "</tool_call>"), is_bare=True, knows=True)
    ),
}

_THINK = ThinkFormat()
_THINK_OPEN = ThinkFormat(is_open=True)
HARMONY_REASONING = ThinkFormat(("<|channel|>analysis<|message|>",), ("<|end|>",))
"""Reasoning markers of GPT-OSS, for counting tokens; `parse_harmony` splits the text."""


def _cohere_thoughts(begin: str, end: str) -> ThinkFormat:
    return ThinkFormat(("<|START_THINKING|>",), ("<|END_THINKING|>",), around=(begin, end))


REASONING_FORMATS: dict[str, ThinkFormat] = {
    "cohere_command3": _cohere_thoughts(*_COMMAND3),
    "cohere_command4": _cohere_thoughts(*_COMMAND4),
    "deepseek_r1": _THINK_OPEN,
    "deepseek_v3": _THINK,
    "deepseek_v4": _THINK,
    "ernie45": _THINK_OPEN,
    "gemma4": ThinkFormat(("<|channel>thought\n", "<|channel>"), ("<channel|>",)),
    "glm45": _THINK,
    "glm47": _THINK,
    "granite": ThinkFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "holo2": _THINK,
    "hunyuan_a13b": ThinkFormat(
        ("<think>\n", "<think>"), ("\n</think>", "</think>"), around=("\n<answer>\n", "\n</answer>")
    ),
    "kimi_k2": _THINK,
    "mimo": _THINK,
    "minimax_m2": _THINK_OPEN,
    "minimax_m2_append_think": ThinkFormat(is_open=True, stays=True),
    "mistral": ThinkFormat(("[THINK]",), ("[/THINK]",)),
    "nemotron_v3": _THINK,
    "olmo3": _THINK,
    HARMONY: HARMONY_REASONING,
    "qwen3": _THINK,
    "seed_oss": ThinkFormat(("<seed:think>",), ("</seed:think>",), is_open=True),
    "step3": _THINK_OPEN,
    "step3p5": _THINK_OPEN,
}

_TOOL_SIGNS: tuple[tuple[str, str | None], ...] = (
    ("]<]minimax[>[", None),
    ("｜DSML｜tool_calls", "deepseek_v4"),
    ("dsml_token + 'tool_calls>", "deepseek_v4"),
    ("｜DSML｜", "deepseek_v32"),
    ("<｜tool▁sep｜>", "deepseek_v31"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<longcat_tool_call>", "longcat"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<function_calls>", "olmo3"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<|START_TEXT|>", "cohere_command4"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<|function_call|>", "gigachat3"),
    ("<function_call>", "granite-20b-fc"),
    ("<function name=", "minicpm5"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "llama4_pythonic"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("[func_name1(", "pythonic"),
    ('{"name": function name', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
    ("<|plugin|>", "internlm"),
    ("<|tool|>", "phi4_mini_json"),
    ("functools[", "phi4_mini_json"),
    ("<tool_calls>", "jamba"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
)
"""(text in a chat template, parser or None), most certain first."""
_REASONING_SIGNS: tuple[tuple[str, str], ...] = (
    ("[THINK]", "mistral"),
    ("<|channel>", "gemma4"),
    ("<|START_TEXT|>", "cohere_command4"),
    ("<|START_THINKING|>", "cohere_command3"),
    ("<seed:think>", "seed_oss"),
    ("Here is my thought process:", "granite"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<arg_key>", "glm45"),
    ("<think>", "qwen3"),
    ("</think>", "qwen3"),
)

_THINKING = ("think>", "[THINK]", "thought process:", "<|channel>", "<|START_THINKING|>")
"""Texts of which one is in each template of a reasoning model."""


def detect_tool_parser(templates: Iterable[str]) -> str | None:
    """Tool parser for these chat templates, if they show a known format."""
    source = "\n".join(templates)
    if _is_harmony(source):
        return HARMONY_CALLS
    return next((name for sign, name in _TOOL_SIGNS if sign in source), None)


def detect_reasoning_parser(templates: Iterable[str]) -> str | None:
    """Reasoning parser for these chat templates, if they show one."""
    source = "\n".join(templates)
    if _is_harmony(source):
        return HARMONY
    if not any(mark in source for mark in _THINKING):
        return None
    return next((name for sign, name in _REASONING_SIGNS if sign in source), None)


def _is_harmony(source: str) -> bool:
    return all(mark in source for mark in ("<|channel|>", "<|message|>", "<|start|>"))


def tool_format(name: str) -> ToolFormat:
    """Call format of a tool parser, at the server's start. Raises ConfigError for an unknown name."""
    if name not in TOOL_FORMATS:
        raise _unknown("tool_call_parser", name, TOOL_FORMATS)
    return TOOL_FORMATS[name]


def reasoning_format(name: str) -> ThinkFormat:
    """Format of a reasoning parser, at the start. Raises ConfigError for an unknown name."""
    if name not in REASONING_FORMATS:
        raise _unknown("reasoning_parser", name, REASONING_FORMATS)
    return REASONING_FORMATS[name]


def _unknown(param: str, name: str, known: Iterable[str]) -> ConfigError:
    known = (*known, AUTO, NONE)
    listed = ", ".join(sorted(known))
    return ConfigError(f"{param}: unknown parser {name!r}{nearest_name(name, known)} (known: {listed})", param=param)
