"""GET / and GET /docs: the live page and the API's reference, for people who open the server in a browser."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request, Response

from quire.dashboard.page import Page, load_page, load_reference
from quire.server.auth import public

OLLAMA_RUNS = "Ollama is running"


def add_home_routes(app: FastAPI, *, has_docs: bool = True, is_ollama: bool = False) -> None:
    """The pages are the same for every server and tell nothing about this one, so they need no key; what they fetch
    does, and the pages ask for it. has_docs: whether there is a reference. is_ollama: whether clients of Ollama, which
    take no HTML, are told that it runs."""
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
