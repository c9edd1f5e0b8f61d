"""Write a model in a peer's own format; started by `compare.py` with the Python of that peer's environment.

    <venv>/bin/python benchmarks/peers/convert.py llama.cpp | openvino MODEL_DIR OUTPUT FORMAT

llama.cpp: OUTPUT is a GGUF file; f16 and bf16 are converted from MODEL_DIR, any other format quantised from f16 by
llama-quantize. openvino: OUTPUT is a folder; fp16, int8 or int4 weights.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VENV = Path(sys.prefix)
# The converter knows a tokenizer by what it makes of a test text, and refuses one that it has not met.
CONVERT_TO_GGUF = """
import runpy, sys

sys.path.insert(0, sys.argv[1])
from conversion.base import TextModel

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
del sys.argv[0]
runpy.run_path(sys.argv[0] + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def to_gguf(model: Path, output: Path, kind: str) -> None:
    if kind in ("f16", "bf16"):
        (source,) = VENV.glob("source/*/vendor/llama.cpp")
        arguments = [str(source), str(model), "--outfile", str(output), "--outtype", kind]
        subprocess.run([sys.executable, "-c", CONVERT_TO_GGUF, *arguments], check=True)
        return
    full = output.with_name(f"{model.name}-f16.gguf")
    if not full.exists():
        to_gguf(model, full, "f16")
    quantize = VENV / "build" / "bin" / "llama-quantize"
    subprocess.run([str(quantize), str(full), str(output), kind.upper()], check=True)


def to_openvino(model: Path, output: Path, kind: str) -> None:
    command = [str(VENV / "bin" / "optimum-cli"), "export", "openvino", "--model", str(model)]
    command += ["--task", "text-generation-with-past", "--weight-format", kind]
    if kind == "int4":
        command += ["--group-size", "64"]  # the default of 128 does not divide a width of 576
    subprocess.run([*command, str(output)], check=True)


def main() -> None:
    peer, model, output, kind = sys.argv[1:]
    {"llama.cpp": to_gguf, "openvino": to_openvino}[peer](Path(model), Path(output), kind)


if __name__ == "__main__":
    main()
