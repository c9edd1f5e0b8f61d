"""From config.json to ModelConfig: what is read, and one clear error for whatever is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from quire.config.families import ARCHITECTURES, RUNNABLE, known_values, read_shape
from quire.config.hf_config import ModelChoices, load_model_config
from quire.config.hf_json import Fields
from quire.config.hub import read_page
from quire.config.model import ModelConfig
from quire.config.rope import LLAMA_DEFAULTS, RopeDefaults, read_rope
from quire.errors import ConfigError, ModelLoadError
from quire.models.registry import model_architectures

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 5000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}


def write(directory: Path, config: object, generation: object = None) -> str:
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return str(directory)


def read(name: str, **options: Any) -> ModelConfig:
    return load_model_config(
        name, **{"dtype": "auto", "max_model_len": None, "revision": None, "config_only": False, **options}
    )


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


def test_llama(tmp_path: Path) -> None:
    config = read(write(tmp_path, LLAMA))
    assert config == ModelConfig(
        name=str(tmp_path),
        path=tmp_path,
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        shape=read_shape(LLAMA, str(tmp_path)),
        max_model_len=256,
        eos_token_ids=(2,),
        hf=known_values(LLAMA, ""),
    )
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.num_heads) == (97, 48, 4, 6)
    assert (config.num_kv_heads, config.head_dim, config.sliding_windows) == (2, 8, (None,) * 4)


def test_gpt2_names_its_sizes_differently(tmp_path: Path) -> None:
    config = read(write(tmp_path, GPT2))
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (48, 2, 4, 4)
    assert (config.head_dim, config.max_model_len, config.eos_token_ids) == (12, 128, ())


def test_head_dim_may_differ_from_hidden_size_over_heads(tmp_path: Path) -> None:
    assert read(write(tmp_path, {**LLAMA, "head_dim": 20})).head_dim == 20
    assert read(write(tmp_path, {**LLAMA, "architectures": ["Qwen3ForCausalLM"]})).head_dim == 128


def test_heads_default_to_no_groups(tmp_path: Path) -> None:
    assert read(write(tmp_path, without(LLAMA, "num_key_value_heads"))).num_kv_heads == 6


@pytest.mark.parametrize(
    ("stored", "dtype", "resolved"),
    [
        ({"torch_dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"dtype": "float16"}, "auto", "float16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "auto", "float16"),
        ({"torch_dtype": "float64"}, "auto", "float32"),
        ({"torch_dtype": None}, "auto", "float32"),
        ({"torch_dtype": "bfloat16"}, "float32", "float32"),
        ({"torch_dtype": "float16"}, "bfloat16", "bfloat16"),
    ],
)
def test_dtype(stored: dict[str, Any], dtype: str, resolved: str, tmp_path: Path) -> None:
    config = {**without(LLAMA, "torch_dtype"), **stored}
    assert read(write(tmp_path, config), dtype=dtype).dtype == resolved


@pytest.mark.parametrize(
    ("dtype", "cache", "resolved"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "float32"),
        ("float32", "auto", "float32"),
        ("bfloat16", "int8", "int8"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_cache_dtype(dtype: str, cache: str, resolved: str, tmp_path: Path) -> None:
    assert read(write(tmp_path, LLAMA), dtype=dtype, kv_cache_dtype=cache).kv_cache_dtype == resolved


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (2,)),
        ({"eos_token_id": [5, 7]}, (5, 7)),
        ({"eos_token_id": 9}, (9,)),
        ({"temperature": 0.6}, (2,)),
    ],
)
def test_end_of_sequence_ids(generation: object, expected: tuple[int, ...], tmp_path: Path) -> None:
    assert read(write(tmp_path, LLAMA, generation)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MISTRAL, (4096,) * 4),
        ({**MISTRAL, "sliding_window": 16}, (16, 16, 16, 16)),
        ({**MISTRAL, "sliding_window": None}, (None, None, None, None)),
        ({**QWEN2, "sliding_window": 16, "use_sliding_window": False}, (None, None, None, None)),
        ({**QWEN2, "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 16)),
        ({**QWEN2, "sliding_window": 16, "use_sliding_window": True}, (None, None, None, None)),
        ({**MISTRAL, "sliding_window": 16, "layer_types": ["full_attention"] * 4}, (16, 16, 16, 16)),
        (
            {
                **QWEN2,
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (16, None, 16, None),
        ),
        ({**LLAMA, "sliding_window": 16}, (None, None, None, None)),
    ],
)
def test_sliding_windows(config: dict[str, Any], expected: tuple[int | None, ...], tmp_path: Path) -> None:
    assert read(write(tmp_path, config)).sliding_windows == expected


@pytest.mark.parametrize(
    ("scaling", "usual", "longest"),
    [
        (None, 256, 256),
        ({"rope_type": "linear", "factor": 4.0}, 1024, 1024),
        ({"type": "dynamic", "factor": 2.0}, 256, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            256,
            256,
        ),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, 256, 256),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_max_model_len(scaling: object, usual: int, longest: int, key: str, tmp_path: Path) -> None:
    name = write(tmp_path, {**LLAMA, key: scaling})
    assert read(name).max_model_len == usual
    assert read(name, max_model_len=longest).max_model_len == longest
    with pytest.raises(ConfigError, match=f"max_model_len .{longest + 1}. exceeds the {longest} positions") as raised:
        read(name, max_model_len=longest + 1)
    assert raised.value.param == "max_model_len"


def test_both_styles_of_rope_settings_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = {**LLAMA, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {
        **without(LLAMA, "rope_theta"),
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, "partial_rotary_factor": 0.5, **scaling},
    }
    defaults = RopeDefaults(share=0.25)
    rope = read_rope(Fields(old, "old"), 8, defaults)
    assert rope == read_rope(Fields(new, "new"), 8, defaults)
    assert (rope.theta, rope.rotary_dim, rope.factor, rope.original_max_position_embeddings) == (5000.0, 4, 8.0, 64)


def test_theta_of_the_first_llama() -> None:
    assert read_rope(Fields(without(LLAMA, "rope_theta"), "x"), 8, LLAMA_DEFAULTS).theta == 10_000.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLMM"]},
            f"unknown architecture 'LlamaForCausalLMM' .known: {RUNNABLE[0]}, ",
        ),
        ({"architectures": ["T5Model"]}, f"known: {', '.join(RUNNABLE)}"),
        ({"architectures": []}, "'architectures' must list"),
        ({"architectures": None}, "'architectures' must list"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"intermediate_size": None}, "'intermediate_size' is missing"),
        ({"hidden_size": "48"}, "hidden_size must be an integer of at least 1, not '48'"),
        ({"hidden_size": 50}, "hidden_size .50. must be a multiple of num_attention_heads .6."),
        ({"num_key_value_heads": 4}, "must be a multiple of num_key_value_heads .4."),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1"),
        ({"num_attention_heads": True}, "num_attention_heads must be an integer"),
        ({"max_position_embeddings": -5}, "max_position_embeddings must be an integer"),
        ({"eos_token_id": "two"}, "eos_token_id must be an integer of at least 0"),
        ({"quantization_config": {"quant_method": "fp6"}}, "'fp6' is not supported; quantised checkpoints may be gptq"),
        ({"rope_theta": -1}, "rope_theta must be a number greater than zero"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type 'spiral' is not supported .known: default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "factor must be a number"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        (
            {"configuration_files": ["config.5.0.0.json"]},
            "configuration_files, which names other files, is not supported",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "list of 4 numbers"),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "partial_rotary_factor 0.5 is not supported beside rope_type 'linear'",
        ),
    ],
)
def test_bad_values_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    name = write(tmp_path, {**LLAMA, **change})
    with pytest.raises(ModelLoadError, match=message) as raised:
        read(name)
    assert str(tmp_path / "config.json") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_bad_layer_types(tmp_path: Path) -> None:
    config = {**QWEN2, "sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention"]}
    with pytest.raises(ModelLoadError, match="layer_types must name 4 layers"):
        read(write(tmp_path, config))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "[" * 100_000])
def test_config_that_is_not_json(text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config.json (is not valid JSON|must hold a JSON object)"):
        read(write(tmp_path, text))


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"is not a model directory: it has no config\.json"):
        read(str(tmp_path))


def test_file_instead_of_directory(tmp_path: Path) -> None:
    name = write(tmp_path, LLAMA)
    with pytest.raises(ModelLoadError, match="is a file: give the model's directory"):
        read(f"{name}/config.json")


@pytest.mark.parametrize(
    "name", ["/no/such/directory", "./nowhere", "~/nowhere", "a/b/c", "model.gguf", "models/m.gguf"]
)
def test_a_missing_file_is_no_such_file(name: str) -> None:
    with pytest.raises(ModelLoadError) as raised:
        read(name)
    assert str(raised.value) == f"model {name!r}: no such file or directory"


@pytest.mark.parametrize(
    ("page", "name", "revision"),
    [
        ("https://huggingface.co/someone/something", "someone/something", None),
        ("http://www.huggingface.co/someone/something/", "someone/something", None),
        (" huggingface.co/someone/some.thing?library=x#use", "someone/some.thing", None),
        ("https://hf.co/someone/something-GGUF:Q8_0", "someone/something-GGUF:Q8_0", None),
        ("https://huggingface.co/someone/something/tree/main", "someone/something", None),
        ("https://huggingface.co/someone/something/tree/v2", "someone/something", "v2"),
        ("https://huggingface.co/someone/something/blob/v2/config.json", "someone/something", "v2"),
        ("https://huggingface.co/a/b/resolve/main/x/m-Q4_K_M.gguf?download=true", "a/b:m-Q4_K_M", None),
        ("someone/something", "someone/something", None),
        ("https://example.com/someone/something", "https://example.com/someone/something", None),
        ("https://huggingface.co/datasets/someone/x", "https://huggingface.co/datasets/someone/x", None),
    ],
)
def test_the_address_of_a_page_of_the_hub(page: str, name: str, revision: str | None) -> None:
    assert read_page(page, None) == (name, revision)
    assert read_page(page, "v1") == (name, "v1")


def test_a_pasted_address_is_fetched_and_the_model_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, ["config.json", "model.safetensors"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    config = read("https://huggingface.co/someone/something/tree/v2")
    assert config.name == "someone/something"
    assert {(name, options["revision"]) for name, options in hub.calls} == {("someone/something", "v2")}


@pytest.mark.parametrize("name", ["some one/x", "https://example.com", ""])
def test_neither_directory_nor_hub_id(name: str) -> None:
    with pytest.raises(ModelLoadError, match="neither a directory nor a") as raised:
        read(name)
    assert "\n" not in str(raised.value)


class Hub:
    """Stands in for huggingface_hub.snapshot_download."""

    def __init__(self, directory: Path, files: list[str]) -> None:
        self.directory, self.files, self.calls = directory, files, []

    def __call__(self, name: str, **options: Any) -> str:
        self.calls.append((name, options))
        for file in self.files:
            if any(file.endswith(pattern.lstrip("*")) for pattern in options["allow_patterns"]):
                text = json.dumps(LLAMA) if file == "config.json" else ""
                (self.directory / file).write_text(text)
        return str(self.directory)


@pytest.mark.parametrize(
    ("files", "config_only", "fetched"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin"], False, ["config.json", "model.safetensors"]),
        (["config.json", "pytorch_model.bin"], False, ["config.json", "pytorch_model.bin"]),
        (["config.json", "model.safetensors", "pytorch_model.bin"], True, ["config.json"]),
    ],
)
def test_hub_id(
    files: list[str], config_only: bool, fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    config = read("someone/something", revision="v2", config_only=config_only)
    assert (config.name, config.path) == ("someone/something", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == fetched
    assert {(name, options["revision"]) for name, options in hub.calls} == {("someone/something", "v2")}


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no connection\nand a long explanation"), OSError("disk")])
def test_hub_out_of_reach(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match="'someone/x' is neither a directory nor a reachable hub id: ") as raised:
        read("someone/x")
    assert "\n" not in str(raised.value)


def test_known_architectures_are_those_of_the_model_registry() -> None:
    assert list(RUNNABLE) == list(model_architectures())


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(RUNNABLE)))
def test_a_family_with_a_shape_and_no_layers_is_for_planning(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"the engine cannot run {architecture} yet; `quire plan` and") as raised:
        read(write(tmp_path, {**LLAMA, "architectures": [architecture]}), choices=ModelChoices(model_impl="quire"))
    assert all(name in str(raised.value) for name in RUNNABLE)


def test_reading_a_config_imports_neither_torch_nor_the_hub(tmp_path: Path) -> None:
    program = (
        "import sys; from quire.config.hf_config import ModelChoices, load_model_config; "
        "load_model_config(sys.argv[1], dtype='auto', max_model_len=None, revision=None, config_only=False); "
        "print([name for name in ('torch', 'huggingface_hub', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, write(tmp_path, LLAMA)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
