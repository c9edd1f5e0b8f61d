"""Heads that config.json ties to the embedding although the checkpoint differs, as in Transformers: a different head is
used; one without an embedding serves as both."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.logging import get_logger
from quire.models.claims import outline
from quire.models.weight_files import WeightFiles
from quire.quantization.file_tensor import FileTensor
from quire.quantization.integer_weight import WeightSource

HEAD = "lm_head.weight"
_HEAD = re.compile(r"(.*language_model\.)?lm_head\.weight")
_EMBEDDING = re.compile(r"((model|transformer|decoder|language_model)\.)*(embed_tokens|wte)\.weight")
_CHUNK_BYTES = 2**26

logger = get_logger(__name__)
SourceT = TypeVar("SourceT", bound=WeightSource)


def with_head_of(config: ModelConfig, files: WeightFiles) -> tuple[ModelConfig, str]:
    """Configuration with the files' tying, and the embedding's name if only HEAD is stored (else ""). Raises
    ModelLoadError for unreadable files."""
    if not config.shape.is_tied or config.pooling is not None:
        return config, ""
    found = {name: tensor.dtype for name, tensor in _tables(files)}
    if HEAD not in found:
        return config, ""
    if len(found) == 1:
        slots = outline(config).slots
        return config, next((name for name in slots if _EMBEDDING.fullmatch(name)), "")
    wide = torch.float32 if len(set(found.values())) > 1 else None
    digests = {_digest(name, tensor, wide) for name, tensor in _tables(files)}
    if len(digests) == 1:
        return config, ""
    logger.warning(
        "%s: tie_word_embeddings is true, and the checkpoint has a head (%s) that is not the embedding: it is used",
        files.directory,
        HEAD,
    )
    return replace(config, shape=replace(config.shape, is_tied=False)), ""


def as_embedding(tensors: Iterable[tuple[str, SourceT]], embedding: str) -> Iterator[tuple[str, SourceT]]:
    for name, tensor in tensors:
        yield embedding if name == HEAD else name, tensor


def _tables(files: WeightFiles) -> Iterator[tuple[str, torch.Tensor | FileTensor]]:
    for name, tensor in files.stream(lambda done, total: None):
        if _HEAD.fullmatch(name):
            yield HEAD, tensor
        elif _EMBEDDING.fullmatch(name):
            yield name, tensor


def _digest(name: str, tensor: torch.Tensor | FileTensor, dtype: torch.dtype | None) -> bytes:
    """Digest of shape and values. dtype: converts values first (None: unchanged). Raises ModelLoadError unless a
    matrix."""
    shape = tuple(tensor.shape)
    if len(shape) != 2:
        raise ModelLoadError(f"tensor {name!r} has shape {list(shape)}, which no table of the vocabulary has")
    digest = hashlib.sha256(repr(shape).encode())
    step = max(1, _CHUNK_BYTES // (4 * max(1, shape[1])))
    for start in range(0, shape[0], step):
        part = tensor.narrow(0, start, min(step, shape[0] - start))
        part = part if dtype is None else part.to(dtype)
        digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
