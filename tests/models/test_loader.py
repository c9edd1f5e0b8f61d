"""Loading: every layout of a checkpoint, and one clear error for every way in which it can be broken."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.errors import ModelLoadError
from quire.models.decoder import Decoder
from quire.models.loader import dummy_weights, load_model
from quire.parallel.single import SINGLE_RANK
from tests.models.conftest import SavedModel
from tests.models.harness import PagedRunner, chunked_logits, random_prompts

SavedModels = Callable[[str], SavedModel]
Weights = dict[str, torch.Tensor]
PROMPTS = random_prompts([20], 97)


def load_directory(directory: Path, load_format: str = "auto", seed: int = 0, **options: object) -> Decoder:
    config = load_model_config(str(directory), dtype="float32", max_model_len=None, revision=None, config_only=False)
    return load_model(config, LoadConfig(load_format, seed), SINGLE_RANK, **options)


def logits_of(model: Decoder) -> torch.Tensor:
    return chunked_logits(PagedRunner(model), PROMPTS, chunk=20)[0]


@pytest.fixture
def directory(saved_model: SavedModels, tmp_path: Path) -> Path:
    """A copy of the tiny LLaMA that a test may break."""
    return Path(shutil.copytree(saved_model("llama").directory, tmp_path / "model"))


def rewrite(directory: Path, change: Callable[[Weights], object]) -> None:
    """Change the tensors of model.safetensors."""
    weights = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    change(weights)
    save_file(weights, directory / "model.safetensors")


def shard(directory: Path, suffix: str = "safetensors") -> list[str]:
    """Split model.safetensors in two files with an index; the shards' names."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    stem, write = ("model", save_file) if suffix == "safetensors" else ("pytorch_model", torch.save)
    names = sorted(weights)
    files = [f"{stem}-0000{part + 1}-of-00002.{suffix}" for part in range(2)]
    for part, file in enumerate(files):
        write({name: weights[name] for name in names[part::2]}, directory / file)
    index = {"weight_map": {name: files[position % 2] for position, name in enumerate(names)}}
    (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return files


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("load_format", ["auto", "own"])
def test_shards_give_the_same_model(suffix: str, load_format: str, directory: Path) -> None:
    expected = logits_of(load_directory(directory))
    shard(directory, suffix)
    named = {"safetensors": "safetensors", "bin": "pt"}[suffix]
    assert torch.equal(logits_of(load_directory(directory, named if load_format == "own" else "auto")), expected)


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before-zip"])
def test_single_bin_file(old: bool, directory: Path) -> None:
    expected = logits_of(load_directory(directory))
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    assert torch.equal(logits_of(load_directory(directory)), expected)


@pytest.mark.parametrize(("name", "prefix"), [("llama", "model."), ("gpt2", "transformer."), ("opt", "model.")])
def test_base_model_checkpoint_without_its_prefix(
    name: str, prefix: str, saved_model: SavedModels, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(saved_model(name).directory, tmp_path / "model"))
    expected = logits_of(load_directory(directory))

    def strip(weights: Weights) -> None:
        for key in list(weights):
            weights[key.removeprefix(prefix)] = weights.pop(key)

    rewrite(directory, strip)
    assert torch.equal(logits_of(load_directory(directory)), expected)


@pytest.mark.parametrize(
    ("name", "surplus"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "h.1.attn.masked_bias"),
    ],
)
def test_well_known_surplus_is_passed_over(name: str, surplus: str, saved_model: SavedModels, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(saved_model(name).directory, tmp_path / "model"))
    expected = logits_of(load_directory(directory))
    rewrite(directory, lambda weights: weights.update({surplus: torch.ones(3)}))
    assert torch.equal(logits_of(load_directory(directory)), expected)


@pytest.mark.parametrize("is_pickled", [False, True])
@pytest.mark.parametrize(
    ("name", "embedding"),
    [
        ("llama-biases", "model.embed_tokens.weight"),
        ("gpt2", "transformer.wte.weight"),
        ("opt", "model.decoder.embed_tokens.weight"),
    ],
)
def test_a_tied_head_in_the_file(
    name: str, embedding: str, is_pickled: bool, saved_model: SavedModels, tmp_path: Path
) -> None:
    """The embedding itself changes nothing, also where it stands under the head's name; another head is used."""
    directory = Path(shutil.copytree(saved_model(name).directory, tmp_path / "model"))
    expected, file = logits_of(load_directory(directory)), directory / "model.safetensors"
    weights = load_file(file)

    def logits_with(head: torch.Tensor, *, alone: bool = False) -> torch.Tensor:
        tensors = {**weights, "lm_head.weight": head}
        if alone:
            del tensors[embedding]
        save_file({key: value.clone() for key, value in tensors.items()}, file)
        if is_pickled:
            torch.save(tensors, directory / "pytorch_model.bin")
            file.unlink()
        return logits_of(load_directory(directory))

    table = weights[embedding]
    assert torch.equal(logits_with(table), expected)
    assert torch.equal(logits_with(table, alone=True), expected)
    torch.testing.assert_close(logits_with(2.0 * table), 2.0 * expected)
    torch.testing.assert_close(logits_with((2.0 * table).bfloat16()), 2.0 * expected, rtol=0.0, atol=0.2)
    with pytest.raises(ModelLoadError, match=r"tensor 'lm_head.weight' has shape \[3\], which no table of"):
        logits_with(torch.ones(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "tensor 'model.norm.weight' missing"),
        (lambda w: w.pop("lm_head.weight"), "tensor 'lm_head.weight' missing"),
        (
            lambda w: [w.pop(f"model.layers.{layer}.mlp.up_proj.weight") for layer in range(2)],
            "'model.layers.0.mlp.up_proj.weight' and 1 others missing",
        ),
        (
            lambda w: w.update({"model.layers.7.mlp.up_proj.weight": torch.ones(2)}),
            "'model.layers.7.mlp.up_proj.weight' does not belong to this model",
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}),
            "'model.layers.0.self_attn.q_proj.bias' does not belong",
        ),
        (
            lambda w: w.update({"model.embed_tokens.weight": torch.ones(96, 48)}),
            r"'model.embed_tokens.weight' has shape \[96, 48\], .* asks for \[97, 48\]",
        ),
        (
            lambda w: w.update({"model.layers.1.self_attn.k_proj.weight": torch.ones(48, 16)}),
            r"k_proj.weight' has shape \[48, 16\], .* asks for \[16, 48\]",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}),
            "'model.norm.weight' holds torch.int8",
        ),
        (lambda w: w.update({"norm.weight": torch.ones(48)}), "occurs twice"),
    ],
)
def test_wrong_tensors_are_named(change: Callable[[Weights], object], message: str, directory: Path) -> None:
    rewrite(directory, change)
    with pytest.raises(ModelLoadError, match=message) as raised:
        load_directory(directory)
    assert str(directory) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("keep", [0, 5, 300, -100])
def test_truncated_safetensors(keep: int, directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is corrupt or truncated"):
        load_directory(directory)


def test_safetensors_full_of_noise(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 5000)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is corrupt or truncated"):
        load_directory(directory)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"\x80\x02 noise"])
def test_corrupt_bin(content: bytes, directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin is corrupt"):
        load_directory(directory, "pt")


class Trap:
    """What a malicious checkpoint holds: code that runs when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("trap-was-sprung"),)


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, protocol=2))])
def test_bin_with_code_is_refused(
    write: Callable[..., object], directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write({"lm_head.weight": Trap()}, directory / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="refused"):
        load_directory(directory, "pt")
    assert not Path("trap-was-sprung").exists()


@pytest.mark.parametrize(("content", "message"), [([1], "holds a list"), ({"lm_head.weight": 1}, "is a int")])
def test_bin_that_is_no_table_of_tensors(content: object, message: str, directory: Path) -> None:
    torch.save(content, directory / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=message):
        load_directory(directory, "pt")


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_missing_shard(suffix: str, directory: Path) -> None:
    files = shard(directory, suffix)
    (directory / files[1]).unlink()
    with pytest.raises(ModelLoadError, match=f"{files[1]} is missing: the index"):
        load_directory(directory)


def test_shard_without_a_promised_tensor(directory: Path) -> None:
    files = shard(directory)
    weights = load_file(directory / files[0])
    name = min(weights)
    save_file({key: value for key, value in weights.items() if key != name}, directory / files[0])
    with pytest.raises(ModelLoadError, match=f"{files[0]}: tensor '{name}' is missing: the index"):
        load_directory(directory)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "'weight_map' must map"),
        ('{"weight_map": {"x": "../model.safetensors"}}', "which is no file name"),
        ('{"weight_map": {"x": 3}}', "which is no file name"),
    ],
)
def test_bad_index(index: str, message: str, directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=message) as raised:
        load_directory(directory)
    assert "model.safetensors.index.json" in str(raised.value)


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "pt"])
def test_no_weights(load_format: str, directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no weights .looked for "):
        load_directory(directory, load_format)


def test_format_that_is_asked_for_is_not_replaced(directory: Path) -> None:
    with pytest.raises(ModelLoadError, match="holds no weights"):
        load_directory(directory, "pt")


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_progress_rises_to_the_total(load_format: str, directory: Path) -> None:
    reports: list[tuple[int, int]] = []
    shard(directory)
    load_directory(directory, load_format, progress=lambda done, total: reports.append((done, total)))
    done = [report[0] for report in reports]
    assert len(reports) > 10
    assert done == sorted(done)
    assert len({report[1] for report in reports}) == 1
    assert reports[-1][0] == reports[-1][1] > 0


def test_dummy_weights_need_no_files_and_follow_the_seed(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    first, again, other = (logits_of(load_directory(directory, "dummy", seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.isfinite(first).all()
    assert first.std() > 1e-3


def test_dummy_weights_do_not_depend_on_the_order_of_loading(directory: Path) -> None:
    model = load_directory(directory, "dummy")
    expected = logits_of(model)
    model.slots = dict(reversed(model.slots.items()))
    model.load_weights(dummy_weights(model.slots, 0, lambda done, total: None, torch.device("cpu")))
    assert torch.equal(logits_of(model), expected)


def test_bad_family_setting(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "hidden_act": "softplus"}))
    with pytest.raises(ModelLoadError, match=r"hidden_act 'softplus' is not supported .known: gelu"):
        load_directory(directory)
