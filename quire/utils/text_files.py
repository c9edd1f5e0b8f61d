from __future__ import annotations

from pathlib import Path

from quire.errors import ConfigError


def read_text_file(path: str, *, param: str) -> str:
    """File's UTF-8 text. Raises ConfigError if it is unreadable, not UTF-8 or empty."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{param}: cannot read {path}: {error.strerror}", param=param) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{param}: {path} is not valid UTF-8: {error.reason}", param=param) from None
    if not text:
        raise ConfigError(f"{param}: {path} is empty", param=param)
    return text
