"""GET /: what this server is, for people who open it in a browser."""

from __future__ import annotations

from html import escape

from fastapi import FastAPI, Request, Response

from quire.server.context import ServerContext
from quire.version import __version__

_LINKS = (
    ("/v1/models", "the models"),
    ("/health", "health"),
    ("/metrics", "metrics for Prometheus"),
    ("/openapi.json", "the API's description"),
    ("/version", "version"),
)

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Quire: {model}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 42rem; margin: 3rem auto; padding: 0 1rem; }}
pre {{ background: #f2f2f2; color: #111; padding: 1rem; overflow-x: auto; }}
</style>
</head>
<body>
<h1>Quire {version}</h1>
<p>An OpenAI-compatible inference server. It serves <strong>{model}</strong>
with a context of {max_model_len} tokens and a KV cache of {num_blocks} blocks of {block_size} tokens.</p>
<pre>curl {base}/v1/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "prompt": "def fibonacci(n):", "max_tokens": 64}}'</pre>
<ul>{links}</ul>
</body>
</html>
"""


def add_home_route(app: FastAPI, context: ServerContext) -> None:
    @app.get("/")
    async def home(request: Request) -> Response:
        ready = context.engine.ready
        page = _PAGE.format(
            version=escape(__version__),
            model=escape(context.model_names[0]),
            max_model_len=ready.max_model_len,
            num_blocks=ready.num_blocks,
            block_size=ready.block_size,
            base=escape(str(request.base_url).rstrip("/")),
            links="".join(f'<li><a href="{path}">{escape(path)}</a>: {text}</li>' for path, text in _LINKS),
        )
        return Response(page, media_type="text/html")
