from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.config.fallback import HINT, MODEL_IMPLS, has_transformers, knows_class
from quire.config.families import (
    ARCHITECTURES,
    RUNNABLE,
    VISION_CONFIG,
    known_values,
    language_model,
    shape_of,
    with_usual_values,
)
from quire.config.generation import read_generation, sampling_defaults
from quire.config.gguf import Described, read_gguf
from quire.config.gguf_vision import find_mmproj, with_tower
from quire.config.hf_json import Fields, read_json, read_optional_json
from quire.config.hub import fetch, looks_like_a_path, read_page
from quire.config.model import DTYPE_BYTES, ModelConfig
from quire.config.model_shape import ModelShape
from quire.config.options import BUNDLED_MODEL, BUNDLED_SIGHTS
from quire.config.pooling import longest_text, read_pooling
from quire.config.quantization_formats import read_quantization
from quire.config.rope import read_lengths
from quire.config.vision import OUTER_KEYS
from quire.errors import ConfigError, ModelLoadError
from quire.logging import get_logger
from quire.utils.gguf import SUFFIX as GGUF_SUFFIX
from quire.utils.gguf import find_gguf
from quire.utils.model_files import file_bytes
from quire.utils.safetensors_header import read_header

logger = get_logger(__name__)
_BUNDLED = Path(__file__).resolve().parent.parent / "bundled"
BUNDLED_DIRECTORIES: Mapping[str, Path] = {
    BUNDLED_MODEL: _BUNDLED / "quire-python-5m",
    BUNDLED_SIGHTS: _BUNDLED / "quire-sights-1m",
}
"""Models in the package -> their directories."""
CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"
_LONGEST_NAME = 100
_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_MOST_DRAFT_LAYERS = 16


@dataclass(frozen=True)
class ModelChoices:
    """Options that change a model's configuration, under their names."""

    runner: str = "auto"
    model_impl: str = "auto"
    load_draft_head: bool = False
    download_dir: str | None = None
    hf_overrides: Mapping[str, Any] | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    mmproj: str | None = None


USUAL_CHOICES = ModelChoices()


def load_model_config(
    name: str,
    *,
    dtype: str,
    kv_cache_dtype: str = "auto",
    max_model_len: int | None,
    revision: str | None,
    config_only: bool,
    choices: ModelChoices = USUAL_CHOICES,
) -> ModelConfig:
    """Read and check the configuration of `name`: "bundled", a directory, a GGUF file or a hub id. kv_cache_dtype:
    "auto" means bfloat16 for bfloat16 weights and GGUF files with dtype "auto", else float32. config_only: fetch no
    weights. Raises ModelLoadError for a faulty model, ConfigError for options that it cannot have."""
    runner, model_impl = choices.runner, choices.model_impl
    name, revision = read_page(name, revision)
    path = _described(find_model(name, revision=revision, config_only=config_only, download_dir=choices.download_dir))
    described, mmproj = _with_tower(_read_described(path), path, choices.mmproj)
    whole = _overridden(described.config, choices.hf_overrides or {})
    raw, key = language_model(whole)
    where = ": ".join(filter(None, (_where(path), key)))
    architecture, impl = _architecture(Fields(raw, where), model_impl)
    if impl == "quire":
        raw = known_values(raw, where)
    fields = Fields(raw, where)
    if impl != "quire" and path.is_file():
        raise ModelLoadError(f"{path}: GGUF files run with Quire's own model code alone, not through Transformers")
    shape = shape_of(raw if impl == "quire" else with_usual_values(raw), name, where)
    if impl != "quire" and any(layer.attention.kind == "state" for layer in shape.layers):
        raise fields.error(f"{architecture} keeps states, which models that run through Transformers cannot do here")
    longest = usual = shape.max_model_len
    family, pooling = ARCHITECTURES.get(architecture), None
    if impl == "quire":
        assert family is not None, "the engine's own models have families"
        stated, is_encoder = described.pooling, family.is_bidirectional
        pooling = read_pooling(path, fields, architecture, runner, is_encoder=is_encoder, stated=stated)
        if family.position_rows is None and not family.is_bidirectional:
            longest, usual = read_lengths(fields, shape.attention.rotated_dim, family.rope, shape.windows)
        if family.draft_prefix and choices.load_draft_head and path.is_dir():
            shape = _with_draft_head(shape, path, family.draft_prefix, fields)
        if family.draft_layer and choices.load_draft_head and path.is_dir():
            stored = f"model.layers.{shape.num_layers}.{family.draft_layer}" in _tensor_names(path)
            shape = replace(shape, draft_layers=shape.layers[-1:] if stored else ())
    elif runner == "pooling":
        raise ConfigError(f"runner='pooling' is not available for {architecture} through Transformers", param="runner")
    if pooling is not None:
        shape = replace(shape, is_tied=True)  # it has no output projection
        usual = longest_text(path, usual)
    generation = read_generation(path, choices.generation_config, choices.override_generation_config)
    resolved_dtype = stored_dtype(raw) if dtype == "auto" else _known_dtype(dtype)
    return ModelConfig(
        name=name,
        path=path,
        architecture=architecture,
        shape=shape,
        dtype=resolved_dtype,
        kv_cache_dtype=_cache_dtype(resolved_dtype, has_free_dtype=path.is_file() and dtype == "auto")
        if kv_cache_dtype == "auto"
        else kv_cache_dtype,
        max_model_len=_max_model_len(max_model_len, longest, usual),
        eos_token_ids=_eos_token_ids(path, fields, choices.override_generation_config or {}),
        hf=raw,
        quantization=read_quantization(fields),
        pooling=pooling,
        is_multimodal=bool(key) or VISION_CONFIG in whole,
        vision=vision_of(whole),
        image_token_id=_image_token_id(whole, architecture),
        mmproj=mmproj,
        impl=impl,
        sampling_defaults=sampling_defaults(generation),
    )


def read_config(name: str, revision: str | None = None, download_dir: str | None = None) -> dict[str, Any]:
    """config.json of any model, also of an unknown architecture. Fetches no weights. Raises ModelLoadError."""
    found = find_model(name, revision=revision, config_only=True, download_dir=download_dir)
    return _read_described(_described(found)).config


def read_directory_config(name: str, revision: str | None = None, download_dir: str | None = None) -> dict[str, Any]:
    """config.json of a model's directory; {} for a GGUF file."""
    found = _described(find_model(name, revision=revision, config_only=True, download_dir=download_dir))
    return {} if found.is_file() else _read_described(found).config


def find_model(name: str, *, revision: str | None, config_only: bool, download_dir: str | None = None) -> Path:
    """Local directory or GGUF file of a model. Other names are fetched from the hub, into `download_dir` or the hub
    library's cache; `name` may be the address of a repository's page. Raises ModelLoadError."""
    if name in BUNDLED_DIRECTORIES:
        return BUNDLED_DIRECTORIES[name]
    name, revision = read_page(name, revision)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if name and path.is_file() and path.suffix == GGUF_SUFFIX:
        return path
    if name and path.exists():
        raise ModelLoadError(f"{name!r} is a file: give the model's directory, or a file *{GGUF_SUFFIX}")
    if looks_like_a_path(name):
        raise ModelLoadError(f"model {name!r}: no such file or directory")
    return fetch(name, revision, config_only, download_dir)


def _described(path: Path) -> Path:
    if path.is_file() or file_bytes(path / CONFIG_FILE) is not None:
        return path
    found = None if any(path.glob("*.safetensors")) else find_gguf(path)
    if found is None:
        raise ModelLoadError(f"{path} is not a model directory: it has no {CONFIG_FILE}")
    return found


def _read_described(path: Path) -> Described:
    if path.is_file():
        return read_gguf(path)
    config = read_json(path / CONFIG_FILE)
    if config.get("configuration_files"):
        raise ModelLoadError(f"{path / CONFIG_FILE}: configuration_files, which names other files, is not supported")
    if config.get("quantization_config") is None:
        # ModelOpt's older checkpoints have the settings in a file of their own.
        inner = read_optional_json(path / MODELOPT_FILE).get("quantization")
        if isinstance(inner, dict) and inner.get("quant_algo") is not None:
            config["quantization_config"] = {"quant_method": "modelopt", **inner}
    return Described(config)


def _with_tower(described: Described, path: Path, asked: str | None) -> tuple[Described, Path | None]:
    """(GGUF model with its vision tower, that file; None: no tower). asked: the user's file; None: the one beside the
    model, if it is this model's."""
    if not path.is_file():
        if asked is not None:
            raise ConfigError(f"mmproj is for GGUF models, and {path} is none", param="mmproj")
        return described, None
    file = find_mmproj(path) if asked is None else Path(asked).expanduser()
    if file is None:
        return described, None
    try:
        return described._replace(config=with_tower(described.config, path, file)), file
    except ModelLoadError as error:
        if asked is not None:
            raise
        logger.info("text alone is taken: %s", error.message)
        return described, None


def _overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for name, value in overrides.items():
        own = config.get(name)
        is_part = name.endswith("_config") and isinstance(own, dict) and isinstance(value, dict)
        merged[name] = _overridden(own, value) if is_part and isinstance(own, dict) else value
    return merged


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    value = config.get(key)
    return value if isinstance(value, Mapping) else None


def vision_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Vision tower's part of a config.json, for `read_vision`; None without one."""
    found = _object(config, VISION_CONFIG)
    outer = {key: config[key] for key in OUTER_KEYS if key in config}
    return found if found is None or not outer else {**found, **outer}


def _image_token_id(config: Mapping[str, Any], architecture: str) -> int | None:
    """Token id that stands for images in prompts; Gemma's usual one where its file has no key; None: no key."""
    usual = 262_144 if architecture == "Gemma3ForCausalLM" and VISION_CONFIG in config else None
    found = (_token_id(config, key) for key in ("image_token_id", "image_token_index"))
    return next((token_id for token_id in found if token_id is not None), usual)


def _token_id(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and value >= 0 else None


def _where(path: Path) -> str:
    return str(path if path.is_file() else path / CONFIG_FILE)


def _architecture(fields: Fields, model_impl: str) -> tuple[str, str]:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise fields.error("the key 'architectures' must list the model's class name")
    if model_impl not in MODEL_IMPLS:
        raise ConfigError(f"model_impl must be one of {', '.join(MODEL_IMPLS)}, not {model_impl!r}", param="model_impl")
    for name in names:
        if name in RUNNABLE and model_impl != "transformers":
            return str(name), "quire"
    runs = ", ".join(RUNNABLE)
    if model_impl != "quire" and has_transformers():
        for name in names:
            if knows_class(name):
                if fields.values.get("is_encoder_decoder"):
                    raise fields.error(f"{name} has an encoder and a decoder: such models are not supported")
                return str(name), "transformers"
    hint = "" if has_transformers() else f"; others may run through Transformers: {HINT}"
    for name in names:
        if name in ARCHITECTURES:
            raise fields.error(
                f"the engine cannot run {name} yet; `quire plan` and `quire simulate` know its shape (the engine runs: "
                f"{runs}{hint})"
            )
    raise fields.error(f"unknown architecture {names[0][:_LONGEST_NAME]!r} (known: {runs}{hint})")


def stored_dtype(raw: Mapping[str, Any]) -> str:
    """Weight dtype of config.json (Transformers 5 calls it dtype); float32 if Quire computes with none."""
    stored = raw.get("dtype") or raw.get("torch_dtype")
    return stored if isinstance(stored, str) and stored in DTYPE_BYTES else "float32"


def _cache_dtype(dtype: str, *, has_free_dtype: bool) -> str:
    """Default dtype of keys and values. has_free_dtype: True for a GGUF file without a dtype option."""
    return "bfloat16" if dtype == "bfloat16" or has_free_dtype else "float32"


def _with_draft_head(shape: ModelShape, path: Path, prefix: str, fields: Fields) -> ModelShape:
    """`shape` with the checkpoint's draft head, if any: attention layers like the model's, with experts if the model
    has some."""
    num_layers = _count_draft_layers(path, prefix)
    attends = [layer for layer in shape.layers if layer.attention.kind != "state"]
    if num_layers and not attends:
        raise fields.error(f"the checkpoint has a head for drafts ({prefix}*), and the model no layer of its kind")
    attends.sort(key=lambda layer: layer.experts is None)
    return replace(shape, draft_layers=tuple(attends[:1]) * num_layers)


def _count_draft_layers(directory: Path, prefix: str) -> int:
    """Layers of the draft head whose tensor names begin with `prefix`, by an index or safetensors headers. Raises
    ModelLoadError."""
    layer = re.compile(rf"{re.escape(prefix)}layers\.(\d{{1,9}})\.")
    num_layers = 0
    for name in _tensor_names(directory):
        if name.startswith(prefix):
            found = layer.match(name)
            num_layers = max(num_layers, 1 if found is None else int(found[1]) + 1)
    if num_layers > _MOST_DRAFT_LAYERS:
        raise ModelLoadError(f"{directory}: a head for drafts of {num_layers} layers; most: {_MOST_DRAFT_LAYERS}")
    return num_layers


def _tensor_names(directory: Path) -> Iterable[str]:
    for index in _INDEX_FILES:
        if (directory / index).is_file():
            weight_map = read_json(directory / index).get("weight_map")
            return weight_map if isinstance(weight_map, dict) else ()  # what else it is, loading says
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    return [name for file in files for name in _header_names(file)]


def _header_names(file: Path) -> Iterable[str]:
    try:
        header = json.loads(read_header(file))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is not a valid safetensors file: {str(error)[:200]}") from None
    return header if isinstance(header, dict) else ()


def _known_dtype(dtype: str) -> str:
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPE_BYTES)}, not {dtype!r}", param="dtype")
    return dtype


def _max_model_len(wanted: int | None, longest: int, usual: int) -> int:
    if wanted is None:
        return usual
    if wanted > longest:
        raise ConfigError(
            f"max_model_len ({wanted}) exceeds the {longest} positions that the model supports",
            param="max_model_len",
        )
    return wanted


def _eos_token_ids(path: Path, fields: Fields, overrides: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, or of config.json if that file or its key is absent. overrides:
    user's keys for generation_config.json."""
    generation_file = path / "generation_config.json"
    generation = Fields({**read_optional_json(generation_file), **overrides}, str(generation_file))
    if generation.values.get("eos_token_id") is not None:
        return _token_ids(generation, "eos_token_id")
    return _token_ids(fields, "eos_token_id")


def _token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    value = fields.values.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(Fields({key: item}, fields.where).integer(key, minimum=0) for item in ids)


def model_fields(config: ModelConfig) -> Fields:
    """Typed access to a resolved model's config.json, for keys that only its family reads. Layers read them when they
    are made."""
    values: Mapping[str, Any] = config.hf
    return Fields(values, _where(config.path))
