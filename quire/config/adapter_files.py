"""Adapters on disk: directories in PEFT's layout, and GGUF files; a digest of their content."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.adapter_orders import AdapterRef
from quire.config.adapters import AdaptersConfig
from quire.config.gguf_adapter import read_header as read_header_of_gguf
from quire.config.peft import PeftConfig, read_peft_config
from quire.errors import ConfigError, ModelLoadError, UserError
from quire.utils.gguf import SUFFIX
from quire.utils.model_files import file_bytes
from quire.utils.safetensors_header import read_header

NO_SUMS = "sums of adapters are not computed: at most one may have a scale other than 0"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def read_config(path: Path) -> PeftConfig:
    """Settings of an adapter (directory or GGUF file), without its tensors. Raises ModelLoadError."""
    return read_header_of_gguf(path) if is_gguf(path) else read_peft_config(path)


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def weight_file(directory: Path) -> Path:
    """File of an adapter's tensors; `directory` itself if GGUF. Raises ModelLoadError without one."""
    if is_gguf(directory):
        return directory
    for name in WEIGHT_FILES:
        if file_bytes(directory / name) is not None:
            return directory / name
    raise ModelLoadError(f"{directory} holds no adapter's weights (looked for {', '.join(WEIGHT_FILES)})")


def content_digest(directory: Path) -> bytes:
    """SHA-256 of the tensors' file and the config keys that change results; workers compare it again when they load."""
    config, path = read_config(directory), weight_file(directory)
    counted = (config.rank, config.alpha, dict(config.rank_pattern), dict(config.alpha_pattern), config.rank_stabilised)
    parameters = sorted(config.target_parameters)  # they say which tensors are whose
    digest = hashlib.sha256(json.dumps((*counted, parameters) if parameters else counted).encode())
    try:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {os.strerror(error.errno or 0)}") from None
    return digest.digest()


def scaled(adapter: AdapterRef, scale: float) -> AdapterRef:
    """Adapter of scale 1 with a request's scale, and a digest of both."""
    digest = scaled_digest(adapter.digest, scale)
    return AdapterRef(adapter.path, digest, adapter.name, scale)


def scaled_digest(content: bytes, scale: float) -> bytes:
    return content if scale == 1.0 else hashlib.sha256(content + struct.pack("<d", scale)).digest()


def open_adapter(path: str, limits: AdaptersConfig) -> AdapterRef:
    """Adapter in a directory or a GGUF file, opened when an option or request names it. Raises UserError for one that
    the engine does not take. Workers check at load time that its tensors fit the model."""
    directory = Path(os.path.abspath(os.path.expanduser(path)))
    try:
        if not directory.is_dir() and not is_gguf(directory):
            raise ModelLoadError(f"{path} is no directory of an adapter, nor a GGUF file")
        config, file = read_config(directory), weight_file(directory)
        if config.largest_rank > limits.max_rank:
            raise ModelLoadError(
                f"{config.path}: an adapter of rank {config.largest_rank} needs max_lora_rank of as much, which is "
                f"{limits.max_rank}"
            )
        if file.suffix == ".safetensors":
            read_header(file)
        return AdapterRef(str(directory), content_digest(directory))
    except ModelLoadError as error:
        raise UserError(error.message, param="lora_path") from None


class FileScale(msgspec.Struct, frozen=True):
    """Adapter file of `--lora` or `--lora-scaled`, and its scale for requests that name none."""

    path: str
    scale: float


def files_of(lora: Sequence[str], lora_scaled: Sequence[str], *, applies: bool) -> list[FileScale]:
    """Adapters of `--lora` and `--lora-scaled`, each with commas. applies: False sets all scales to 0. Raises
    ConfigError, also for two adapters with nonzero scales."""
    found = [FileScale(path, 1.0) for text in lora for path in _listed(text, "lora")]
    for text in lora_scaled:
        for entry in _listed(text, "lora_scaled"):
            path, _, number = entry.rpartition(":")
            try:
                scale = float(number)
            except ValueError:
                scale = math.nan
            if not path or not math.isfinite(scale):
                raise ConfigError(f"lora_scaled: {entry!r} is not FILE:SCALE", param="lora_scaled")
            found.append(FileScale(path, scale))
    if not applies:
        found = [FileScale(each.path, 0.0) for each in found]
    if sum(each.scale != 0 for each in found) > 1:
        raise ConfigError(
            f"{NO_SUMS} (--lora-scaled FILE:0, or --lora-init-without-apply)",
            param="lora" if lora else "lora_scaled",
        )
    return found


def _listed(text: str, option: str) -> list[str]:
    (paths,) = csv.reader([text])
    if not all(paths):
        raise ConfigError(f"{option}: {text!r} names an empty path", param=option)
    return paths
