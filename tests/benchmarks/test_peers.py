"""The search for a peer's fastest setting, the GGUF cuts, and the tables, without any peer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import compare
from benchmarks.peers.compare import Trials
from benchmarks.peers.engine import Places, peak_of, rooms
from benchmarks.peers.make_gguf import Cut, write
from benchmarks.peers.report import as_markdown, as_text, ratio_rows
from benchmarks.peers.settings import BITS, Settings, Trial, axes_of, fastest, search, settings_of_file
from benchmarks.peers.workload import Workload, parse_workload
from quire.config.gguf import read_gguf
from quire.models.gguf.weights import GGUFWeights

PEERS = ("vllm", "openvino", "llama.cpp", "ctranslate2", "mistral.rs", "transformers", "quire")


def trial_of(settings: Settings) -> Trial:
    """Faster with b=2, and with c=3 only where b=2."""
    return Trial(settings, {"pair": 1.0 + (settings["b"] == 2) + (settings["b"] == 2 and settings["c"] == 3)})


def test_the_search_goes_along_each_setting_beside_the_best_of_the_others() -> None:
    trials = search({"a": (0,), "b": (1, 2), "c": (1, 3)}, trial_of)
    assert [(trial.settings["b"], trial.settings["c"]) for trial in trials] == [(1, 1), (2, 1), (2, 3)]
    assert fastest(trials, "pair").settings == {"a": 0, "b": 2, "c": 3}


def test_the_search_ends_when_it_may_not_go_on_and_never_before_the_first_trial() -> None:
    assert len(search({"b": (1, 2), "c": (1, 3)}, trial_of, lambda: False)) == 1


def test_each_workload_has_its_own_fastest_setting_and_one_that_failed_is_never_it() -> None:
    trials = [Trial({"x": 1}, {"one": 2.0, "two": 1.0}), Trial({"x": 2}, {"one": 1.0, "two": 3.0}), Trial({"x": 3})]
    assert [fastest(trials, name).settings["x"] for name in ("one", "two")] == [1, 2]
    with pytest.raises(ValueError, match=r"no setting ran three: .*'x': 3"):
        fastest(trials, "three")


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("peer", PEERS)
def test_settings_depend_on_what_the_processor_can_do(peer: str, bits: int) -> None:
    plain = axes_of(peer, bits, 2, ["avx2"])
    assert not any(name in str(plain.get("INFERENCE_PRECISION_HINT")) for name in ("bf16", "f16"))
    able = axes_of(peer, bits, 8, ["avx2", "avx512_bf16", "avx512_fp16"])
    assert plain.keys() <= able.keys()
    if peer == "openvino":
        assert able["INFERENCE_PRECISION_HINT"] == ("bf16", "f32", "f16")
    if peer == "llama.cpp":
        assert able["n_threads"] == (8, 4)
        assert "format" not in settings_of_file(peer, 8, [])


class FakeEngine:
    """speed: for every workload; None: it ends when it is asked to run."""

    def __init__(self, speed: float | None) -> None:
        self._speed, self.is_closed = speed, False

    def speed(self, _workload: Workload) -> float:
        if self._speed is None:
            raise RuntimeError("the engine ended")
        return self._speed

    def close(self) -> None:
        self.is_closed = True


def test_only_the_fastest_engines_stay_loaded_and_a_peer_that_fails_says_why() -> None:
    engines: list[FakeEngine] = []

    def start(settings: Settings, number: int) -> Any:
        assert number == len(engines)
        engines.append(FakeEngine(settings["speed"]))
        return engines[-1]

    workload = parse_workload("2x8/4", {})
    trials = Trials(start, [workload])
    for speed in (None, 1.0, 3.0, 2.0):
        trials.run({"speed": speed})
    assert [engine.is_closed for engine in engines] == [True, True, False, True]
    assert trials.chosen()[workload.name][0].settings == {"speed": 3.0}
    trials.close()
    assert engines[2].is_closed


def test_a_peer_whose_every_setting_fails_is_refused_with_the_reasons() -> None:
    def start(_settings: Settings, _number: int) -> Any:
        raise subprocess.CalledProcessError(1, ["pip"])

    trials = Trials(start, [parse_workload("2x8/4", {})])
    trials.run({})
    with pytest.raises(ValueError, match=r"'pip'.* exit status 1"):
        trials.chosen()


def test_a_trial_is_short_and_of_the_same_kind() -> None:
    trial = parse_workload("64x6000/64:decode", {}).trial()
    assert (len(trial.requests), trial.longest, trial.part) == (16, 1_024 + 12, "decode")


def test_room_is_made_for_all_requests_of_a_workload(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 1024}
    config["max_position_embeddings"] = 4_096
    (tmp_path / "config.json").write_text(json.dumps(config))
    workloads = [parse_workload(text, {}) for text in ("1x300/1", "1024x896/128")]
    # 1,024 requests of 1,152 tokens with a block, 2 x 4 bytes x 2 layers x 2 heads x 256 a token: 9 GiB and a tenth
    assert rooms("vllm", tmp_path, workloads) == {"max_model_len": 4_096, "kv_cache_gib": 10}
    assert rooms("llama.cpp", tmp_path, workloads) == {}


def test_peak_memory_is_the_high_water_mark_of_the_status() -> None:
    assert peak_of("Name:\tx\nVmPeak:\t  900 kB\nVmHWM:\t     12 kB\nVmRSS:\t 3 kB\n") == 12 << 10
    assert peak_of("Name:\tkthread\n") == 0


@pytest.mark.parametrize(("architecture", "kind", "extra"), [
    ("qwen3moe", "Q4_0", {"rope.freq_base": 1e6}),
    ("qwen3moe", "Q4_K", {"rope.freq_base": 1e6}),
    ("gpt-oss", "MXFP4", {"rope.freq_base": 1e4, "attention.sliding_window": 8}),
])  # fmt: skip
def test_a_cut_reads_as_a_model_of_its_sizes_with_weights_of_one_deviation(
    tmp_path: Path, architecture: str, kind: str, extra: dict[str, Any]
) -> None:
    dense = "Q8_0" if kind == "MXFP4" else kind
    cut = Cut(architecture, kind, dense, 1, 256, 256, 4, 2, 64, 4, 2, 256, extra)
    write(cut, tmp_path / "cut.gguf")
    config = read_gguf(tmp_path / "cut.gguf").config
    count = config["num_local_experts" if architecture == "gpt-oss" else "num_experts"]
    assert (count, config["num_experts_per_tok"], config["vocab_size"]) == (4, 2, 256)
    weights = dict(GGUFWeights(tmp_path / "cut.gguf").stream(lambda done, total: None))
    matrices = {name: weight for name, weight in weights.items() if "experts" in name and name.endswith("weight")}
    assert len(matrices) == 12
    for weight in matrices.values():
        assert 0.01 < float(weight.dequantize().float().std()) < 0.03  # type: ignore[union-attr]


RESULT: dict[str, Any] = {
    "date": "2026-01-01T00:00:00+00:00",
    "cpu": "Some CPU",
    "cpu_model": "Vendor 6 1",
    "instruction_sets": ["avx2"],
    "threads": 2,
    "limits": {"read GB/s": 20.4},
    "model": "a-model",
    "bits": 8,
    "types": {},
    "units": {"single": "output tok/s", "late": "output tok/s"},
    "engines": {
        "quire": {
            "version": "1", "ready_seconds": 1.0, "loading_bytes": 1 << 30, "peak_bytes": 3 << 29,
            "settings": {"single": {"quantization": "w8a8"}, "late": {"quantization": "w8a8"}},
        },
        "fast": {
            "version": "2", "ready_seconds": 9.0, "loading_bytes": 1 << 31, "peak_bytes": 1 << 31,
            "settings": {"single": {"a": 1}, "late": {"a": 2}},
        },
        "absent": {"error": "it did not\ninstall"},
    },
    "samples": {"single": {"quire": [10.0, 20.0, 30.0], "fast": [20.0, 20.0, 40.0]}},
}  # fmt: skip


def test_tables_have_losses_in_bold_and_the_processor_beside_them() -> None:
    text = as_markdown([RESULT])
    assert "**a-model** on Some CPU (Vendor 6 1; avx2), 2 threads; read GB/s 20; 2026-01-01" in text
    assert "| fast 2 | 8 | **0.75** (20.0 / 20.0) | – | single: a=1; late: a=2 |" in text
    assert "| absent | 8 | – | – | install |" in text
    assert "| quire 1 | 8 | 1.00 | 1.50 | 1.0 |" in text
    assert "8 bits: quantization=w8a8" in text


def test_a_file_is_named_with_the_types_in_it() -> None:
    of_file = {**RESULT, "model": "m-q4_k_m", "types": {"F32": 1 << 20, "Q4_K": 200 << 20}}
    assert "**m-q4_k_m** (Q4_K 200.0 MiB, F32 1.0 MiB) on Some CPU" in as_markdown([of_file])
    assert as_text(of_file).startswith("m-q4_k_m (Q4_K 200.0 MiB, F32 1.0 MiB), Some CPU")
    assert as_text(RESULT).startswith("a-model, 8 bits, Some CPU")


def test_rows_are_ratios_alone() -> None:
    of_file = {**RESULT, "model": "m-q4_k_m", "types": {"Q4_K": 1}}
    assert ratio_rows([RESULT, of_file]) == [
        "| model | peer | `single` | `late` |",
        "|---|---|---|---|",
        "| a-model, 8 bits | fast 2 | 0.75 | – |",
        "| m-q4_k_m | fast 2 | 0.75 | – |",
    ]


@pytest.mark.parametrize(
    ("peers", "bits", "formats", "expected"),
    [
        ("llama.cpp", "4", None, [("m-q4_k_m.gguf", "llama.cpp"), ("m-q4_0.gguf", "llama.cpp")]),
        ("llama.cpp", "4", "q6_k", [("m-q6_k.gguf", "llama.cpp")]),
        ("openvino,llama.cpp", "8", None, [("m", "openvino"), ("m-q8_0.gguf", "llama.cpp")]),
        ("llama.cpp,vllm", "16", None, [("m", "llama.cpp,vllm")]),
        ("llama.cpp,quire", "8", None, [("m-q8_0.gguf", "llama.cpp,quire")]),
        ("quire", "4", None, [("m", "quire")]),
    ],
)
def test_llama_cpp_is_compared_on_the_same_file(
    peers: str, bits: str, formats: str | None, expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(peer: str, model: Path, settings: Settings, _places: Places) -> tuple[Path, Path]:
        assert peer == "llama.cpp"
        return Path("python"), model.with_name(f"{model.name}-{settings['format']}.gguf")

    monkeypatch.setattr(compare, "prepare", made)
    monkeypatch.setattr(compare, "make_model", lambda name, models: models / "m")
    line = ["compare", peers, "--bits", bits, *(("--formats", formats) if formats else ())]
    monkeypatch.setattr("sys.argv", line)
    found = compare.subjects(compare.parse_arguments(), Places(Path("venvs"), Path("models")))
    assert [(model.name, ",".join(names)) for model, names in found] == expected


def test_any_gguf_file_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "any-Q5_K_M.gguf"
    cut = Cut("qwen3moe", "Q4_0", "Q8_0", 1, 256, 256, 4, 2, 64, 4, 2, 256, {"rope.freq_base": 1e6})
    write(cut, path)
    monkeypatch.setattr("sys.argv", ["compare", "llama.cpp", "--file", str(path)])
    arguments = compare.parse_arguments()
    assert list(compare.subjects(arguments, Places(tmp_path, tmp_path))) == [(path, ["llama.cpp"])]
    assert compare.types_of(path).keys() == {"F32", "Q4_0", "Q8_0"}
    # 2 x 4 bytes x a layer x 2 heads x 64 for each of 1,024 x 1,152 tokens, and a tenth
    workloads = [parse_workload(text, {}) for text in ("1x300/1", "1024x896/128")]
    assert rooms("quire", path, workloads) == {"max_model_len": 8_192, "kv_cache_memory": "2GiB"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["vllm", "--file", "F"], "vllm: F is a GGUF file, for llama.cpp"),
        (["llama.cpp", "--file", "none.gguf"], "none.gguf is not a file"),
        (["llama.cpp", "--file", "F", "--formats", "q6_k"], "--formats is for models"),
    ],
)
def test_lines_that_do_not_fit_a_file(
    line: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "F").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["compare", *line])
    with pytest.raises(SystemExit):
        compare.parse_arguments()
    assert message in capsys.readouterr().err


def test_the_text_of_a_run_has_the_settings_and_names_what_was_not_reached() -> None:
    lines = as_text(RESULT).splitlines()
    assert "  late: a=2" in lines
    assert "absent: left out: it did not" in lines
    (row,) = [line for line in lines if line.startswith("single ") and "fast" in line]
    assert row.split()[-4:] == ["20.0", "20.0", "0.75", "0.50-1.00"]
    assert any(line.startswith("late") and "not reached" in line for line in lines)
