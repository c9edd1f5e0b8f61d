"""`quire completion bash|zsh|fish`: prints a static script that completes commands and flags in a shell."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.cli.bench_mode import Mode
from quire.cli.parser import Parser

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class CommandWords:
    """Command, or its mode. flags: spelling -> help. values: flag with a value, or "" for the first argument -> known
    words."""

    text: str
    flags: Mapping[str, str]
    values: Mapping[str, tuple[str, ...]]


def build_parser() -> Parser:
    parser = Parser(
        prog="quire completion",
        usage="quire completion bash|zsh|fish",
        description="Print a script for a shell: source <(quire completion bash), or write it to a file that it reads.",
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    return parser


def main(arguments: Sequence[str]) -> int:
    write = {"bash": _bash, "zsh": _zsh, "fish": _fish}[build_parser().parse(arguments).shell]
    print(write(commands()), end="")
    return 0


def commands() -> dict[str, CommandWords]:
    from quire.cli.main import COMMANDS

    found = {}
    for name, (module, text) in COMMANDS.items():
        code = importlib.import_module(module)
        modes: Mapping[str, Mode] = getattr(code, "MODES", {})
        found[name] = CommandWords(text, {}, {"": tuple(modes)}) if modes else _described(text, code.build_parser())
        for mode, each in modes.items():
            found[f"{name} {mode}"] = _described(each.summary, each.build_parser(f"quire {name} {mode}"))
    return found


def known_words() -> dict[str, tuple[str, ...]]:
    """Accepted words of text options, by name."""
    from quire import envs
    from quire.config import adapters, device, fallback, load, mla_prompt, parallel, pooling, resolve, resolve_device
    from quire.parsers import registry
    from quire.server import settings

    return {
        "runner": pooling.RUNNERS,
        "dtype": resolve.DTYPES,
        "device": resolve_device.DEVICES,
        "load_format": resolve.LOAD_FORMATS,
        "model_impl": fallback.MODEL_IMPLS,
        "logprobs_mode": resolve.LOGPROBS_MODES,
        "lora_dtype": adapters.DTYPES,
        "quantization": (*resolve.QUANTIZATIONS, *resolve.STORED_QUANTIZATIONS),
        "scheduling_policy": resolve.SCHEDULING_POLICIES,
        "preemption_mode": resolve.PREEMPTION_MODES,
        "ray_placement": parallel.RAY_PLACEMENTS,
        "distributed_executor_backend": ("auto", *parallel.EXECUTORS),
        "expert_placement_strategy": load.EXPERT_PLACEMENTS,
        "attention_backend": resolve_device.BACKENDS,
        "kv_cache_dtype": resolve.CACHE_DTYPES["triton"],
        "mla_prompt": mla_prompt.MLA_PROMPTS,
        "matmul_precision": resolve.MATMUL_PRECISIONS,
        "activation_bits": resolve.ACTIVATION_BITS,
        "cuda_graphs": ("auto", *device.CUDA_GRAPHS),
        "metrics_names": settings.METRICS_NAMES,
        "per_request_spec_decode_metrics": settings.DRAFT_LEVELS,
        "dialect": settings.DIALECTS,
        "log_format": envs.LOG_FORMATS,
        "collect_detailed_traces": settings.DETAILED_TRACES,
        "api": (settings.OLLAMA, settings.LLAMA_CPP, settings.NO_DOORS),
        "tool_call_parser": (registry.AUTO, registry.NONE, *registry.TOOL_FORMATS),
        "reasoning_parser": (registry.AUTO, registry.NONE, *registry.REASONING_FORMATS),
    }


def _described(text: str, parser: Parser) -> CommandWords:
    flags: dict[str, str] = {}
    values: dict[str, tuple[str, ...]] = {}
    known = {**known_words(), "help": parser.group_names}
    for action in parser._actions:
        line = (action.help or "").replace("%%", "%").partition("\n")[0]
        flags |= dict.fromkeys(action.option_strings, line)
        words = tuple(map(str, action.choices or known.get(action.dest, ())))
        if words or (action.option_strings and action.nargs not in (0, "?")):
            values |= dict.fromkeys(action.option_strings or [""], words)
    return CommandWords(text, flags, values)


def _words(words: Sequence[str]) -> str:
    return shlex.quote(" ".join(words))


def _cases(found: Mapping[str, CommandWords]) -> list[str]:
    lines = []
    for name, command in found.items():
        by_words: dict[tuple[str, ...], list[str]] = {}
        for flag, values in command.values.items():
            if flag:
                by_words.setdefault(values, []).append(shlex.quote(f"{name}:{flag}"))
        lines += [f"    {'|'.join(flags)}) words={_words(values)} ;;" for values, flags in by_words.items()]
        words = [*command.values.get("", ()), *command.flags]
        lines.append(f"    {shlex.quote(name)}:*) words={_words(words)} ;;")
    return lines


def _with_modes(found: Mapping[str, CommandWords]) -> str:
    return "|".join(sorted({name.partition(" ")[0] for name in found if " " in name}))


def _bash(found: Mapping[str, CommandWords]) -> str:
    first = [*(name for name in found if " " not in name), "--help", "--version"]
    return "\n".join(
        [
            "# Completes `quire` in bash; a word that is none of its own is a file's name.",
            "_quire() {",
            "  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}",
            "  local command=${COMP_WORDS[1]} words=",
            '  [ "$current" = "=" ] && current=',
            '  [ "$before" = "=" ] && before=${COMP_WORDS[COMP_CWORD-2]}',
            f'  [ "$COMP_CWORD" -gt 2 ] && case "$command" in {_with_modes(found)})',
            '    command+=" ${COMP_WORDS[2]}" ;;',
            "  esac",
            f'  [ "$COMP_CWORD" = 1 ] && words={_words(first)}',
            '  [ "$COMP_CWORD" = 1 ] || case "$command:$before" in',
            *_cases(found),
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _quire quire",
            "",
        ]
    )


def _zsh(found: Mapping[str, CommandWords]) -> str:
    first = " ".join([*(name for name in found if " " not in name), "--help", "--version"])
    return "\n".join(
        [
            "#compdef quire",
            "# Completes `quire` in zsh; a word that is none of its own is a file's name.",
            "_quire() {",
            f"  (( CURRENT == 2 )) && {{ compadd -- {first}; return }}",
            '  local command="${words[2]}" words_found=',
            f'  (( CURRENT > 3 )) && case "$command" in {_with_modes(found)}) command+=" ${{words[3]}}" ;; esac',
            '  case "$command:${words[CURRENT-1]}" in',
            *(line.replace(" words=", " words_found=") for line in _cases(found)),
            "  esac",
            '  [ -n "$words_found" ] && compadd -- ${(s: :)words_found} || _files',
            "}",
            "compdef _quire quire",
            "",
        ]
    )


def _fish(found: Mapping[str, CommandWords]) -> str:
    lines = [
        "# Completes `quire` in fish.",
        "function __quire_command",
        "  set -l words (commandline -opc)",
        "  set -l name $words[2]",
        f"  contains -- \"$name\" {_with_modes(found).replace('|', ' ')}; and set name (string join ' ' $words[2..3])",
        '  test "$name" = "$argv"',
        "end",
        "complete -c quire -n __fish_use_subcommand -f",
    ]
    for name, command in found.items():
        if " " not in name:
            lines.append(f"complete -c quire -n __fish_use_subcommand -a {name} -d {_fish_text(command.text)}")
        condition = f"-n '__quire_command {name}'"
        if first := command.values.get(""):
            lines.append(f"complete -c quire {condition} -f -a {_fish_text(' '.join(first))}")
        for flag, text in command.flags.items():
            kind = (
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"
            )
            values = command.values.get(flag)
            taken = "" if values is None else f" -x -a {_fish_text(' '.join(values))}" if values else " -r"
            lines.append(f"complete -c quire {condition} {kind} -d {_fish_text(text)}{taken}")
    return "\n".join([*lines, ""])


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
