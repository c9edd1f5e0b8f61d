"""`quire quantize`: files of every family that is written, read back by Quire as the same model."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from quire.cli import main as quire
from quire.models.gguf.weights import GGUFWeights
from quire.quantization.quantized_weight import QuantizedWeight
from quire.utils.gguf import GGUFFile
from tests.fakes.gguf import GGUFWriter, StoredTensor, typed
from tests.fakes.gguf_model import WIDE
from tests.long import all_but_long
from tests.models.dense_families import gemma, gemma2, gemma3, phi3
from tests.models.families import llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, rope
from tests.models.harness import randomize, save
from tests.models.test_gguf import GEMMA_ROPE, YARN, assert_logits

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(head_dim=12),
    "llama-tied-biases": lambda: llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-linear": lambda: rope("linear", factor=4.0),
    "llama3": lambda: rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "mistral": lambda: mistral(sliding_window=None),
    "mistral-window": lambda: mistral(sliding_window=20),
    "qwen2": qwen2,
    "qwen2-yarn": lambda: qwen2(rope_parameters=YARN),
    "qwen3": qwen3,
    "qwen2moe": qwen2_moe,
    "qwen3moe": lambda: qwen3_moe(norm_topk_prob=True),
    "mixtral": lambda: mixtral(5, 2),
    "gemma": gemma,
    "gemma2": lambda: gemma2(query_pre_attn_scalar=40),
    "gemma3": lambda: gemma3(query_pre_attn_scalar=24, rope_parameters=GEMMA_ROPE),
}
SIZES = {**WIDE, "num_hidden_layers": 4}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """The exit status, and what stands on standard error."""
    capsys.readouterr()  # what writing a directory says
    status = quire.main(["quantize", *map(str, arguments)])
    return status, capsys.readouterr().err


@pytest.mark.parametrize("name", list(MODELS))
def test_the_file_is_the_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = randomize(MODELS[name]())
    directory, path = save(model, tmp_path / "directory"), tmp_path / "model.gguf"
    assert run(capsys, directory, "--to", "f32", "-o", path, "--no-tokenizer") == (0, "")
    assert_logits(path, model)


def test_the_mix_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = randomize(llama(**SIZES))
    directory, path = save(model, tmp_path / "directory"), tmp_path / "model.gguf"
    assert run(capsys, directory, "--to", "Q4_K_M", "-o", path, "--no-tokenizer")[0] == 0
    with GGUFFile(path) as file:
        kinds = {name: entry.type.name for name, entry in file.tensors.items()}
        assert file.metadata["general.file_type"] == 15
        assert file.metadata["general.quantization_version"] == 2
    assert kinds["blk.0.attn_q.weight"] == "Q4_K"
    assert kinds["blk.3.attn_v.weight"] == "Q6_K"
    assert (kinds["output.weight"], kinds["token_embd.weight"]) == ("Q6_K", "Q4_K")
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    stored = dict(model.state_dict())
    for name, weight in GGUFWeights(path).stream(lambda done, total: None):
        plain = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        error = (plain - stored[name]).square().sum() / stored[name].square().sum()
        assert float(error) < 0.01, name


def test_stacks_of_experts_are_written_matrix_by_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its own columns' importance, and none where no token chose it."""
    model = randomize(qwen3_moe(norm_topk_prob=True, hidden_size=256, moe_intermediate_size=256, num_experts=4))
    directory, path = save(model, tmp_path / "directory"), tmp_path / "model.gguf"
    counts = np.ones((4, 256))
    counts[1, ::7], counts[3] = 300.0, 0.0
    (tmp_path / "matrix").write_bytes(older_matrix({"blk.1.ffn_down_exps.weight": counts.reshape(-1)}, 2))
    line = (directory, "--to", "q4_k_m", "-o", path, "--no-tokenizer")
    stored = load_file(directory / "model.safetensors")
    errors = []
    for more in ((), ("--imatrix", tmp_path / "matrix")):
        assert run(capsys, *line, *more)[0] == 0
        with GGUFFile(path) as file:
            kinds = {name: entry.type.name for name, entry in file.tensors.items() if "blk.0." in name}
        assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"
        assert kinds["blk.0.ffn_up_exps.weight"] == "Q4_K"
        found = dict(GGUFWeights(path).stream(lambda done, total: None))
        squares = []
        for expert in range(4):
            name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
            weight = found[name]
            assert isinstance(weight, QuantizedWeight)
            error = (weight.dequantize() - stored[name]).square().sum(0)
            assert float(error.sum() / stored[name].square().sum()) < 0.02
            squares.append(error)
        errors.append(squares)
    plain, weighed = errors
    weights = torch.from_numpy(counts[1])
    assert float((weighed[1] * weights).sum()) < 0.9 * float((plain[1] * weights).sum())
    assert torch.equal(weighed[3], plain[3])


def test_directories_in_bfloat16_and_in_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = randomize(qwen3(**SIZES)).bfloat16()
    whole, parts = save(model, tmp_path / "whole"), save(model, tmp_path / "parts", max_shard_size="1MB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    for directory in (whole, parts):
        assert run(capsys, directory, "--to", "q8_0", "-o", f"{directory}.gguf", "--no-tokenizer")[0] == 0
    tensors = []
    for path in (tmp_path / "whole.gguf", tmp_path / "parts.gguf"):
        with GGUFFile(path) as file:
            tensors.append({name: bytes(file.data(entry)) for name, entry in file.tensors.items()})
    assert tensors[0] == tensors[1]


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "another family": (lambda: phi3(), "no GGUF file is made of Phi3ForCausalLM"),
    "another rotation": (lambda: rope("dynamic", factor=2.0), "cannot say the RoPE settings 'dynamic'"),
    "another scale": (lambda: gemma3(query_pre_attn_scalar=20), "query_pre_attn_scalar is 20, and would be read as 24"),
    "another activation": (lambda: llama(hidden_act="gelu"), "hidden_act is .gelu., and would be read as .silu."),
    "other shares": (lambda: qwen3_moe(norm_topk_prob=False), "norm_topk_prob is False, and would be read as True"),
    "a window": (lambda: qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1), "no sliding window"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_files_cannot_say_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = REFUSED[name]
    directory = save(make(), tmp_path / "directory")
    status, error = run(capsys, directory, "--to", "f16", "-o", tmp_path / "m.gguf", "--no-tokenizer")
    assert status != 0
    assert error.count("\n") == 1
    assert message.replace(".gelu.", "'gelu'").replace(".silu.", "'silu'") in error.replace('"', "'")
    assert list(tmp_path.glob("*.gguf")) + list(tmp_path.glob(".*.gguf")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "q4_k_x", "-o", "m.gguf"], "--to must be one of q4_k_m, q5_k_m"),
        (["--to", "q4_k_m", "-o", "m.bin"], "--output must name a file *.gguf"),
        (["--to", "q4_k_m", "-o", "none/m.gguf"], "'none' is not a directory"),
        (["--to", "q4_k_m", "-o", "m.gguf", "--imatrix", "a", "--imatrix-text", "b"], "give one of them"),
        (["--to", "q4_k_m", "-o", "m.gguf", "--imatrix-tokens", "5"], "which is not given"),
        (["--to", "q4_k_m", "-o", "m.gguf", "--threads", "0"], "--threads must be at least 1"),
        (["-o", "m.gguf"], "--to"),
        (["--to", "q4_k_m", "-o", "m.gguf"], "no tokenizer"),
        (["--to", "q4_k_m", "-o", "m.gguf", "--no-tokenizer", "--imatrix", "none"], "cannot read none"),
        (["--to", "q4_k_m", "-o", "m.gguf", "--no-tokenizer", "--imatrix", "config.json"], "no importance matrix"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = save(llama(), tmp_path / "directory")
    monkeypatch.chdir(directory)
    status, error = run(capsys, directory, *arguments)
    assert status == 2 or message in ("no tokenizer", "cannot read none", "no importance matrix")
    assert status != 0
    assert message in error
    assert error.count("\n") == 1
    assert list(directory.glob("*.gguf")) == []


@pytest.mark.parametrize("damage", ["missing", "shape", "surplus", "infinite"])
def test_checkpoints_that_are_not_whole(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save(llama(), tmp_path / "directory")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = tensors[name][:5].contiguous()
    elif damage == "surplus":
        name = "model.layers.9.mlp.up_proj.weight"
        tensors[name] = torch.zeros(3, 3)
    else:
        tensors[name][2, 3] = torch.inf
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    status, error = run(capsys, directory, "--to", "q8_0", "-o", tmp_path / "m.gguf", "--no-tokenizer")
    assert status != 0
    assert name in error
    assert error.count("\n") == 1
    assert list(tmp_path.glob("*.gguf")) + list(tmp_path.glob(".*.gguf")) == []


def test_a_gguf_file_is_no_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, path = save(llama(), tmp_path / "directory"), tmp_path / "a.gguf"
    assert run(capsys, directory, "--to", "f16", "-o", path, "--no-tokenizer")[0] == 0
    status, error = run(capsys, path, "--to", "q8_0", "-o", tmp_path / "b.gguf", "--no-tokenizer")
    assert status != 0
    assert "not of another GGUF file" in error


def older_matrix(entries: dict[str, np.ndarray], calls: int) -> bytes:
    """llama.cpp's older format."""
    data = struct.pack("<i", len(entries))
    for name, means in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(means))
        data += (means * calls).astype("<f4").tobytes()
    return data


def gguf_matrix(entries: dict[str, np.ndarray], calls: int) -> bytes:
    tensors = {}
    for name, means in entries.items():
        sums = (means * calls).astype("<f4")
        tensors[f"{name}.in_sum2"] = StoredTensor(0, (1, len(means)), sums.tobytes())
        tensors[f"{name}.counts"] = StoredTensor(0, (1, 1), np.array([calls], dtype="<f4").tobytes())
    return GGUFWriter({"general.type": typed("imatrix")}, tensors).to_bytes()


@pytest.mark.parametrize("make", all_but_long([older_matrix, gguf_matrix], [gguf_matrix]))
def test_an_importance_matrix_moves_the_errors(
    make: Callable[[dict[str, np.ndarray], int], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = randomize(llama(**SIZES))
    directory, name = save(model, tmp_path / "directory"), "model.layers.1.self_attn.v_proj.weight"
    counts = np.ones(256)
    counts[::7] = 200.0
    (tmp_path / "matrix").write_bytes(make({"blk.1.attn_v.weight": counts, "blk.1.attn_k.weight": counts}, 5))
    found = {}
    for title, more in {"plain": [], "weighed": ["--imatrix", tmp_path / "matrix"]}.items():
        path = tmp_path / f"{title}.gguf"
        assert run(capsys, directory, "--to", "q4_k_m", "-o", path, "--no-tokenizer", *more)[0] == 0
        weight = dict(GGUFWeights(path).stream(lambda done, total: None))[name]
        assert isinstance(weight, QuantizedWeight)
        squares = (weight.dequantize() - model.state_dict()[name]).square().sum(0)
        found[title] = float((squares * torch.from_numpy(counts)).sum())
    assert found["weighed"] < 0.9 * found["plain"]
    wrong = make({"blk.1.attn_v.weight": np.ones(100)}, 1)
    (tmp_path / "matrix").write_bytes(wrong)
    status, error = run(
        capsys, directory, "--to", "q4_k_m", "-o", path, "--no-tokenizer", "--imatrix", tmp_path / "matrix"
    )
    assert status != 0
    assert "'blk.1.attn_v.weight' has 100 columns, and the model's matrix 256" in error


def test_help_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from quire.cli.main import main; status = main(['quantize', '--help']); "
        "assert not {'torch', 'numpy'} & sys.modules.keys(); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--imatrix-text" in done.stdout
