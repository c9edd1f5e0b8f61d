"""Models by name. `models.json` holds the sizes of some."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from quire.config.families import read_shape
from quire.config.hf_config import read_config
from quire.config.hf_json import read_json
from quire.config.model_shape import ModelShape
from quire.config.options import BUNDLED_MODEL
from quire.errors import UserError, nearest_name

BUILT_IN = Path(__file__).with_name("models.json")


def find_shape(name: str, revision: str | None = None) -> ModelShape:
    """Shape of a built-in name, config.json, directory or GGUF file, "bundled", or hub id ("owner/name"; only the
    configuration is fetched). Raises UserError or ModelLoadError for anything else."""
    known = built_in()
    if name.lower() in known:
        return read_shape(known[name.lower()], name.lower())
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return read_shape(read_json(path), path.parent.name or str(path))
    if name == BUNDLED_MODEL or path.exists() or "/" in name:
        return read_shape(read_config(name, revision), name)
    nearest = nearest_name(name.lower(), known)
    raise UserError(
        f"model {name!r} is neither a config.json nor built in{nearest} (built in: {', '.join(known)})", param="model"
    )


@cache
def built_in() -> Mapping[str, Mapping[str, Any]]:
    """Models whose sizes Quire brings: name -> config.json."""
    found: dict[str, dict[str, Any]] = json.loads(BUILT_IN.read_text("utf-8"))
    return found
