from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from quire.cli import session
from quire.cli.chat import BUNDLED_NOTE
from quire.cli.main import main
from quire.errors import UserError
from quire.sampling_params import SamplingParams
from tests.cli.fake_engine import FakeEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(session, "open_engine", lambda options: fake)
    return fake


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Any:
    def write(*lines: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))

    return write


def asked(engine: FakeEngine) -> list[list[tuple[str, str]]]:
    """Per request the conversation that was sent, as (role, content)."""
    conversations = [json.loads(prompt["prompt"]) for prompt, _ in engine.requests]
    return [[(message["role"], message["content"]) for message in messages] for messages in conversations]


def test_a_conversation_grows(engine: FakeEngine, type_lines: Any, capsys: pytest.CaptureFixture[str]) -> None:
    type_lines("one", "", "  two  ")
    assert main(["chat", "some-model"]) == 0
    assert asked(engine) == [
        [("user", "one")],
        [("user", "one"), ("assistant", "Hello wörld"), ("user", "two")],
    ]
    captured = capsys.readouterr()
    assert captured.out == "Hello wörld\nHello wörld\n"
    assert captured.err == ""
    assert engine.is_shut_down


def test_commands(engine: FakeEngine, type_lines: Any, capsys: pytest.CaptureFixture[str]) -> None:
    type_lines("one", "/clear", "/help", "/nonsense x", "two", "/exit", "three")
    assert main(["chat", "some-model", "--system", "be brief"]) == 0
    assert asked(engine) == [
        [("system", "be brief"), ("user", "one")],
        [("system", "be brief"), ("user", "two")],
    ]
    error = capsys.readouterr().err
    assert "/clear forgets it" in error
    assert "unknown command /nonsense" in error


def test_the_bundled_model_says_that_it_does_not_chat(
    engine: FakeEngine, type_lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines()
    assert main(["chat"]) == 0
    assert capsys.readouterr().err == BUNDLED_NOTE + "\n"


def test_a_model_without_a_template_is_one_line(
    engine: FakeEngine, type_lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.has_template = False
    type_lines("one")
    assert main(["chat", "some-model"]) == 2
    assert capsys.readouterr().err == "quire: error: this model has no chat template\n"
    assert engine.is_shut_down


def test_sampling_flags(engine: FakeEngine, type_lines: Any) -> None:
    type_lines("one")
    assert main(["chat", "m", "--temperature", "0", "--top-k", "3", "--seed", "4"]) == 0
    assert engine.requests[0][1] == SamplingParams(temperature=0, top_k=3, seed=4, max_tokens=512)


def test_a_refused_question_is_forgotten(
    engine: FakeEngine, type_lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.pieces = [UserError("the prompt is too long")]
    type_lines("one", "two")
    assert main(["chat", "m"]) == 0
    assert asked(engine) == [[("user", "one")], [("user", "two")]]
    assert capsys.readouterr().err == "refused: the prompt is too long\n" * 2


def test_an_interrupted_answer_is_kept_as_far_as_it_came(
    engine: FakeEngine, type_lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.pieces = ["Hel", KeyboardInterrupt()]
    type_lines("one", "two")
    assert main(["chat", "m"]) == 0
    assert asked(engine)[1] == [("user", "one"), ("assistant", "Hel"), ("user", "two")]
    assert capsys.readouterr().out == "Hel\nHel\n"


def test_stats_after_each_answer(engine: FakeEngine, type_lines: Any, capsys: pytest.CaptureFixture[str]) -> None:
    type_lines("one")
    assert main(["chat", "m", "--stats"]) == 0
    assert "3 generated" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--n", "--logprobs", "--prompt-logprobs"])
def test_flags_without_a_meaning_in_a_conversation_are_unknown(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", flag, "2"]) == 2
    assert f"unknown option '{flag}'" in capsys.readouterr().err


def test_an_answer_that_the_model_could_not_compute_is_forgotten(
    engine: FakeEngine, type_lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.finish_reason = "error"
    type_lines("one", "two")
    assert main(["chat", "some-model"]) == 0
    assert asked(engine) == [[("user", "one")], [("user", "two")]]
    assert capsys.readouterr().err.count("no answer: the model computed NaN or infinite logits") == 2
