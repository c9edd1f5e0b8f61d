"""docs/options.md lists every option of `quire serve` and every sampling parameter, with its default."""

from __future__ import annotations

import argparse
import re

import msgspec

from quire import SamplingParams
from quire.cli.serve import build_parser
from quire.config.options import EngineOptions
from tests.architecture.source import ROOT

PAGE = ROOT / "docs" / "options.md"
BEGIN, END = "<!-- options of quire serve -->\n", "<!-- end of the options -->\n"
DEFAULT = re.compile(r" \(default: ((?:[^()]|\([^()]*\))*)\)$")
TWICE = re.compile(r"\((\d+|none)\) \(\1(?:\.0)?\)$")


def line_of(action: argparse.Action) -> str:
    """The flag, its value's form, a mark for a server's own option, and its line of help; "off" for a false default."""
    flags = ", ".join(flag for flag in action.option_strings if not flag.startswith("--no-"))
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    mark = "" if action.dest in EngineOptions.__struct_fields__ else "†"
    text = DEFAULT.sub(
        lambda found: {"False": "", "True": " (on)", "": ""}.get(found[1], f" ({found[1]})"), action.help or ""
    )
    text = TWICE.sub(r"(\1)", text)
    return f"- `{f'{flags} {value}'.strip()}`{mark}: {text.replace('%%', '%')}\n"


def options_text() -> str:
    """What stands between the marks of the page, made from the parser of `quire serve`."""
    parser = build_parser()
    parts = []
    for group in parser._action_groups[2:]:
        name, _, title = str(group.title).partition(": ")
        parts.append(f"\n### {title[0].upper()}{title[1:]} (`--help={name}`)\n\n")
        parts += [line_of(action) for action in group._group_actions]
    return "".join(parts) + "\n"


def written() -> str:
    text = PAGE.read_text(encoding="utf-8")
    return text.partition(BEGIN)[0] + BEGIN + options_text() + END + text.partition(END)[2]


def test_the_page_lists_the_options() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(), "`python -m tests.cli.test_options_page` writes it"
    assert page.count("\n- `--") > 100
    assert "- `--block-size N`: tokens per KV block (16)\n" in page
    assert "- `--port N`†: port to listen on (0: any free one) (8000)\n" in page


def test_the_page_has_each_sampling_parameter_with_its_default() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Sampling parameters\n")[2].partition("\n## ")[0]
    fields = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE))
    shown = {name: "None" if value is None else repr(value).lower() for name, value in fields.items()}
    assert {name: text.strip() for name, text in listed.items()} == {name: shown[name] for name in listed}
    without = [name for name in fields if f"`{name}`" not in section]
    assert without == []


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
