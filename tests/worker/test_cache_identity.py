"""The namespace of stored blocks: the same for what computes the same bits, another for everything else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import layer_specs
from quire.worker.kv_connector import cache_identity
from quire.worker.kv_connector.cache_identity import cache_namespace

CODE = {"isa": "avx2", "build": "b"}


def configured(model_path: Path, **options: object) -> EngineConfig:
    return resolve(EngineOptions.from_keywords({"model": str(model_path), "num_threads": 1, **options}))


def namespace(config: EngineConfig, code: dict[str, str] | None = None, **layout: object) -> bytes:
    groups, layers_per_group = group_layers(layer_specs(config.model), config.cache.block_size)
    shape = KVCacheLayout(config.cache.block_size, 100, groups, layers_per_group)
    return cache_namespace(config.model, config.load, config.device, replace(shape, **layout), code or CODE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"num_threads": 7},
        {"max_model_len": 64},
        {"max_num_seqs": 3},
        {"num_blocks_override": 9},
        {"queue_depth": 2},
        {"seed": 5},
        {"preemption_mode": "swap"},
        {"skip_tokenizer_init": True},
    ],
    ids=str,
)
def test_what_changes_no_bit_changes_nothing(model_path: Path, options: dict[str, object]) -> None:
    assert namespace(configured(model_path, **options)) == namespace(configured(model_path))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "w8a8"},
        {"block_size": 32},
        {"attention_backend": "torch"},
        {"load_format": "dummy"},
    ],
    ids=str,
)
def test_options_that_count(model_path: Path, options: dict[str, object]) -> None:
    assert namespace(configured(model_path, **options)) != namespace(configured(model_path))


def test_dummy_weights_count_by_their_seed(model_path: Path) -> None:
    seeds = [namespace(configured(model_path, load_format="dummy", seed=seed)) for seed in (1, 2, 1)]
    assert seeds[0] == seeds[2] != seeds[1]


def test_the_model_that_makes_drafts_counts(model_path: Path) -> None:
    """Blocks have its keys and values, too."""
    config, layout = configured(model_path), KVCacheLayout(16, 100, (), 1)
    other = replace(config.model, quantization=configured(model_path, quantization="int8").model.quantization)
    found = [
        cache_namespace(config.model, config.load, config.device, layout, CODE, draft)
        for draft in (None, config.model, other, config.model)
    ]
    assert found[1] == found[3]
    assert len(set(found)) == 3


def test_code_and_layout_count(model_path: Path) -> None:
    config = configured(model_path)
    same = namespace(config)
    assert namespace(config, num_blocks=7, num_host_blocks=3) == same
    assert namespace(config, {**CODE, "isa": "avx512"}) != same
    assert namespace(config, {**CODE, "build": "c"}) != same
    assert namespace(config, block_size=64) != same
    assert namespace(config, groups=(), layers_per_group=1) != same


def test_the_configuration_counts_but_not_its_notes(model_path: Path) -> None:
    config = configured(model_path)

    def with_hf(**values: object) -> bytes:
        hf = MappingProxyType({**config.model.hf, **values})
        return namespace(replace(config, model=replace(config.model, hf=hf)))

    assert with_hf(_name_or_path="elsewhere", transformers_version="9") == namespace(config)
    assert with_hf(rms_norm_eps=0.5) != namespace(config)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters", "sliding_attention"])
@pytest.mark.parametrize(("rope", "counts"), [("dynamic", True), ("longrope", True), ("linear", False)])
def test_the_length_counts_where_positions_depend_on_it(model_path: Path, rope: str, counts: bool, key: str) -> None:
    config = configured(model_path)
    settings = {"rope_scaling": None, "rope_parameters": {"full_attention": {}, key: {"rope_type": rope}}}
    settings |= {} if key == "sliding_attention" else {"rope_parameters": None, key: {"rope_type": rope}}
    hf = MappingProxyType({**config.model.hf, **settings})
    lengths = [
        namespace(replace(config, model=replace(config.model, hf=hf, max_model_len=length))) for length in (64, 128)
    ]
    assert (lengths[0] != lengths[1]) == counts


def test_weights_are_sampled_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_identity, "WHOLE_FILE_BYTES", 1000)
    monkeypatch.setattr(cache_identity, "SAMPLE_STRIDE", 100)
    monkeypatch.setattr(cache_identity, "SAMPLE_BYTES", 20)
    path = tmp_path / "weights"

    def fingerprint(content: bytes) -> str:
        path.write_bytes(content)
        return cache_identity._fingerprint(path)

    small, large = bytes(1000), bytes(5050)
    assert len({fingerprint(_changed(small, at)) for at in range(0, 1000, 7)}) == len(range(0, 1000, 7))
    # Whatever is as long as the stride is seen, and so is the end.
    runs = [fingerprint(_changed(large, at, 100)) for at in range(0, 4900, 90)]
    assert fingerprint(large) not in runs
    assert fingerprint(_changed(large, 5049)) != fingerprint(large)
    assert fingerprint(bytes(5051)) != fingerprint(large)


def test_scales_of_an_fp8_cache_count(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bytes each: samples of a large file do not meet them."""
    monkeypatch.setattr(cache_identity, "_weights", lambda model, load: {})
    directory = Path(shutil.copytree(model_path, tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    found = []
    for scale in (0.5, 0.25):
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(scale)
        save_file(tensors, directory / "model.safetensors")
        found.append([namespace(configured(directory, kv_cache_dtype=dtype)) for dtype in ("fp8", "bfloat16")])
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


def test_what_the_identity_holds_can_be_written_down(model_path: Path) -> None:
    """A value that JSON would only repeat by its address would make every engine another one."""
    first, second = (namespace(configured(model_path, quantization="w8a8")) for _ in range(2))
    assert first == second
    config = configured(model_path)
    text = json.dumps(vars(config.model), default=cache_identity._plain, sort_keys=True)
    assert " at 0x" not in text


def _changed(content: bytes, start: int, count: int = 1) -> bytes:
    changed = bytearray(content)
    for index in range(start, min(start + count, len(content))):
        changed[index] ^= 1 + index % 250
    return bytes(changed)
