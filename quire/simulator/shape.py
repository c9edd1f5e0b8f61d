from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from quire.config.families import language_model, read_shape
from quire.config.hf_config import read_config, vision_of
from quire.config.hf_json import read_json
from quire.config.model_shape import ModelShape
from quire.config.options import BUNDLED_MODEL, BUNDLED_SIGHTS
from quire.config.vision import VISION_TOWERS, VisionConfig, read_vision
from quire.errors import UserError, nearest_name

BUILT_IN = Path(__file__).with_name("models.json")


def find_shape(name: str, revision: str | None = None) -> ModelShape:
    """Shape of a built-in name, config.json, directory or GGUF file, "bundled", or hub id ("owner/name"; only the
    configuration is fetched). Raises UserError or ModelLoadError for anything else."""
    return read_shape(*_found(name, revision))


def find_vision(name: str, revision: str | None = None) -> VisionConfig | None:
    """Vision tower of `find_shape`'s model, if the engine runs it."""
    values, name = _found(name, revision)
    own, vision = language_model(values)[0], vision_of(values)
    architecture = next(iter(own.get("architectures") or ()), "")
    if vision is None or architecture not in VISION_TOWERS:
        return None
    return read_vision(architecture, vision, read_shape(values, name).hidden, name)


def _found(name: str, revision: str | None) -> tuple[Mapping[str, Any], str]:
    """config.json and name of a model."""
    known = built_in()
    if name.lower() in known:
        return known[name.lower()], name.lower()
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return read_json(path), path.parent.name or str(path)
    if name in (BUNDLED_MODEL, BUNDLED_SIGHTS) or path.exists() or "/" in name:
        return read_config(name, revision), name
    nearest = nearest_name(name.lower(), known)
    raise UserError(
        f"model {name!r} is neither a config.json nor built in{nearest} (built in: {', '.join(known)})", param="model"
    )


@cache
def built_in() -> Mapping[str, Mapping[str, Any]]:
    """Models whose sizes Quire brings: name -> config.json."""
    found: dict[str, dict[str, Any]] = json.loads(BUILT_IN.read_text("utf-8"))
    return found
