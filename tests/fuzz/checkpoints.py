"""Model directories with anything in them: they load, or a UserError says in one line why not.

CORPUS holds what once ended the process, took minutes or showed a traceback; a case is one of them, or a sound
directory changed at random, or both.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.errors import QuireError
from quire.kernels.cpu.runtime import NativeRuntime
from quire.models.claims import check_dummy
from quire.models.loader import load_model
from quire.parallel.single import SINGLE_RANK
from quire.tokenization.tokenizer import load_tokenizer
from tests.fuzz.child import cases_of
from tests.fuzz.harness import Fuzzer

LONGEST_MESSAGE = 5000

Change = Callable[[Path], object]
Weights = dict[Any, Any]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
ALPHABET = [chr(code) for code in range(ord("a"), ord("z") + 1)]
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate([*ALPHABET, "Ġ", "ab"])}, "merges": ["a b"]},
}
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
NASTY: tuple[Any, ...] = (
    2**63, 10**9, 10**30, 2**31, -1, 0, 1.5, 1e308, 1e-320, float("nan"), float("inf"), "16", "x" * 10**6, True, None,
    [], [1], {}, {"a": {"a": 1}}, [[1] * 1000], "\ud800", "a\n\x1b[31mb", 4097, 2**24, 2**24 + 1,
)  # fmt: skip


@cache
def sound_weights() -> dict[str, torch.Tensor]:
    weights = {EMBEDDING: torch.randn(40, 16), "lm_head.weight": torch.randn(40, 16), NORM: torch.ones(16)}
    shapes = {
        "self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16),
        "self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24),
    }  # fmt: skip
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
        weights |= {
            f"{prefix}.{name}.weight": torch.ones(16) for name in ("input_layernorm", "post_attention_layernorm")
        }
    return {name: weight.to(torch.bfloat16) for name, weight in weights.items()}


@cache
def sound_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.safetensors"
        save_file(sound_weights(), path)
        return {
            "model.safetensors": path.read_bytes(),
            "config.json": json.dumps(CONFIG).encode(),
            "tokenizer.json": json.dumps(TOKENIZER).encode(),
            "tokenizer_config.json": json.dumps({"eos_token": "a", "chat_template": "{{ messages }}"}).encode(),
            "generation_config.json": b'{"eos_token_id": [0, 1]}',
        }


# -- what once did harm ------------------------------------------------------------------------------------------------


def tensors(change: Callable[[Weights], object], **options: Any) -> Change:
    """As pytorch_model.bin, with other tensors."""

    def apply(directory: Path) -> None:
        (directory / "model.safetensors").unlink(missing_ok=True)
        weights: Weights = dict(sound_weights())
        change(weights)
        torch.save(weights, directory / "pytorch_model.bin", **options)

    return apply


def tensor(name: str, change: Callable[[torch.Tensor], object]) -> Change:
    return tensors(lambda weights: weights.update({name: change(weights[name])}))


def config(**values: Any) -> Change:
    return lambda directory: write_json(directory / "config.json", CONFIG | values)


def tokenizer(**values: Any) -> Change:
    return lambda directory: write_json(directory / "tokenizer.json", TOKENIZER | values)


def text(name: str, content: str | bytes) -> Change:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda directory: put(directory / name, data)


def header(content: dict[str, Any] | bytes, data: bytes = b"") -> Change:
    """A model.safetensors."""
    described = content if isinstance(content, bytes) else json.dumps(content).encode()
    return text("model.safetensors", struct.pack("<Q", len(described)) + described + data)


def special(name: str, make: Callable[[Path], object]) -> Change:
    """Another kind of file in the place of one."""

    def apply(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return apply


def index(weight_map: object) -> Change:
    return text("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


def sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 2**30)


def many_empty_biases(directory: Path) -> None:
    extra = {f"t{number}.bias": torch.empty(0) for number in range(3000)}
    save_file(sound_weights() | extra, directory / "model.safetensors")


def too_many_tensors(directory: Path) -> None:
    header({f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(70_000)})(directory)


def put(path: Path, data: bytes) -> None:
    """Into a regular file: another kind stays what it is."""
    if path.is_file() or not os.path.lexists(path):
        path.write_bytes(data)


def write_json(path: Path, value: object) -> None:
    put(path, json.dumps(value).encode())


def _tensor_header(dtype: str, shape: list[int], end: int) -> dict[str, Any]:
    return {"x.bias": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


SPECIAL_FILES: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "directory": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "sparse file": sparse_file,
}
JSON_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
    "model.safetensors.index.json",
)  # fmt: skip
FILES = (*JSON_FILES, "chat_template.jinja", "model.safetensors")
BOMBS: dict[str, str | bytes] = {
    "brackets": '{"a":' + "[" * 200_000,
    "objects": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "many values": '{"a":[' + "[]," * 200_000 + "[]]}",
    "digits": '{"a":' + "9" * 10_000 + "}",
    "list": "[1, 2]",
    "not UTF-8": b"\xff\xfe{}",
    "empty": b"",
}
REPLACE_TWICE = {"type": "Replace", "pattern": {"String": "x"}, "content": "xx"}

CORPUS: dict[str, Change] = {
    "meta": tensor(EMBEDDING, lambda t: t.to("meta")),
    "meta norm": tensor(NORM, lambda t: t.to("meta")),
    "meta bias": tensors(lambda weights: weights.update({"x.bias": torch.ones(3, device="meta")})),
    "sparse": tensor(EMBEDDING, lambda t: t.to_sparse()),
    "sparse bias": tensors(lambda weights: weights.update({"x.bias": torch.zeros(3).to_sparse()})),
    "float8": tensor(EMBEDDING, lambda t: t.to(torch.float8_e4m3fn)),
    "float8 norm": tensor(NORM, lambda t: t.to(torch.float8_e5m2)),
    "complex": tensor(EMBEDDING, lambda t: t.to(torch.complex64)),
    "float64": tensor(EMBEDDING, lambda t: t.double()),
    "bool": tensor(NORM, lambda t: t.bool()),
    "parameter": tensor(EMBEDDING, lambda t: torch.nn.Parameter(t)),
    "no elements": tensor(NORM, lambda t: t[:0]),
    "no dimension": tensor(NORM, lambda t: torch.tensor(1.0)),
    "NaN": tensor(EMBEDDING, lambda t: t * float("nan")),
    "key of int": tensors(lambda weights: weights.update({7: torch.ones(3)})),
    "key of tuple": tensors(lambda weights: weights.update({(1, 2): torch.ones(3)})),
    "long key": tensors(lambda weights: weights.update({"x" * 10**6: torch.ones(3)})),
    "bytearray": tensors(lambda weights: weights.update({"x": bytearray(10)})),
    "expanded": tensors(lambda weights: weights.update({"x.bias": torch.zeros(1).expand(2**60)})),
    "expanded embedding": tensor(EMBEDDING, lambda t: torch.zeros(1).expand(t.shape)),
    "expanded, before zip": tensors(
        lambda weights: weights.update({"x.bias": torch.zeros(1).expand(2**60)}), _use_new_zipfile_serialization=False
    ),
    "overlapping offsets": header(
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        },
        bytes(12),
    ),
    "offsets outside": header(_tensor_header("F32", [2**40], 2**42), bytes(12)),
    "same name twice": header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 2, bytes(4)),
    "header of 2^63": text("model.safetensors", struct.pack("<Q", 2**63) + b"{}"),
    "header too large": header(b'{"__metadata__":{"a":"' + b"x" * 2**24 + b'"}}'),
    "too many tensors": too_many_tensors,
    "many empty biases": many_empty_biases,
    "0 x 2^63": header(_tensor_header("F32", [0, 2**63], 0)),
    "0 x 2^62": header(_tensor_header("F32", [0, 2**62], 0)),
    "2^32 x 2^32": header(_tensor_header("F32", [2**32, 2**32], 0)),
    "float8 in safetensors": header(_tensor_header("F8_E8M0", [16], 16), bytes(16)),
    "float4 in safetensors": header(_tensor_header("F4", [2], 1), bytes(1)),
    "index of numbers": index({"a": 3}),
    "index upwards": index({"a": "../x.safetensors"}),
    "index of ..": index({"a": ".."}),
    "index of /etc": index({"a": "/etc/passwd"}),
    "index with NUL": index({"a": "x\0.safetensors"}),
    "index of a long name": index({"a": "x" * 5000}),
    "index of a surrogate": index({"a": "x\ud800.safetensors"}),
    "index of config.json": index({"a": "config.json"}),
    "index of nothing": index({}),
    "linear positions": config(rope_scaling={"rope_type": "linear", "factor": 1e300}),
    "yarn's factor": config(rope_scaling={"rope_type": "yarn", "factor": 1e308}),
    "yarn without a base": config(rope_scaling={"rope_type": "yarn", "factor": 2.0}, rope_theta=1.0),
    "yarn's turns": config(rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-300, "beta_slow": 1e300}),
    "llama3's blend": config(
        rope_scaling={"rope_type": "llama3", "factor": 1e300, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
    ),
    "dynamic heads of two": config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, partial_rotary_factor=0.25),
    "a list of RoPE": config(rope_scaling={"type": [1], "factor": 2}),
    "architectures of objects": config(architectures=[{"a": 1}]),
    "long architecture": config(architectures=["x" * 10**6]),
    "lists of layers": config(
        architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=8, layer_types=[["x"], ["x"]]
    ),
    "groups of 2^63": config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 2**63}),
    "groups": config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}),
    "list of quantization": config(quantization_config=[1]),
    "eos of 2^70": text("generation_config.json", json.dumps({"eos_token_id": 2**70})),
    "growing texts": tokenizer(normalizer={"type": "Sequence", "normalizers": [REPLACE_TWICE] * 40}),
    "long prefix": tokenizer(normalizer={"type": "Prepend", "prepend": "x" * 10**6}),
    "charsmap": tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA////"}),
    "empty charsmap": tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}),
    "template of unknown tokens": tokenizer(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "Q", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    ),
    "strip beyond": tokenizer(decoder={"type": "Strip", "content": "a", "start": 2**63, "stop": 2**63}),
    "no tokens": tokenizer(model={"type": "Unigram", "unk_id": None, "vocab": []}),
    "no unknown token": tokenizer(model={"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"a": 0}}),
    "chat template of a number": text("tokenizer_config.json", '{"chat_template": 5}'),
    "surrogate as a token": text("tokenizer_config.json", '{"add_bos_token": true, "bos_token": "\\ud800"}'),
    **{
        f"{key} = {value!r:.12}": config(**{key: value})
        for key in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "head_dim")
        for value in (2**63, 10**9, 10**6, 4096, -1, 1.5, "16")
    },
    **{f"{kind} as {name}": special(name, make) for kind, make in SPECIAL_FILES.items() for name in FILES},
    **{f"{kind} in {name}": text(name, content) for kind, content in BOMBS.items() for name in JSON_FILES},
}


# -- changes at random -------------------------------------------------------------------------------------------------


def change_bytes(rng: Random, directory: Path) -> None:
    path = directory / rng.choice(sorted(name for name in os.listdir(directory)))
    if not path.is_file() or path.stat().st_size > 2**20:
        return
    content = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(min(len(content), rng.choice((16, 3000, 2**20))) or 1)
        kind = rng.randrange(4)
        if kind == 0:
            content[place : place + 1] = rng.randbytes(1)
        elif kind == 1:
            del content[place:]
        elif kind == 2:
            content[place:place] = content[place : place + rng.randrange(100)]
        else:
            content[place : place + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1)))
    path.write_bytes(content)


def change_values(rng: Random, directory: Path) -> None:
    """Other values in a JSON file, at any depth."""
    name, value = rng.choice((("config.json", CONFIG), ("tokenizer.json", TOKENIZER), ("tokenizer_config.json", {})))
    changed = json.loads(json.dumps(value))
    for _ in range(rng.randrange(1, 3)):
        place: Any = changed
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = rng.choice(list(keys)) if keys else "bos_token"
            inner = place[key] if keys else None
            if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
                break
            place = inner
        place[key] = deepcopy(rng.choice(NASTY))  # the next change may go into it
    write_json(directory / name, changed)


def change_tensors(rng: Random, directory: Path) -> None:
    """Another description of a tensor, over the same data."""
    path = directory / "model.safetensors"
    if not path.is_file():
        return
    content = sound_files()["model.safetensors"]
    length = struct.unpack("<Q", content[:8])[0]
    described = json.loads(content[8 : 8 + length])
    entry = described[rng.choice(sorted(described))]
    if rng.random() < 0.4:
        entry["dtype"] = rng.choice(("F64", "F16", "F8_E4M3", "F8_E8M0", "I8", "BOOL", "F4", "C64", "U16", "x"))
    if rng.random() < 0.5:
        entry["shape"] = [rng.choice((0, 1, 2, 16, 40, 2**31, 2**62, 2**63, -1)) for _ in range(rng.randrange(4))]
    if rng.random() < 0.4:
        entry["data_offsets"] = [rng.choice((0, 1, 32, 1280, 2**40, 2**63, -1)) for _ in range(2)]
    header(described, content[8 + length :])(directory)


CHANGES = (change_bytes, change_values, change_tensors)


# -- trying ------------------------------------------------------------------------------------------------------------


def use(directory: Path) -> None:
    """Do with a directory what an engine does. Raises AssertionError for an error that is not one line."""
    for step in (_load_tokenizer, _load_model, _load_dummy):
        message = ""
        try:
            step(str(directory))
        except QuireError as error:
            message = str(error)
        assert len(message) < LONGEST_MESSAGE, "the error is very long"


def _load_tokenizer(name: str) -> None:
    load_tokenizer(name).encode("abba xxxxxxxxxx")


def _load_model(name: str) -> None:
    described = load_model_config(name, dtype="auto", max_model_len=None, revision=None, config_only=False)
    load_model(described, LoadConfig("auto", 0), SINGLE_RANK, runtime=NativeRuntime("auto", 1))


def _load_dummy(name: str) -> None:
    described = load_model_config(name, dtype="auto", max_model_len=None, revision=None, config_only=True)
    check_dummy(described, 2**26)


def case(line: str) -> None:
    """line: the name of an entry of CORPUS, or the seed of a case."""
    directory = Path(tempfile.mkdtemp(prefix="quire-fuzz-"))
    try:
        for name, content in sound_files().items():
            (directory / name).write_bytes(content)
        if line in CORPUS:
            CORPUS[line](directory)
        else:
            rng = Random(line)
            if rng.random() < 0.25:
                CORPUS[rng.choice(sorted(CORPUS))](directory)
            for _ in range(rng.randrange(1, 3)):
                rng.choice(CHANGES)(rng, directory)
        use(directory)
    finally:
        shutil.rmtree(directory)


FUZZER = Fuzzer("checkpoints", lambda: cases_of("tests.fuzz.checkpoints:case"), num_test_cases=60)
