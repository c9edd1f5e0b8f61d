"""Text files that a user names on the command line."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ConfigError


def read_text_file(path: str, *, param: str) -> str:
    """The file's text, byte for byte UTF-8. Raises ConfigError when it cannot be read, is not UTF-8 or is empty."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{param}: cannot read {path}: {error.strerror}", param=param) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{param}: {path} is not valid UTF-8: {error.reason}", param=param) from None
    if not text:
        raise ConfigError(f"{param}: {path} is empty", param=param)
    return text
