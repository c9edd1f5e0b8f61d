from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

SCRIPTS = (
    "state.js",
    "colours.js",
    "blockmap.js",
    "tables.js",
    "requests.js",
    "charts.js",
    "prompt.js",
    "vectors.js",
    "admin.js",
    "markdown.js",
    "chats.js",
    "messages.js",
    "composer.js",
    "chat.js",
    "main.js",
)
"""Scripts of the live page, in order."""


@dataclass(frozen=True)
class Page:
    """Page for browsers. html: UTF-8. policy: value of the Content-Security-Policy header."""

    html: bytes
    policy: str


def load_page() -> Page:
    """Live page of `GET /`, the same for all servers."""
    return _join("index.html", "style.css", SCRIPTS)


def load_reference() -> Page:
    """API page: it shows /openapi.json."""
    return _join("reference.html", "reference.css", ("reference.js",))


def _join(document: str, style_sheet: str, scripts: tuple[str, ...]) -> Page:
    folder = files(__name__)
    style = folder.joinpath(style_sheet).read_text(encoding="utf-8")
    script = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in scripts)
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    html = folder.joinpath(document).read_text(encoding="utf-8")
    html = html.replace("/* style */", style).replace("/* script */", script)
    return Page(html.encode(), content_policy(style, script))


def content_policy(style: str, script: str) -> str:
    """Policy that allows only these texts as style and script, and requests only to this server."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
