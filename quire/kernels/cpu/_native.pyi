# The extension built from csrc/. Its callers are the few modules of this folder, which check what they pass.
from typing import Any

def __getattr__(name: str) -> Any: ...
