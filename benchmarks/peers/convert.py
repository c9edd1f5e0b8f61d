"""Write a model in a peer's own format; started by `compare.py` with the Python of that peer's environment.

    <venv>/bin/python benchmarks/peers/convert.py llama.cpp | openvino | ctranslate2 MODEL_DIR OUTPUT FORMAT

llama.cpp: OUTPUT is a GGUF file; f16 and bf16 are converted from MODEL_DIR, any other format quantised from f16 by
llama-quantize. openvino: OUTPUT is a folder; fp16, int8 or int4 weights. ctranslate2: OUTPUT is a folder; float32,
quantised on loading.
"""

from __future__ import annotations

import json
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


def to_ctranslate2(model: Path, output: Path, _kind: str) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(model)).convert(str(output))
    # A tokenizer without such a token is written as null, which the engine does not read.
    config = json.loads((output / "config.json").read_text())
    first = json.loads((output / "vocabulary.json").read_text())[0]
    filled = {name: first if value is None and name.endswith("_token") else value for name, value in config.items()}
    (output / "config.json").write_text(json.dumps(filled))


def main() -> None:
    peer, model, output, kind = sys.argv[1:]
    {"llama.cpp": to_gguf, "openvino": to_openvino, "ctranslate2": to_ctranslate2}[peer](
        Path(model), Path(output), kind
    )


if __name__ == "__main__":
    main()
