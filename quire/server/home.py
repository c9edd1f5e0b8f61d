"""GET /: the live page, for people who open the server in a browser."""

from __future__ import annotations

from fastapi import FastAPI, Response

from quire.dashboard.page import load_page
from quire.server.auth import public


def add_home_route(app: FastAPI) -> None:
    """The page is the same for every server and tells nothing about this one, so it needs no key; what it fetches
    does, and the page asks for it."""
    page = load_page()
    headers = {
        "Content-Security-Policy": page.policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @app.get("/")
    @public
    async def home() -> Response:
        return Response(page.html, media_type="text/html", headers=headers)
