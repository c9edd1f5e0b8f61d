from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli import session
from quire.cli.chat import BUNDLED_NOTE
from quire.cli.conversation import read_conversation
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
    assert "/clear" in error
    assert "forgets all that was said" in error
    assert "unknown command /nonsense (/help lists them" in error


def test_pictures_go_with_the_next_message(
    engine: FakeEngine, type_lines: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, saved = tmp_path / "a b.png", tmp_path / "saved.json"
    picture.write_bytes(b"PNG")
    type_lines(f"/image {picture}", "/image", f"/image {saved}", "/image no.png", "one", f"/save {saved}", "two")
    assert main(["chat", "some-model"]) == 0
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,UE5H"}}
    shown = ("user", [part, {"type": "text", "text": "one"}])
    assert asked(engine) == [[shown], [shown, ("assistant", "Hello wörld"), ("user", "two")]]
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "a b.png goes with the next message",
        "/image: name a file",
        "/image: saved.json is no picture by its name",
    ]
    assert lines[3].startswith("/image: [Errno 2]")
    assert read_conversation(saved.read_text())[0][0]["content"] == shown[1]


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
    captured = capsys.readouterr()
    assert captured.out == "Hel\nHel\n"
    assert captured.err == "stopped\nstopped\n"


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


def test_messages_of_several_lines(engine: FakeEngine, type_lines: Any) -> None:
    type_lines('"""one', "  two", 'three"""', 'say """x""" now', " /help me")
    assert main(["chat", "m"]) == 0
    assert [conversation[-1][1] for conversation in asked(engine)] == [
        "one\n  two\nthree",
        'say """x""" now',
        "/help me",
    ]


def test_the_last_question_again_and_undone(
    engine: FakeEngine, type_lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines("/regen", "/undo", "one", "two", "/regen", "/undo", "three")
    assert main(["chat", "m"]) == 0
    first = [("user", "one")]
    answered = [*first, ("assistant", "Hello wörld")]
    second = [*answered, ("user", "two")]
    assert asked(engine) == [first, second, second, [*answered, ("user", "three")]]
    error = capsys.readouterr().err
    assert error.count("there is no question yet") == 2
    assert "2 messages are left" in error


def test_settings(engine: FakeEngine, type_lines: Any, capsys: pytest.CaptureFixture[str]) -> None:
    type_lines(
        "/set temperature 0.1", "/set top-k 7", "/set stop END", "/set ignore_eos true", "one",
        "/set temperature default", "/set top_k default", "/set stop default", "/set ignore_eos false", "two",
        "/set temperature hot", "/set top_p 3", "/set n 2", "/set ignore_eos 1", "/set", "three",
    )  # fmt: skip
    assert main(["chat", "m", "--temperature", "0.5"]) == 0
    expected = SamplingParams(temperature=0.5, max_tokens=512)
    given = SamplingParams(temperature=0.1, top_k=7, stop=["END"], ignore_eos=True, max_tokens=512)
    assert [params for _, params in engine.requests] == [given, expected, expected]
    error = capsys.readouterr().err
    for message in ("invalid float value: 'hot'", "top_p", "no setting 'n'", "true or false, not '1'"):
        assert message in error, error


def test_the_system_message(engine: FakeEngine, type_lines: Any) -> None:
    type_lines("/system be brief", "one", "/system none", "two")
    assert main(["chat", "m"]) == 0
    first, second = asked(engine)
    assert first == [("system", "be brief"), ("user", "one")]
    assert second[0] == ("user", "one")


def test_saved_and_loaded(
    engine: FakeEngine, type_lines: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, other = tmp_path / "chat.json", tmp_path / "other.txt"
    other.write_text("mine")
    type_lines("/system be brief", "/set top_k 7", "one", f"/save {path}", f"/save {path}", f"/save {other}")
    assert main(["chat", "m"]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert other.read_text() == "mine"
    assert f"{other} exists" in capsys.readouterr().err
    type_lines(f"/load {path}", "two", f"/load {other}", f"/load {tmp_path}/none")
    assert main(["chat", "m"]) == 0
    assert asked(engine)[-1] == [
        ("system", "be brief"), ("user", "one"), ("assistant", "Hello wörld"), ("user", "two"),
    ]  # fmt: skip
    assert engine.requests[-1][1].top_k == 7
    error = capsys.readouterr().err
    assert "the file is not JSON" in error
    assert "/load: " in error.splitlines()[-1]


@pytest.mark.parametrize(
    "text", ["{}", "[]", "[3]", '{"messages": 1}', '{"messages": [1]}', '{"messages": [{"role": "x", "content": ""}]}']
)
def test_a_file_that_holds_no_conversation(text: str) -> None:
    with pytest.raises(UserError, match="the file holds"):
        read_conversation(text)


def test_thoughts_are_no_part_of_the_answer(
    engine: FakeEngine, type_lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.tokenizer.chat_templates["default"] = "<think>"
    engine.pieces = ["<think>hm", "</think>", "yes"]
    type_lines("one", "two")
    assert main(["chat", "m"]) == 0
    assert capsys.readouterr().out == "yes\nyes\n"
    assert asked(engine)[1][1] == ("assistant", "yes")
    type_lines("one")
    assert main(["chat", "m", "--reasoning-parser", "none"]) == 0
    assert capsys.readouterr().out == "<think>hm</think>yes\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-key", "k"], "--api-key belongs to --url"),
        (["--url", "http://127.0.0.1:1", "--num-threads", "2"], "--num-threads is for a model in this process"),
        (["--url", "http://127.0.0.1:1", "--reasoning-parser", "auto"], "--reasoning-parser is for a model in this"),
        (["--url", "localhost"], "is no address of a server"),
        (["--reasoning-parser", "qwen4"], "unknown parser 'qwen4'"),
    ],
)
def test_wrong_use(
    engine: FakeEngine, type_lines: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines()
    assert main(["chat", "m", *arguments]) == 2
    assert message in capsys.readouterr().err
