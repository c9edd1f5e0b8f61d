"""Scripts for shells: bash's is run, those of the others are read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.cli.completion import commands
from quire.cli.main import COMMANDS, main


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
    assert completed(source, "quire", "serve", "some/model") == []


def test_zsh_and_fish(capsys: pytest.CaptureFixture[str]) -> None:
    zsh, fish = script("zsh", capsys), script("fish", capsys)
    assert zsh.startswith("#compdef quire\n")
    assert "serve:--chat-template-content-format" in zsh
    assert "-n __fish_use_subcommand -a serve -d 'serve a model over HTTP, compatible with OpenAI\\'s API'" in fish
    assert "complete -c quire -n '__fish_seen_subcommand_from serve' -l port -d " in fish


def test_every_flag_of_every_command() -> None:
    found = commands()
    assert list(found) == list(COMMANDS)
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
