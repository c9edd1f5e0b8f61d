from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli import session
from quire.cli.main import main
from quire.config.options import EngineOptions
from quire.errors import EngineDeadError, UserError
from quire.sampling_params import PYTHON_ONLY, SamplingParams
from tests.cli.fake_engine import FakeEngine, Rendered


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    opened: list[EngineOptions] = []

    def open_engine(options: EngineOptions) -> FakeEngine:
        opened.append(options)
        return fake

    monkeypatch.setattr(session, "open_engine", open_engine)
    fake.opened = opened  # type: ignore[attr-defined]
    return fake


def test_the_text_is_streamed(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello wörld\n"
    assert captured.err == ""
    assert engine.requests == [("hi", SamplingParams(max_tokens=128))]
    assert engine.is_shut_down


def test_flags_become_sampling_parameters_and_engine_options(engine: FakeEngine) -> None:
    flags = ["--temperature", "0.5", "--stop", "a", "--stop", "b", "--max-tokens", "none", "--seed", "5"]
    assert main(["run", "hi", *flags, "--model", "m", "--block-size", "8", "--no-enable-prefix-caching"]) == 0
    expected = SamplingParams(temperature=0.5, stop=["a", "b"], max_tokens=None, seed=5)
    assert engine.requests == [("hi", expected)]
    options = EngineOptions(model="m", block_size=8, enable_prefix_caching=False, seed=5)
    assert engine.opened == [options]  # type: ignore[attr-defined]


def test_stats_go_to_stderr(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "hi", "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello wörld\n"
    pattern = r"2 prompt tokens \(1 cached\), 3 generated, [\d.]+ tokens/s, first after [\d.]+ ms\n"
    assert re.fullmatch(pattern, captured.err)


def test_json_has_everything(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "hi", "--json", "--logprobs", "0", "--n", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt_token_ids"] == [7, 8]
    assert [output["text"] for output in result["outputs"]] == ["Hello wörld"] * 2
    first = result["outputs"][0]
    assert first["token_ids"] == [101, 102, 103]
    assert first["finish_reason"] == "length"
    assert first["logprobs"] == [[{"token_id": 101, "token": "Hel", "logprob": -0.5, "rank": 1}]]
    assert result["prompt_logprobs"] is None
    assert result["num_cached_tokens"] == 1


def test_several_completions_are_printed_one_after_the_other(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "hi", "--n", "2"]) == 0
    assert capsys.readouterr().out == "--- 1 of 2 (length) ---\nHello wörld\n--- 2 of 2 (length) ---\nHello wörld\n"


def test_chat_applies_the_template(engine: FakeEngine) -> None:
    assert main(["run", "hi", "--chat"]) == 0
    ((prompt, _),) = engine.requests
    assert prompt == {"prompt_token_ids": [1, 2, 3], "prompt": '[{"role": "user", "content": "hi"}]'}


def stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_the_prompt_may_come_from_stdin(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, "zwei\nZeilen é\n".encode())
    assert main(["run", "-"]) == 0
    assert engine.requests[0][0] == "zwei\nZeilen é\n"


def test_stdin_that_is_not_utf8_is_one_line(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin(monkeypatch, b"ab\xff")
    assert main(["run", "-"]) == 2
    assert "not valid UTF-8: invalid start byte at byte 2" in capsys.readouterr().err
    assert engine.requests == []


@pytest.mark.parametrize(("error", "status"), [(UserError("prompt is empty"), 2), (EngineDeadError("it died"), 1)])
def test_a_failing_request_is_one_line_and_the_engine_is_shut_down(
    engine: FakeEngine, error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.pieces = ["Hel", error]
    assert main(["run", "hi"]) == status
    assert capsys.readouterr().err == f"quire: error: {error}\n"
    assert engine.is_shut_down


def test_an_interrupt_ends_quietly(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.pieces = ["Hel", KeyboardInterrupt()]
    assert main(["run", "hi"]) == 130
    assert capsys.readouterr().err == ""
    assert engine.is_shut_down


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "required: PROMPT"),
        (["hi", "--temperature", "-1"], "temperature must be in [0, 100]"),
        (["hi", "--temprature", "1"], "did you mean '--temperature'"),
        (["hi", "--temperature", "nan"], "temperature must be a finite number"),
        (["hi", "--logprobs", "3"], "--logprobs shows only in --json output"),
        (["hi", "--no-detokenize"], "--no-detokenize leaves no text"),
        (["hi", "there"], "unexpected argument 'there'"),
        (["hi", "--n", "0"], "n must be between 1 and"),
    ],
)
def test_wrong_use_never_loads_a_model(
    engine: FakeEngine, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not engine.opened  # type: ignore[attr-defined]


def test_every_sampling_field_has_help() -> None:
    from quire.cli.sampling_flags import HELP

    assert list(HELP) == [name for name in SamplingParams.__struct_fields__ if name not in PYTHON_ONLY]


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    steps = []

    def interrupted_work() -> None:
        with session.interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("after the signal")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted_work()
    assert steps == ["after the signal"]
    assert signal.getsignal(signal.SIGINT) is before
    with session.interrupts_deferred():
        steps.append("undisturbed")
    assert steps == ["after the signal", "undisturbed"]


def test_prefixes_are_computed_before_the_prompt(engine: FakeEngine, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(f"prefix {name}\n")
    flags = [flag for name in "ab" for flag in ("--preload-prefix", str(tmp_path / name))]
    assert main(["run", "hi", *flags]) == 0
    assert engine.prefixes == ["prefix a\n", "prefix b\n"]
    assert len(engine.requests) == 1


def test_a_prefix_file_that_cannot_be_read_is_told_before_the_model_is_loaded(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "hi", "--preload-prefix", str(tmp_path / "none")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert engine.opened == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("flags", [[], ["--json"], ["--n", "2"]], ids=str)
def test_an_answer_that_the_model_could_not_compute(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    engine.finish_reason = "error"
    assert main(["run", "hi", *flags]) != 0
    captured = capsys.readouterr()
    assert captured.err == (
        "quire: error: the model computed NaN or infinite logits for this request; the engine's log says more\n"
    )
    assert engine.is_shut_down


def test_pictures_are_shown_before_the_prompt(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"abc")
    shown: list[Any] = []
    engine.render_chat = lambda messages: shown.append(messages) or Rendered("w", [1])  # type: ignore[method-assign]
    assert main(["run", "hi", "--image", str(path), "--image", str(path)]) == 0
    picture = {"type": "image", "image": b"abc"}
    assert shown == [[{"role": "user", "content": [picture, picture, {"type": "text", "text": "hi"}]}]]
    assert main(["run", "hi", "--image", str(tmp_path / "missing.png")]) != 0
    assert "--image" in capsys.readouterr().err
