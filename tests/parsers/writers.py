"""How each family of models writes tool calls, as its chat template shows them: what the parsers read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Call = tuple[str, dict[str, Any]]
Writer = Callable[[list[Call]], str]


def _json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls)


def _list(start: str, end: str) -> Writer:
    return lambda calls: start + "[" + ", ".join(map(_json, calls)) + "]" + end


def llama_json(calls: list[Call]) -> str:
    return "; ".join(_json(call, "parameters") for call in calls)


def deepseek_v3(calls: list[Call]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: list[Call]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def kimi(calls: list[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def mistral_names(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def mistral_ids(calls: list[Call]) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]abc{index:06d}[ARGS]{json.dumps(arguments)}"
        for index, (name, arguments) in enumerate(calls)
    )


def qwen_coder(calls: list[Call], section: str = "tool_call") -> str:
    def one(call: Call) -> str:
        parameters = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in call[1].items())
        return f"<{section}>\n<function={call[0]}>\n{parameters}</function>\n</{section}>"

    return "\n".join(map(one, calls))


def seed_oss(calls: list[Call]) -> str:
    return qwen_coder(calls, "seed:tool_call")


def minimax(calls: list[Call]) -> str:
    def one(call: Call) -> str:
        parameters = "".join(f'<parameter name="{key}">{_text(value)}</parameter>\n' for key, value in call[1].items())
        return f'<invoke name="{call[0]}">\n{parameters}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(map(one, calls))}</minimax:tool_call>"


def dsml(calls: list[Call], section: str = "function_calls") -> str:
    def one(call: Call) -> str:
        parameters = "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{_text(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in call[1].items()
        )
        return f'<｜DSML｜invoke name="{call[0]}">\n{parameters}</｜DSML｜invoke>\n'

    return f"<｜DSML｜{section}>\n{''.join(map(one, calls))}</｜DSML｜{section}>"


def glm(calls: list[Call]) -> str:
    def one(call: Call) -> str:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in call[1].items()
        )
        return f"<tool_call>{call[0]}\n{pairs}</tool_call>"

    return "\n".join(map(one, calls))


def _python_call(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def pythonic(calls: list[Call]) -> str:
    return "[" + ", ".join(map(_python_call, calls)) + "]"


def olmo(calls: list[Call]) -> str:
    return "<function_calls>\n" + "\n".join(map(_python_call, calls)) + "\n</function_calls>"


def harmony(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def command(calls: list[Call]) -> str:
    written = (
        json.dumps({"tool_call_id": str(index), "tool_name": name, "parameters": arguments}, ensure_ascii=False)
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|START_ACTION|>[{', '.join(written)}]<|END_ACTION|>"


def braces(start: str, end: str, quote: str) -> Writer:
    def value(found: Any) -> str:
        match found:
            case str():
                return f"{quote}{found}{quote}"
            case list():
                return f"[{','.join(map(value, found))}]"
            case dict():
                return f"{{{','.join(f'{key}:{value(each)}' for key, each in found.items())}}}"
        return json.dumps(found)

    return lambda calls: "".join(f"{start}call:{name}{value(arguments)}{end}" for name, arguments in calls)


def minicpm(calls: list[Call]) -> str:
    def value(found: Any) -> str:
        return f"<![CDATA[{found}]]>" if isinstance(found, str) else json.dumps(found)

    return "\n".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{key}">{value(each)}</param>' for key, each in arguments.items())
        + "</function>"
        for name, arguments in calls
    )


WRITERS: list[tuple[str, Writer]] = [
    ("hermes", hermes),
    ("granite", _list("<|tool_call|>", "")),
    ("hunyuan_a13b", _list("<tool_calls>", "</tool_calls>")),
    ("jamba", _list("<tool_calls>", "</tool_calls>")),
    ("phi4_mini_json", _list("functools", "")),
    ("internlm", lambda calls: f"<|action_start|><|plugin|>{_json(calls[0], 'parameters')}<|action_end|>"),
    ("longcat", lambda calls: "".join(f"<longcat_tool_call>{_json(call)}</longcat_tool_call>" for call in calls)),
    ("llama3_json", llama_json),
    ("llama3_json", lambda calls: "<|python_tag|>" + llama_json(calls)),
    ("deepseek_v3", deepseek_v3),
    ("deepseek_v31", deepseek_v31),
    ("deepseek_v32", dsml),
    ("deepseek_v4", lambda calls: dsml(calls, "tool_calls")),
    ("kimi_k2", kimi),
    ("mistral", mistral_names),
    ("mistral", mistral_ids),
    ("mistral", lambda calls: mistral_names(calls).replace("[ARGS]", "")),
    ("mistral", _list("[TOOL_CALLS]", "")),
    ("qwen3_coder", qwen_coder),
    ("seed_oss", seed_oss),
    ("minimax_m2", minimax),
    ("glm45", glm),
    ("glm47", lambda calls: glm(calls).replace("\n", "")),
    ("pythonic", pythonic),
    ("llama4_pythonic", lambda calls: f"<|python_start|>{pythonic(calls)}<|python_end|>"),
    ("lfm2", lambda calls: f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"),
    ("olmo3", olmo),
    ("openai", harmony),
    ("cohere_command3", command),
    ("cohere_command4", command),
    ("ernie45", hermes),
    ("functiongemma", braces("<start_function_call>", "<end_function_call>", "<escape>")),
    ("gemma4", braces("<|tool_call>", "<tool_call|>", '<|"|>')),
    ("gigachat3", lambda calls: f"function call<|role_sep|>\n{_json(calls[0])}"),
    ("gigachat3", lambda calls: f"<|function_call|>{_json(calls[0])}"),
    ("granite-20b-fc", lambda calls: " ".join(f"<function_call> {_json(call)}" for call in calls)),
    ("mimo", qwen_coder),
    ("minicpm5", minicpm),
    ("minicpm5", lambda calls: minicpm(calls).replace("<![CDATA[", "").replace("]]>", "")),
    ("xlam", _list("", "")),
    ("xlam", _list("```json\n", "\n```")),
    ("xlam", _list("```\n", "\n```")),
    ("xlam", _list("<tool_call>", "</tool_call>")),
]
ONE_CALL = {"internlm", "gigachat3"}
NO_LEADING_TEXT = {"pythonic", "openai", "xlam"}
"""Formats without a marker, or with headers: plain content cannot stand before their calls."""
