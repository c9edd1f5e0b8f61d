"""`QUIRE_NATIVE_MODULE_DIR` names a folder with another build of the native module (make sanitize), tested in place of
the installed one."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def _use_module_of(directory: str) -> None:
    name = "quire.kernels.cpu._native"
    (path,) = Path(directory).glob("_native*.so")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    import quire.kernels.cpu

    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    quire.kernels.cpu._native = module


if directory := os.environ.get("QUIRE_NATIVE_MODULE_DIR"):
    _use_module_of(directory)
