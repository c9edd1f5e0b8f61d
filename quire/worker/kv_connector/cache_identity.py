"""Hash of everything besides its tokens that determines a stored KV block; engines with equal hashes share blocks. It
covers configuration, weights, quantisation, dtypes, computing code and layout, not paths or names."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch

from quire.config.device import DeviceConfig
from quire.config.load import LoadConfig, draft_load
from quire.config.model import ModelConfig
from quire.kv_cache.layout import KVCacheLayout
from quire.models.cache_scales import stored_cache_scales
from quire.models.weight_files import WeightFiles, find_weights
from quire.version import __version__

WHOLE_FILE_BYTES = 64 * 2**20
"""Size up to which files are hashed whole ..."""
SAMPLE_STRIDE = 2**16
SAMPLE_BYTES = 512
"""... and bytes sampled per stride of larger files: a changed tensor of at least SAMPLE_STRIDE bytes is noticed."""

_NOT_CONTENT = {"name", "path", "hf", "max_model_len", "eos_token_ids", "sampling_defaults", "shape", "draft_layers"}
_NOT_CONTENT_HF = {"_name_or_path", "name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"}
_NOT_RESULT = {"num_threads", "cpu_isa", "cuda_graphs", "cuda_graph_sizes"}
"""Device options outside the identity."""
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope", "su", "yarn"}
"""Rotation types that depend on `max_model_len` (quire/layers/rotary.py), with aliases."""


def cache_namespace(
    model: ModelConfig,
    load: LoadConfig,
    device: DeviceConfig,
    layout: KVCacheLayout,
    code: dict[str, str],
    draft: ModelConfig | None = None,
) -> bytes:
    """32 bytes. code: from `native_code`, `torch_code` or `device_code`. draft: draft model, whose keys and values
    share the blocks. Raises ModelLoadError or OSError for unreadable weight files."""
    identity = {
        **_model_identity(model, load),
        "draft": None if draft is None else _model_identity(draft, draft_load(load)),
        "computation": {"version": __version__, **_without(vars(device), _NOT_RESULT), **code},
        "layout": {
            "block_size": layout.block_size,
            "groups": [
                [type(group.spec).__name__, group.spec, group.layers, group.block_size] for group in layout.groups
            ],
            "layers_per_group": layout.layers_per_group,
        },
    }
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(b"quire.kv.disk.v1\0" + text.encode()).digest()


def _model_identity(model: ModelConfig, load: LoadConfig) -> dict[str, Any]:
    return {
        "model": _without(vars(model), _NOT_CONTENT),
        "shape": _without(asdict(model.shape), _NOT_CONTENT),
        "hf": _without(model.hf, _NOT_CONTENT_HF),
        "rope_length": _rope_length(model),
        "weights": _weights(model, load),
        "cache_scales": _cache_scales(model, load),
    }


def native_code(isa: str, matmul_precision: str, binary: Path) -> dict[str, str]:
    """Part of a block file's namespace for the native kernels: instruction set, precision and build."""
    build = hashlib.sha256(binary.read_bytes()).hexdigest()
    return {"isa": isa, "products": matmul_precision, "build": build}


def torch_code(num_threads: int) -> dict[str, str]:
    """Part of a block file's namespace for plain operators, whose sums may depend on torch's version, the processor and
    the number of threads."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "isa": capability, "threads": str(num_threads)}


def device_code(device: str, capability: tuple[int, int], triton: str) -> dict[str, str]:
    """Part of a block file's namespace for a device's kernels and libraries. device: its name. triton: version."""
    return {"device": device, "capability": str(capability), "torch": torch.__version__, "triton": triton}


def _without(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _rope_length(model: ModelConfig) -> int | None:
    settings = [each for each in (model.hf.get("rope_parameters"), model.hf.get("rope_scaling")) if each]
    settings += [own for each in settings for own in each.values() if isinstance(own, Mapping)]
    kinds = {str(each.get(key)) for each in settings for key in ("rope_type", "type")}
    return model.max_model_len if kinds & _LENGTH_DEPENDENT_ROPE else None


def _weights(model: ModelConfig, load: LoadConfig) -> dict[str, Any]:
    if load.load_format == "dummy":
        return {"dummy_seed": load.seed}
    files = find_weights(model.path, load.load_format)
    return {"files": [_fingerprint(path) for path in files.paths]}


def _cache_scales(model: ModelConfig, load: LoadConfig) -> dict[str, list[float]]:
    if model.kv_cache_dtype != "fp8" or load.load_format == "dummy":
        return {}
    files = find_weights(model.path, load.load_format)
    return stored_cache_scales(files) if isinstance(files, WeightFiles) else {}


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    for piece in _pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if len(data) <= WHOLE_FILE_BYTES:
            yield data[:]
            return
        for start in range(0, len(data), SAMPLE_STRIDE):
            yield data[start : start + SAMPLE_BYTES]
        yield data[-SAMPLE_BYTES:]


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if hasattr(value, "items"):
        return dict(value.items())
    return repr(value)
