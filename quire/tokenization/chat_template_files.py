"""Chat templates of a model, or given by the user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.hf_json import read_optional_json
from quire.errors import ConfigError, ModelLoadError
from quire.utils.model_files import file_bytes, read_model_file
from quire.utils.text_files import read_text_file

MAX_TEMPLATE_BYTES = 2**18
"""Maximum size of a chat template in bytes: ten times the longest known."""
MAX_TEMPLATES = 64
FILE, FOLDER, PROCESSOR_FILE = "chat_template.jinja", "additional_chat_templates", "chat_template.json"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def read_chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Read templates: name -> source; "default" is the usual one, "tool_use" serves conversations with tools.

    chat_template.jinja and the templates of a folder win over tokenizer_config.json (`config`); a multimodal model's
    chat_template.json wins there, except for conversations with tools. Raises ModelLoadError.
    """
    found = _files(path) or _stated(path, config)
    processor = _processor_template(path, config, alone=not found)
    if processor is None:
        return found
    with_tools = found.get("tool_use", found.get("default"))
    return {**found, "default": processor} | ({} if with_tools is None else {"tool_use": with_tools})


def read_template(text: str) -> str:
    """Read the user's chat template (engine option): a file name, or the template itself if it has braces or line
    feeds. Raises ConfigError for an unreadable file."""
    if any(mark in text for mark in ("{", "}", "\n")):
        if len(text) > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"chat_template may have {MAX_TEMPLATE_BYTES} characters", param="chat_template")
        return text
    path = Path(text).expanduser()
    if path.is_file() and path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"chat_template: {path} may have {MAX_TEMPLATE_BYTES} bytes", param="chat_template")
    return read_text_file(str(path), param="chat_template")


def _files(path: Path) -> dict[str, str]:
    folder = path / FOLDER
    files = sorted(folder.glob("*.jinja")) if folder.is_dir() else []
    if len(files) > MAX_TEMPLATES:
        raise ModelLoadError(f"{folder} may hold {MAX_TEMPLATES} templates, and holds {len(files)}")
    found = {} if file_bytes(path / FILE) is None else {"default": _read(path / FILE)}
    return found | {file.name.removesuffix(".jinja"): _read(file) for file in files}


def _read(file: Path) -> str:
    try:
        # Every line ending becomes a line feed, as in Python's text files.
        text = read_model_file(file, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{file} is not readable: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _stated(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    value, file = config.get("chat_template"), path / "tokenizer_config.json"
    if value is None:
        return {}
    listed = value
    if isinstance(value, str):
        listed = {"default": value}
    elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        listed = {entry.get("name"): entry.get("template") for entry in value}
    if not isinstance(listed, dict) or not all(isinstance(each, str) for pair in listed.items() for each in pair):
        raise ModelLoadError(f"{file}: chat_template must be a string or a list of named templates")
    if len(listed) > MAX_TEMPLATES or any(len(template) > MAX_TEMPLATE_BYTES for template in listed.values()):
        raise ModelLoadError(f"{file}: a chat template may have {MAX_TEMPLATE_BYTES} characters")
    return listed


def _processor_template(path: Path, config: Mapping[str, Any], *, alone: bool) -> str | None:
    """Template of the multimodal processor's files, if any. alone: the tokenizer has no template."""
    has_processor = any(file_bytes(path / name) is not None for name in _PROCESSOR_FILES)
    if not alone and not has_processor and "processor_class" not in config:
        return None
    for name in (_PROCESSOR_FILES[0], PROCESSOR_FILE):
        value = read_optional_json(path / name).get("chat_template")
        if isinstance(value, str) and len(value) <= MAX_TEMPLATE_BYTES:
            return value
        if value is not None:
            raise ModelLoadError(
                f"{path / name}: chat_template must be a string of at most {MAX_TEMPLATE_BYTES} characters"
            )
    return None
