"""The front end starts fast: nothing that it imports is heavy."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "safetensors", "numpy", "httpx")


def test_the_server_process_imports_no_torch() -> None:
    script = (
        "import sys, quire.server.run, quire.server.app, quire.server.http_protocol, quire.engine.async_engine\n"
        "from quire.tokenization.tokenizer import load_tokenizer\n"
        "load_tokenizer('bundled').encode('def f():')\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
