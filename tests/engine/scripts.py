"""Plain scripts in an interpreter of their own: no pytest around them, no `__main__` guard in them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import quire

ROOT = Path(quire.__file__).parent.parent


def start_script(path: Path, source: str, *arguments: str) -> subprocess.Popen[str]:
    """Write `source` to `path` and run it with pipes for output; the repository is importable."""
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(source))
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=path.parent,
    )
