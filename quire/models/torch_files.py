"""Loading of `torch.save` files whose pickles use fewer names than `weights_only` allows."""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch

from quire.errors import ModelLoadError
from quire.models.tensor_checks import check_name, checked
from quire.utils.model_files import file_bytes

MAX_OPERATIONS = 2**20
"""Maximum pickle operations of a file; a tensor takes about 30."""
NUM_LEGACY_PICKLES = 5
"""Pickles at the start of a pre-zip file: magic number, version, machine, tensors, order of data."""

_STORAGES = ("Float", "Double", "Half", "BFloat16", "Char", "Byte", "Short", "Int", "Long", "Bool")
ALLOWED = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_parameter",
        *(f"torch {kind}Storage" for kind in _STORAGES),
    }
)
"""Names that a table of dense tensors needs, as arguments of pickle's GLOBAL, the only look-up allowed."""


def read_torch(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a file. Raises ModelLoadError before loading unless it is a table of dense tensors. Old files (no zip
    archive) are read whole, not mapped."""
    file_bytes(path)
    is_zip = zipfile.is_zipfile(path)
    try:
        _look_through_zip(path) if is_zip else _look_through_legacy(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except ModelLoadError:
        raise
    except pickle.UnpicklingError:
        raise _refused(path) from None
    except MemoryError:
        raise
    except Exception as error:  # the parsers of torch and zipfile raise errors of many types
        reason = str(error).splitlines() or [type(error).__name__]
        raise ModelLoadError(f"{path} is corrupt or truncated: {reason[0]}") from None
    if not isinstance(state, dict):
        raise ModelLoadError(f"{path} holds a {type(state).__name__}, not a table of tensors")
    for name, tensor in state.items():
        check_name(name)
        if not isinstance(tensor, torch.Tensor):
            raise ModelLoadError(f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor")
        yield name, checked(name, tensor.detach())


def _refused(path: Path, what: str = "") -> ModelLoadError:
    return ModelLoadError(
        f"{path} is corrupt, or holds more than dense tensors{what and f' ({what[:100]})'} and is refused"
    )


def _look_through_zip(path: Path) -> None:
    """Raise ModelLoadError for compressed members, which torch would expand in memory."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        size = path.stat().st_size
        if any(member.compress_type != zipfile.ZIP_STORED or member.file_size > size for member in members):
            raise ModelLoadError(f"{path} is compressed, which torch.save never does, and is refused")
        for member in members:
            if member.filename.endswith("/data.pkl"):
                with archive.open(member) as stream:
                    _look_through(path, stream)


def _look_through_legacy(path: Path) -> None:
    with path.open("rb") as stream:
        for _ in range(NUM_LEGACY_PICKLES):
            _look_through(path, stream)


def _look_through(path: Path, stream: IO[bytes]) -> None:
    """Raise ModelLoadError for a pickle with other names or too many operations."""
    operations = pickletools.genops(stream)
    for count, (operation, argument, _) in enumerate(operations):
        if operation.name == "GLOBAL" and argument not in ALLOWED:
            raise _refused(path, str(argument).replace(" ", "."))
        if count > MAX_OPERATIONS:
            raise ModelLoadError(f"{path} describes its tensors in more than {MAX_OPERATIONS} operations")
