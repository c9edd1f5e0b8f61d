from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.cli.main import main
from quire.config.options import EngineOptions
from quire.errors import EngineDeadError
from quire.server.settings import ServerSettings

FILE = """
model: some/model
port: 9001
max_model_len: 2k
api-key: [a, b]
enable_prefix_caching: false
access_log: true
hf_overrides: {rope_theta: 3}
cuda_graph_sizes: [1, 2]
max_num_queued: null
max-body-size: 3MiB
"""
SAME_IN_TOML = """
model = "some/model"
port = 9001
max-model-len = "2k"
api_key = ["a", "b"]
enable-prefix-caching = false
access-log = true
cuda-graph-sizes = [1, 2]
max-num-queued = "none"
max-body-size = "3MiB"
hf-overrides = {rope_theta = 3}
"""
OF_FILE = (
    EngineOptions(
        model="some/model",
        max_model_len=2000,
        enable_prefix_caching=False,
        hf_overrides={"rope_theta": 3},
        cuda_graph_sizes=[1, 2],
    ),
    ServerSettings(port=9001, api_key=["a", "b"], access_log=True, max_num_queued=None, max_body_size="3MiB"),
)

Calls = list[tuple[EngineOptions, ServerSettings]]


class FakeProcess:
    """An EngineProcess that starts nothing."""

    def __init__(self, imports: Sequence[str]) -> None:
        self.imports = list(imports)

    def __enter__(self) -> FakeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def processes() -> list[FakeProcess | None]:
    """What each call of the server is given, in the order of `calls`."""
    return []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, processes: list[FakeProcess | None]) -> Calls:
    """What the server is started with; it returns the status 3."""
    found: Calls = []

    def serve(options: EngineOptions, settings: ServerSettings, *, process: FakeProcess | None) -> int:
        found.append((options, settings))
        processes.append(process)
        return 3

    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    monkeypatch.setattr("quire.cli.serve.EngineProcess", FakeProcess)
    monkeypatch.setitem(sys.modules, "quire.server.run", SimpleNamespace(serve=serve))  # type: ignore[arg-type]
    return found


def test_defaults(calls: Calls) -> None:
    assert main(["serve"]) == 3
    assert calls == [(EngineOptions(), ServerSettings())]


def test_a_lone_engine_imports_torch_beside_the_server(calls: Calls, processes: list[FakeProcess | None]) -> None:
    several = ["--tensor-parallel-size=2"], ["--data-parallel-size=2"], ["--api-server-count=2"], ["--restart-engine"]
    for flags in ([], *several):
        assert main(["serve", *flags]) == 3
    assert [process and process.imports for process in processes] == [["quire.executors.local"], *4 * [None]]


def test_every_kind_of_option(calls: Calls) -> None:
    server = ["--host", "0.0.0.0", "--port", "9000", "--served-model-name", "a", "--served-model-name", "b"]
    server += ["--max-num-queued", "none", "--shutdown-timeout", "2.5", "--access-log"]
    assert main(["serve", "some/model", "--max-num-seqs", "4", *server]) == 3
    settings = ServerSettings(
        host="0.0.0.0",
        port=9000,
        served_model_name=["a", "b"],
        max_num_queued=None,
        shutdown_timeout=2.5,
        access_log=True,
    )
    assert calls == [(EngineOptions(model="some/model", max_num_seqs=4), settings)]


def test_names_and_bounds_of_connections(calls: Calls) -> None:
    arguments = [
        "--allowed-hosts",
        "a.example",
        "--allowed-hosts",
        "*.b.example",
        "--allowed-origins",
        "https://a.example",
    ]
    arguments += ["--cors-allowed-origins", "*", "--header-timeout", "5", "--max-connections", "9"]
    assert main(["serve", *arguments, "--max-total-body-size", "1GiB"]) == 3
    [(_, settings)] = calls
    assert settings == ServerSettings(
        allowed_hosts=["a.example", "*.b.example"],
        cors_allowed_origins=["https://a.example", "*"],
        header_timeout=5.0,
        max_connections=9,
        max_total_body_size="1GiB",
    )


def test_the_key_comes_from_the_flag_else_from_the_environment(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "from-environment")
    main(["serve"])
    main(["serve", "--api-key", "from-flag", "--api-key", "another"])
    main(["serve", "--api-key-file", "keys.toml"])
    assert [settings.api_key for _, settings in calls] == [["from-environment"], ["from-flag", "another"], []]


def test_every_server_setting_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for name in ServerSettings.__struct_fields__:
        assert "--" + name.replace("_", "-") in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "port must be between 0 and 65535"),
        (["--prot", "1"], "did you mean '--port'"),
        (["--port", "http"], "invalid int value: 'http'"),
        (
            ["--num-gpu-blocks-override", "8"],
            "a flag of vLLM, whose lines `python -m quire.cli.vllm serve` takes (docs/",
        ),
        (["--no-enable-elastic-ep"], "(docs/from-vllm.md)"),
        (["--ssl-keyfile", "x"], "ssl_keyfile and ssl_certfile go together"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout"),
    ],
)
def test_wrong_use_starts_nothing(
    calls: Calls, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert calls == []


def test_a_dead_engine_is_exit_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def serve(options: EngineOptions, settings: ServerSettings, *, process: FakeProcess | None) -> int:
        raise EngineDeadError("the engine died: out of memory")

    monkeypatch.setattr("quire.cli.serve.EngineProcess", FakeProcess)
    monkeypatch.setitem(sys.modules, "quire.server.run", SimpleNamespace(serve=serve))  # type: ignore[arg-type]
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == "quire: error: the engine died: out of memory\n"


@pytest.mark.parametrize(("name", "text"), [("a.yaml", FILE), ("a.toml", SAME_IN_TOML)])
def test_options_of_a_file(
    name: str, text: str, calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 3
    assert calls == [OF_FILE]
    assert main(["serve", "--config", str(path), "other/model", "--port", "9002", "--api-key", "c"]) == 3
    options, settings = calls[1]
    assert (options.model, settings.port, settings.api_key, settings.access_log) == ("other/model", 9002, ["c"], True)

    assert main(["serve", "--config", str(path), "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# api-key is set, and not shown\n")
    (tmp_path / "b.yaml").write_text(printed)
    assert main(["serve", "--config", str(tmp_path / "b.yaml"), "--api-key", "a", "--api-key", "b"]) == 3
    assert calls[2] == OF_FILE


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "prt: 1", "a.yaml: quire serve: unknown option '--prt'; did you mean '--port'?"),
        ("a.yaml", "port: x", "a.yaml: argument --port: invalid int value: 'x'"),
        ("a.yaml", "- port", "a.yaml must map flags to values"),
        ("a.yaml", "port: [1", "a.yaml is not valid YAML"),
        ("a.yaml", "hf_overrides: {a: 2020-01-01}", "a.yaml is not valid YAML: Object of type date"),
        ("a.toml", "port = ", "a.toml is not valid TOML"),
        ("a.yaml", "api-key:", "a.yaml: api-key has no value"),
        ("a.yaml", "port: null", "a.yaml: port has no value"),
        ("a.yaml", "api_key: [k, null]", "a.yaml: api-key has no value"),
        ("a.yaml", "config: b.yaml", "a.yaml: config is no setting of a file"),
        ("a.yaml", "print_config: true", "a.yaml: print_config is no setting of a file"),
        ("a.json", "{}", "a.json must end in .yaml or .yml or .toml"),
    ],
)
def test_a_file_that_is_wrong(
    name: str, text: str, message: str, calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["serve", "--config", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err
    assert calls == []


def test_the_help_shows_options_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help=kv"]) == 0
    shown = capsys.readouterr().out
    assert "--block-size" in shown
    assert "--port" not in shown
    assert main(["serve", "--help=ssl"]) == 0
    assert "--ssl-keyfile" in capsys.readouterr().out
    assert main(["serve", "--help=nonsense"]) == 2
    assert "no group and no option has 'nonsense'" in capsys.readouterr().err
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("--host") < shown.index("--port N  ") < shown.index("--model TEXT") < shown.index("--block-size")
