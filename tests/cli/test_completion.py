"""Scripts for shells: bash's is run, those of the others are read."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from quire.cli.completion import commands, known_words
from quire.cli.main import COMMANDS, main
from quire.config.option import GROUPS
from quire.config.options import EngineOptions
from quire.config.resolve import DTYPES, resolve
from quire.errors import ConfigError
from quire.server.settings import ServerSettings


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(source: str, *words: str) -> list[str]:
    """The words that bash offers for the last one."""
    line = " ".join(f"'{word}'" for word in words)
    program = (
        f"{source}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _quire; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-u", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash(capsys: pytest.CaptureFixture[str]) -> None:
    source = script("bash", capsys)
    assert completed(source, "quire", "se") == ["serve"]
    assert set(completed(source, "quire", "")) >= {*COMMANDS, "--help", "--version"}
    assert completed(source, "quire", "serve", "--served-model") == ["--served-model-name"]
    assert completed(source, "quire", "serve", "--chat-template-content-format", "o") == ["openai"]
    assert completed(source, "quire", "completion", "f") == ["fish"]
    assert completed(source, "quire", "bench", "lat") == ["latency"]
    assert completed(source, "quire", "bench", "serve", "--endp") == ["--endpoint"]
    assert completed(source, "quire", "serve", "some/model") == []


def test_a_flag_is_followed_by_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    source = script("bash", capsys)
    assert completed(source, "quire", "serve", "--dtype", "") == list(DTYPES)
    assert completed(source, "quire", "serve", "--dtype", "=", "b") == ["bfloat16"]
    assert completed(source, "quire", "serve", "--help", "=") == [group.name for group in GROUPS]
    assert completed(source, "quire", "bench", "serve", "--endpoint", "") == ["completions", "chat"]
    for files in ("--config", "--model", "--api-key-file"):
        assert completed(source, "quire", "serve", files, "") == []
    assert "--port" in completed(source, "quire", "serve", "--access-log", "")


def refusal(name: str) -> str:
    """What an unknown value is answered; "" for an option that nothing looks at unless others need it."""
    try:
        resolve(EngineOptions(**{name: "zzz"}))  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)
    return ""


def test_values_are_those_that_the_options_take() -> None:
    known = known_words()
    package = Path(inspect.getfile(quire)).parent
    texts = [
        path.read_text(encoding="utf-8") for path in (*package.glob("config/*.py"), package / "server/settings.py")
    ]
    checked = {name for text in texts for name in re.findall(r'\bchoice\(\s*"(\w+)"|_check_choice\("(\w+)"', text)}
    options = {*EngineOptions.__struct_fields__, *ServerSettings.__struct_fields__}
    assert {first or second for first, second in checked} & options <= known.keys()
    assert refusal("dtype") != ""
    for name in known.keys() & set(EngineOptions.__struct_fields__):
        said = set(re.findall(r"[\w-]+", refusal(name)))
        assert not said or said >= set(known[name]) or name == "kv_cache_dtype", name


def test_zsh_and_fish(capsys: pytest.CaptureFixture[str]) -> None:
    zsh, fish = script("zsh", capsys), script("fish", capsys)
    assert zsh.startswith("#compdef quire\n")
    assert "serve:--chat-template-content-format" in zsh
    assert "'bench serve':*" in zsh
    assert "-n __fish_use_subcommand -a serve -d 'serve a model over HTTP, compatible with OpenAI\\'s API'" in fish
    port = re.search(r"complete -c quire -n '__quire_command serve' -l port -d '.*' (.*)", fish)
    assert port is not None
    assert port[1] == "-r"


def test_every_flag_of_every_command() -> None:
    found = commands()
    assert [name for name in found if " " not in name] == list(COMMANDS)
    assert {"--port", "--api", "-tp"} <= found["serve"].flags.keys()
    assert all(each.flags for name, each in found.items() if name != "bench")


def test_another_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert "csh" in capsys.readouterr().err


def test_torch_is_not_loaded() -> None:
    program = (
        "import sys; from quire.cli.main import main; main(['completion', 'bash']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
