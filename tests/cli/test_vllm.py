"""The command line of `vllm serve`: each flag of the table, all ways to write values, files of flags."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.vllm import Line, build_parser, flag_tables, main
from quire.cli.vllm import read_line as read_line_with
from quire.config.options import EngineOptions
from quire.config.vllm import FLAGS, GROUPS, MEANT, NOTED, REFUSED, SPECULATION_KEYS, VllmFlag, translate_keywords
from quire.config.vllm.record import KINDS
from quire.errors import ConfigError, UserError
from quire.server.settings import ServerSettings
from tests.architecture.source import ROOT

WRITTEN: dict[str, tuple[list[str], Any]] = {
    "flag": ([], True),
    "int": (["7"], 7),
    "float": (["0.5"], 0.5),
    "text": (["word"], "word"),
    "count": (["3k"], 3000),
    "length": (["2K"], 2048),
    "texts": (["one", "two"], ["one", "two"]),
    "ints": (["1", "2"], [1, 2]),
    "appended": (["word"], ["word"]),
    "json": (['{"key": [1]}'], {"key": [1]}),
    "json list": (['["one"]'], ["one"]),
    "any": (["word"], "word"),
}
"""A value of each kind, as written and as read."""
PARSER = build_parser()


def read_line(arguments: list[str]) -> Line:
    """With one parser for all tests: it takes a tenth of a second to make."""
    return read_line_with(arguments, PARSER)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "QUIRE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def fields() -> set[str]:
    return {*EngineOptions.__struct_fields__, *ServerSettings.__struct_fields__, "hf_token"}


def asking(entry: VllmFlag) -> tuple[list[str], Any]:
    """Arguments that ask for something, and their value: a flag whose default is True is turned off."""
    words, value = WRITTEN[entry.kind]
    if entry.kind == "flag" and True in entry.harmless and False not in entry.harmless:
        return ["--no-" + entry.flag[2:]], False
    return [entry.flag, *words], value


def test_the_table_is_complete_and_of_one_kind() -> None:
    entries = [entry for group in GROUPS.values() for entry in group]
    names = [entry.name for entry in entries]
    assert len(names) == len(set(names)) == len(FLAGS) > 250
    shorts = [short for entry in entries for short in entry.short]
    assert len(shorts) == len(set(shorts))
    for entry in entries:
        assert entry.kind in KINDS, entry.name
        assert entry.fate in (MEANT, NOTED, REFUSED), entry.name
        assert (entry.target is None) or entry.fate == MEANT, entry.name
        assert entry.target is not None or entry.why, f"{entry.name} does not say why"
        assert entry.target is None or entry.target in fields(), (
            f"{entry.name} leads to {entry.target}, which is not there"
        )


@pytest.mark.parametrize("entry", FLAGS.values(), ids=lambda entry: entry.name)
def test_each_flag_does_what_the_table_says(entry: VllmFlag) -> None:
    arguments, value = asking(entry)
    for line in (arguments, [arguments[0].replace("-", "_").replace("__", "--", 1), *arguments[1:]]):
        if entry.fate == REFUSED:
            with pytest.raises(ConfigError, match="is not supported: ") as caught:
                read_line(line)
            assert caught.value.param == entry.name
            continue
        read = read_line(line)
        if entry.target is not None and (entry.known is None or value in entry.known):
            where = read.settings if entry.target in ServerSettings.__struct_fields__ else read.options
            ours = entry.values.get(value, value) if isinstance(value, str | int) else value
            key = SPECULATION_KEYS.get(entry.name)
            assert where[entry.target] == (ours if key is None else {key: ours})
            assert read.notes == []
        elif value in entry.harmless or (entry.fate == MEANT and entry.known is None and not entry.harmless):
            assert read.notes == []
        else:
            [note] = read.notes
            assert note.startswith(entry.flag)
            assert note.endswith(entry.why)
            assert (set(read.settings), read.options) == ({"host"}, {})


@pytest.mark.parametrize("entry", [entry for entry in FLAGS.values() if entry.short], ids=lambda entry: entry.short[0])
def test_short_names(entry: VllmFlag) -> None:
    arguments, _ = asking(entry)
    if entry.fate == REFUSED:
        with pytest.raises(ConfigError, match=entry.flag):
            read_line([entry.short[0], *arguments[1:]])
        return
    assert read_line([entry.short[0], *arguments[1:]]) == read_line(arguments)


@pytest.mark.parametrize("entry", [e for e in FLAGS.values() if e.harmless], ids=lambda entry: entry.name)
def test_values_that_ask_for_nothing_are_taken_without_a_word(entry: VllmFlag) -> None:
    for value in entry.harmless:
        if entry.kind == "flag":
            line = [entry.flag if value else "--no-" + entry.flag[2:]]
        elif entry.kind in ("json", "json list"):
            line = [entry.flag, json.dumps(value)]
        elif isinstance(value, list):
            line = [entry.flag, *map(str, value)] if value else []
        else:
            line = [entry.flag, str(value)]
        read = read_line(line)
        assert (read.options, read.notes) == ({}, []), value


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype float", {"dtype": "float32"}),
        ("--dtype auto", {"dtype": "auto"}),
        ("--max-model-len 4k", {"max_model_len": 4000}),
        ("--max-model-len 4K", {"max_model_len": 4096}),
        ("--max-model-len 1.5k", {"max_model_len": 1500}),
        ("--max-model-len=1M", {"max_model_len": 2**20}),
        ("--max-model-len auto", {}),
        ("--max-model-len -1", {}),
        ("--max-num-batched-tokens 8k --max-num-seqs 16", {"max_num_batched_tokens": 8000, "max_num_seqs": 16}),
        ("--kv-cache-memory-bytes 2G", {"kv_cache_memory": 2**31}),
        ("--num-gpu-blocks-override 5", {"num_blocks_override": 5}),
        ("-tp 2 -q awq_marlin", {"tensor_parallel_size": 2, "quantization": "awq"}),
        ("--quantization None", {}),
        ("--async-scheduling", {"queue_depth": 2}),
        ("--no-async-scheduling", {"queue_depth": 1}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--disable-prefix-caching", {"enable_prefix_caching": False}),
        ("--disable-prefix-caching --enable-prefix-caching", {"enable_prefix_caching": True}),
        ("--device-memory-utilization 0.5", {"gpu_memory_utilization": 0.5}),
        ("--swap-space 2.5", {"swap_space": 2.5, "preemption_mode": "auto"}),
        ("--swap-space 0", {}),
        ("--swap-space 4 --preemption-mode swap", {"swap_space": 4.0, "preemption_mode": "swap"}),
        ("--long-prefill-token-threshold 0", {}),
        ("--load-format fastsafetensors", {"load_format": "safetensors"}),
        ("--model-impl vllm", {"model_impl": "quire"}),
        ("--attention-backend torch", {"attention_backend": "torch"}),
        ("--hf-overrides.rope_theta 5e5 --hf_overrides.a.b=x", {"hf_overrides": {"rope_theta": 5e5, "a": {"b": "x"}}}),
        ("--override-generation-config.temperature 0.5", {"override_generation_config": {"temperature": 0.5}}),
    ],
)
def test_values(line: str, options: dict[str, Any]) -> None:
    read = read_line(["some/model", *line.split()])
    assert read.options == {"model": "some/model", **options}
    assert read.notes == []


def test_either_word_of_a_flag_for_settings() -> None:
    assert read_line(["m", "--enable-fastapi-docs"]).settings["disable_fastapi_docs"] is False
    assert read_line(["m", "--disable-per-request-metrics"]).settings["enable_per_request_metrics"] is False


def test_flags_for_keys_of_the_speculation() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    line = read_line(["m", "--spec-method", "ngram", "--spec_tokens=3", "--speculative-config.prompt_lookup_max", "2"])
    assert line.options["speculative_config"] == given
    assert read_line(["m", "--spec-t", "3"]).options["speculative_config"] == {"num_speculative_tokens": 3}
    keywords = {"spec_method": "ngram", "spec_model": None, "spec_tokens": 3}
    more = {"speculative_config": {"prompt_lookup_max": 2}}
    assert translate_keywords({**keywords, **more}, ("speculative_config",)) == ({"speculative_config": given}, [])


def test_keys_of_json_flags_join_the_json() -> None:
    given_json = '{"a": {"x": 1, "y": 2}, "list": [0]}'
    read = read_line(["--hf-overrides", given_json, "--hf-overrides.a.x", "9", "--hf-overrides.more+", "one"])
    assert read.options["hf_overrides"] == {"a": {"x": 9, "y": 2}, "list": [0], "more": ["one"]}


@pytest.mark.parametrize("line", ["-O3", "-O 3", "-O=3", "--optimization-level 3"])
def test_levels_of_optimisation(line: str) -> None:
    [note] = read_line(line.split()).notes
    assert note.startswith("--optimization-level 3 has no effect: ")


@pytest.mark.parametrize("line", ["-cc.mode 3", "--compilation-config.mode=3", '-cc {"mode":3}', "-O.mode 3"])
def test_ways_to_configure_compilation(line: str) -> None:
    [note] = read_line(line.split()).notes
    assert note.startswith("--compilation-config has no effect: ")


def test_a_line_as_people_have_it() -> None:
    line = "meta-llama/Llama-3.1-8B --served-model-name a b --api-key k1 k2 --trust-remote-code --dtype half -tp 1"
    line += ' --gpu-memory-utilization 0.9 --max_model_len 8k --disable-log-requests --allowed-origins ["https://x.y"]'
    line += " --enable-chunked-prefill --port 9000 --enforce-eager --kv-cache-dtype fp8 --uvicorn-log-level warning"
    read = read_line(line.split())
    assert read.options == {
        "model": "meta-llama/Llama-3.1-8B",
        "dtype": "float16",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.9,
        "max_model_len": 8000,
        "enforce_eager": True,
        "kv_cache_dtype": "fp8",
    }
    assert read.settings == {
        "host": "0.0.0.0",
        "served_model_name": ["a", "b"],
        "api_key": ["k1", "k2"],
        "cors_allowed_origins": ["https://x.y"],
        "port": 9000,
    }
    assert [note.split()[0] for note in read.notes] == ["--trust-remote-code", "--uvicorn-log-level"]
    EngineOptions.from_keywords(read.options)
    ServerSettings.from_keywords(read.settings)


def test_quires_own_flags_are_taken_too() -> None:
    read = read_line(["--allowed-hosts", "a.example", "--kv-offload-dir", "/tmp/x", "--host", "::1"])
    assert read.settings == {"allowed_hosts": ["a.example"], "host": "::1"}
    assert read.options == {"kv_offload_dir": "/tmp/x"}


def test_a_file_of_flags_lies_under_the_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: from/file\nport: 12323\ntensor_parallel_size: 2\nserved-model-name: [a, b]\ntrust-remote-code: true\n"
        "enable-prefix-caching: false\nhf-overrides: {rope_theta: 5.0}\nallowed-origins: ['https://a.b']\nseed: 3\n"
        "allowed-hosts: [x, y]\nrevision: null\n"
    )
    read = read_line(["--config", str(file)])
    assert read.options == {
        "model": "from/file",
        "tensor_parallel_size": 2,
        "enable_prefix_caching": False,
        "hf_overrides": {"rope_theta": 5.0},
        "seed": 3,
    }
    assert read.settings == {
        "host": "0.0.0.0",
        "port": 12323,
        "served_model_name": ["a", "b"],
        "cors_allowed_origins": ["https://a.b"],
        "allowed_hosts": ["x", "y"],
    }
    assert [note.split()[0] for note in read.notes] == ["--trust-remote-code"]
    over = read_line(["on/line", "--port", "1", "--config", str(file), "--enable-prefix-caching"])
    assert over.options["model"] == "on/line"
    assert (over.settings["port"], over.options["enable_prefix_caching"]) == (1, True)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{}", "must end in .yaml or .yml"),
        ("a.yaml", "- 1", "must map flags to values"),
        ("a.yaml", "{", "is not valid YAML"),
        ("a.yaml", "a: " + "[" * 3000, "is not valid YAML"),
        ("a.yaml", "a: 2026-99-99", "is not valid YAML: month must be in"),
        ("a.yaml", "a: !!timestamp b", "is not valid YAML"),
        ("a.yaml", "a: !!int ''", "is not valid YAML"),
        ("a.yaml", "a: !!bool b", "is not valid YAML"),
        ("a.yaml", "a: &a {b: *a}", "is not valid YAML: Circular reference"),
        ("a.yaml", "api-key:", "a.yaml: api-key has no value"),
        ("a.yaml", "no-such-flag: 1", "unknown option '--no-such-flag'"),
        ("a.yaml", "enable-elastic-ep: true", "--enable-elastic-ep is not supported: the ranks of a host"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_line(["--config", str(tmp_path / name)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-model-len 1.5K", "invalid int value: '1.5K'"),
        ("--max-model-len long", "invalid int value"),
        ("--hf-overrides [1]", "invalid JSON object value"),
        ("--allowed-origins *", "invalid JSON list of strings value"),
        ("--hf-overrides.a", "--hf-overrides.a needs a value"),
        ("--enable-elastic", "--enable-elastic-ep is not supported"),
        ("--enabel-lora", "unknown option '--enabel-lora'; did you mean '--enable-lora'"),
        ("-dpr 1", "--data-parallel-start-rank is not supported: all replicas are on this machine"),
    ],
)
def test_mistakes(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        read_line(line.split())


def test_the_key_of_vllms_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from-environment")
    assert read_line([]).settings["api_key"] == ["from-environment"]
    assert read_line(["--api-key", "from-line"]).settings["api_key"] == ["from-line"]


def test_a_socket_needs_no_address() -> None:
    assert read_line(["--uds", "/run/x"]).settings == {"uds": "/run/x"}


@given(
    st.lists(
        st.sampled_from(["--port", "1", "-O3", "-cc.a.b", "--hf-overrides.x=1", "--hf_overrides", "{}", "m", "-dp"])
    )
)
def test_any_line_is_read_or_refused(line: list[str]) -> None:
    with contextlib.suppress(UserError):
        assert read_line(line).options.keys() <= {"model", "hf_overrides"}


def test_notes_are_on_standard_error_and_the_server_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[EngineOptions, ServerSettings]] = []

    def start(options: EngineOptions, settings: ServerSettings) -> int:
        started.append((options, settings))
        return 3

    monkeypatch.setattr("quire.cli.vllm.start", start)
    assert main(["serve", "m", "--trust-remote-code", "--disable-fastapi-docs"]) == 3
    [(options, settings)] = started
    assert (options.model, settings.host, settings.disable_fastapi_docs) == ("m", "0.0.0.0", True)
    assert capsys.readouterr().err.startswith("quire: note: --trust-remote-code has no effect: no code of")
    assert main(["serve", "m", "--enable-elastic-ep"]) == 2
    assert main(["benhc"]) == 2
    assert "unknown command 'benhc'; did you mean 'bench'?" in capsys.readouterr().err
    assert len(started) == 1


def test_other_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "run-batch" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["bench", "latency", "--help"]) == 0
    assert "--input-len" in capsys.readouterr().out
    assert main(["run-batch", "--help"]) == 0
    assert "--resume" in capsys.readouterr().out
    taken: list[Any] = []
    monkeypatch.setattr("quire.cli.chat.main", lambda arguments: taken.append(arguments) or 0)
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert main(["chat"]) == 0
    line = ["--url", "https://h:1/v1", "--model-name", "m", "--system-prompt=-x", "-q", "hello", "--api-key", "l"]
    assert main(["chat", *line]) == 0
    assert taken == [
        ["--url=http://localhost:8000", "--api-key=k"],
        ["m", "--url=https://h:1", "--api-key=l", "--system=-x", "--question=hello"],
    ]


def test_files_of_requests(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answered: list[Any] = []

    def answer(namespace: Any, options: EngineOptions, keywords: dict[str, Any]) -> int:
        answered.append((namespace.input_file, namespace.output_file, options, keywords))
        return 0

    monkeypatch.setattr("quire.cli.run_batch.answer_file", answer)
    line = ["run-batch", "-i", "in", "-o", "out", "--model", "m", "--gpu_memory_utilization", "0.5", "--enforce-eager"]
    assert main([*line, "--response-role", "bot"]) == 0
    options = EngineOptions(model="m", gpu_memory_utilization=0.5, enforce_eager=True)
    assert answered == [("in", "out", options, {"dialect": "vllm", "response_role": "bot"})]
    assert main([*line, "--enable-metrics", "--port", "9"]) == 0
    assert answered[1][3] == {"dialect": "vllm", "host": "0.0.0.0", "port": 9}
    assert main([*line, "--port", "9"]) == 2
    assert "port is for a server" in capsys.readouterr().err


def test_the_table_has_every_flag_and_a_place_in_the_page() -> None:
    """`python -m quire.cli.vllm flags` prints what `make docs` puts there."""
    page = (ROOT / "docs" / "from-vllm.md").read_text(encoding="utf-8")
    assert page.count("<!-- flags -->") == 1
    table = flag_tables()
    assert [entry.flag for entry in FLAGS.values() if f"`{entry.flag}`" not in table] == []


def test_traces_are_the_servers() -> None:
    line = read_line(
        ["m", "--otlp-traces-endpoint", "http://localhost:4318", "--collect-detailed-traces", "model,worker"]
    )
    settings = ServerSettings.from_keywords(line.settings)
    assert settings.traces_url == "http://localhost:4318/v1/traces"
    assert settings.collect_detailed_traces == ["model,worker"]
    assert translate_keywords({"otlp_traces_endpoint": None}, ()) == ({}, [])
    with pytest.raises(ConfigError, match="only the server traces requests"):
        translate_keywords({"otlp_traces_endpoint": "http://localhost:4318"}, ())


@pytest.mark.parametrize(
    ("arguments", "options", "settings"),
    [
        (["--tensor-par", "2"], {"tensor_parallel_size": 2}, {}),
        (["--tensor_par=2"], {"tensor_parallel_size": 2}, {}),
        (["--no-enable-pref"], {"enable_prefix_caching": False}, {}),
        (["--hf-over.rope_theta", "5"], {"hf_overrides": {"rope_theta": 5}}, {}),
        (["--served", "a", "b"], {}, {"served_model_name": ["a", "b"]}),
        # vLLM has one flag that begins so; Quire and vLLM's older versions have others.
        (["--max-model", "5k"], {"max_model_len": 5000}, {}),
        (["--response", "bot"], {}, {"response_role": "bot"}),
        (["--kv-offload-d", "/kv"], {"kv_offload_dir": "/kv"}, {}),
        (["--model", "--enforce"], None, None),
    ],
    ids=str,
)
def test_the_beginning_of_one_flag_stands_for_it(
    arguments: list[str], options: dict[str, Any] | None, settings: dict[str, Any] | None
) -> None:
    if options is None:
        with pytest.raises(UserError, match="expected one argument"):
            read_line(arguments)
        return
    line = read_line(arguments)
    assert line.options == options
    assert settings is not None
    assert settings.items() <= line.settings.items()


@pytest.mark.parametrize(
    ("flag", "candidates"),
    [
        ("--max-num-queued-", "--max-num-queued-reqs, --max-num-queued-tokens"),
        ("--conf", "--config, --config-format"),
        ("--kv-offload-", "--kv-offload-dir, --kv-offload-size"),
    ],
)
def test_the_beginning_of_several_flags_is_refused(flag: str, candidates: str) -> None:
    with pytest.raises(UserError, match=f"ambiguous option: {flag} could match {candidates}"):
        read_line([flag, "1"])


def test_beginnings_in_a_file_and_exact_names_before_them(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("tensor-par: 2\nmodel: some/model\n")
    assert read_line(["--config", str(path)]).options == {"tensor_parallel_size": 2, "model": "some/model"}


@pytest.mark.parametrize(("arguments", "dialect"), [([], "vllm"), (["--dialect", "openai"], "openai")])
def test_a_line_is_served_in_the_dialect_of_vllm(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], dialect: str
) -> None:
    served: list[ServerSettings] = []
    monkeypatch.setattr("quire.cli.vllm.start", lambda options, settings: served.append(settings) or 0)
    assert main(["serve", *arguments]) == 0
    assert [settings.dialect for settings in served] == [dialect]
