"""Pages for browsers: GET / (live page) and GET /docs (API reference)."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request, Response

from quire.dashboard.page import Page, load_page, load_reference
from quire.server.auth import public

OLLAMA_RUNS = "Ollama is running"


def add_home_routes(app: FastAPI, *, has_docs: bool = True, is_ollama: bool = False) -> None:
    """Add the pages. They need no key, because they tell nothing about this server. has_docs: serve the reference.
    is_ollama: tell clients that take no HTML that Ollama runs."""
    home, docs = _answer(load_page()), _answer(load_reference())

    @app.get("/")
    @app.head("/")
    @public
    async def page(request: Request) -> Response:
        if is_ollama and "text/html" not in request.headers.get("accept", ""):
            return Response(OLLAMA_RUNS, media_type="text/plain", headers={"Vary": "Accept"})
        return home()

    if not has_docs:
        return

    @app.get("/docs")
    @public
    async def reference() -> Response:
        return docs()


def _answer(page: Page) -> Callable[[], Response]:
    headers = {
        "Content-Security-Policy": page.policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return lambda: Response(page.html, media_type="text/html", headers=headers)
