"""Models that pool, from the engine core to the vector: against Transformers, and the same bits in every batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForSequenceClassification, Qwen3Config, Qwen3Model

from quire.cli import plan
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import ModelLoadError, UserError
from quire.executors.local import LocalExecutor
from tests.fakes.core import CoreClient
from tests.models.encoders import CLASSIFIERS, ENCODERS, class_logits, hidden_states
from tests.models.harness import randomize

LENGTHS = [1, 2, 37, 5, 100, 16, 130, 64, 17]
PROMPTS = [[2 + (7 * length + 11 * i) % 95 for i in range(length)] for length in LENGTHS]
TOLERANCE = 1e-5
"""Of the largest element."""


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        pytest.importorskip("quire.kernels.cpu._native")
    return str(request.param)


@pytest.fixture
def executors() -> Iterator[list[LocalExecutor]]:
    made: list[LocalExecutor] = []
    yield made
    for executor in made:
        executor.shutdown()


def save_encoder(model: PreTrainedModel, directory: Path, pooling: str | None = None, *, safe: bool = True) -> Path:
    """Write the model, and where `pooling` names a method the files of sentence-transformers. safe: as safetensors,
    else in the format of `torch.save`."""
    model.save_pretrained(directory)
    if not safe:
        torch.save(model.state_dict(), directory / "pytorch_model.bin")
        (directory / "model.safetensors").unlink()
    if pooling is not None:
        modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        listed = [{"idx": i, "path": path, "type": f"st.models.{name}"} for i, (name, path) in enumerate(modules)]
        (directory / "modules.json").write_text(json.dumps(listed))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return directory


def start(path: Path, executors: list[LocalExecutor], **options: object) -> CoreClient:
    config = resolve(EngineOptions.from_keywords({"model": str(path), "num_threads": 1, **options}))
    executors.append(LocalExecutor(config))
    return CoreClient(config, executors[-1])


def pool(client: CoreClient, prompts: list[list[int]], name: str, **fields: int) -> list[torch.Tensor]:
    for index, prompt in enumerate(prompts):
        client.add(f"{name} {index}", prompt, pooling=True, max_tokens=1, **fields)
    client.run()
    return [torch.tensor(client.pooled[f"{name} {index}"]) for index in range(len(prompts))]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for vector, reference in zip(found, expected, strict=True):
        assert float((vector - reference).abs().max()) < TOLERANCE * max(1.0, float(reference.abs().max()))


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "mean_tokens") for name in ENCODERS), ("bert", "cls_token"), ("bert", "lasttoken")]
)
def test_an_encoder_like_transformers_in_every_batch(
    name: str, method: str, backend: str, tmp_path: Path, executors: list[LocalExecutor]
) -> None:
    model = randomize(ENCODERS[name]())
    path = save_encoder(model, tmp_path, method)
    client = start(path, executors, attention_backend=backend, max_num_batched_tokens=256, max_num_seqs=4)
    pick = {"mean_tokens": lambda h: h.mean(0), "cls_token": lambda h: h[0], "lasttoken": lambda h: h[-1]}[method]
    together = pool(client, PROMPTS, "together")
    assert_near(together, [pick(hidden_states(model, prompt)) for prompt in PROMPTS])
    alone = [pool(client, [prompt], f"alone {index}")[0] for index, prompt in enumerate(PROMPTS)]
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True)), "the batch has changed a vector"
    backwards = pool(client, PROMPTS[::-1], "backwards")
    assert all(torch.equal(*pair) for pair in zip(together, backwards[::-1], strict=True))
    client.core.scheduler.check()


def add_dense(path: Path, sizes: list[tuple[int, int, str]], *, is_old: bool) -> list[torch.nn.Module]:
    """Write `Dense` modules between the pooling and the norm, as sentence-transformers does; the modules themselves.
    sizes: inputs, outputs and the class of the activation. is_old: weights in the format of `torch.save`."""
    listed = json.loads((path / "modules.json").read_text())
    made: list[torch.nn.Module] = []
    for index, (width, outputs, activation) in enumerate(sizes):
        folder = path / f"{2 + index}_Dense"
        folder.mkdir()
        linear = torch.nn.Linear(width, outputs, bias=index == 0)
        with torch.no_grad():
            for weight in linear.parameters():
                weight.normal_(0.0, 0.3)
        config = {"in_features": width, "out_features": outputs, "bias": index == 0}
        config["activation_function"] = f"torch.nn.modules.activation.{activation}"
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {f"linear.{name}": weight.detach() for name, weight in linear.named_parameters()}
        if is_old:
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors")
        listed.insert(2 + index, {"idx": 2 + index, "path": folder.name, "type": "st.models.Dense"})
        made.append(torch.nn.Sequential(linear, getattr(torch.nn, activation)()))
    (path / "modules.json").write_text(json.dumps(listed))
    return made


@pytest.mark.parametrize(("kind", "is_old"), [("encoder", False), ("encoder", True), ("decoder", False)])
def test_dense_modules_project_vectors(
    kind: str, is_old: bool, backend: str, tmp_path: Path, executors: list[LocalExecutor]
) -> None:
    is_encoder = kind == "encoder"
    model = randomize(ENCODERS["bert"]() if is_encoder else Qwen3Model(Qwen3Config(**DECODER)))
    path = save_encoder(model, tmp_path, "mean_tokens" if is_encoder else "lasttoken", safe=not is_old)
    dense = add_dense(path, [(48, 40, "Tanh"), (40, 72, "Identity")], is_old=is_old)
    options = {} if is_encoder else {"num_blocks_override": 60}
    client = start(path, executors, attention_backend=backend, **options)
    with torch.no_grad():
        states = [hidden_states(model, prompt) for prompt in PROMPTS]
        expected = [dense[1](dense[0](state.mean(0) if is_encoder else state[-1])) for state in states]
    assert_near(pool(client, PROMPTS, "text"), expected)
    assert resolve(EngineOptions.from_keywords({"model": str(path)})).model.vector_size == 72


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_features": 40}, "in_features is 40 for vectors of 48 elements"),
        ({"activation_function": "torch.nn.modules.activation.Mish"}, "activation_function 'Mish' is not supported"),
        ({"module_input_name": "token_embeddings"}, "module_input_name 'token_embeddings' is not supported"),
        ({"out_features": 2**20}, "out_features must be at most 65536"),
    ],
)
def test_dense_modules_that_do_not_fit(
    change: dict[str, object], message: str, tmp_path: Path, executors: list[LocalExecutor]
) -> None:
    path = save_encoder(ENCODERS["bert"](), tmp_path, "mean_tokens")
    add_dense(path, [(48, 40, "Tanh")], is_old=False)
    config = path / "2_Dense" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ModelLoadError, match=message):
        start(path, executors)


def test_first_names_of_layer_norms(tmp_path: Path, executors: list[LocalExecutor]) -> None:
    model = randomize(ENCODERS["bert"]())
    path = save_encoder(model, tmp_path, "mean_tokens")
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {
        name.replace(new, old): weight
        for name, weight in model.state_dict().items()
        for new, old in [next(((new, old) for new, old in names.items() if new in name), ("", ""))]
    }
    assert sum("gamma" in name for name in tensors) == 7
    save_file(tensors, path / "model.safetensors")
    assert_near(pool(start(path, executors), PROMPTS, "text"), [hidden_states(model, each).mean(0) for each in PROMPTS])


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_like_transformers(
    name: str, backend: str, tmp_path: Path, executors: list[LocalExecutor]
) -> None:
    model = randomize(CLASSIFIERS[name]())
    client = start(save_encoder(model, tmp_path), executors, attention_backend=backend)
    logits = pool(client, PROMPTS, "text")
    assert_near(logits, [class_logits(model, prompt) for prompt in PROMPTS])
    if name == "bert":
        pairs = [prompt for prompt in PROMPTS if len(prompt) > 5]
        found = pool(client, pairs, "pair", columns={"segments": 5})
        assert_near(found, [class_logits(model, prompt, 5) for prompt in pairs])
        assert not torch.equal(found[0], logits[2]), "token types matter"


DECODER = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize("method", ["lasttoken", "mean_tokens"])
def test_a_decoder_as_an_embedder(method: str, backend: str, tmp_path: Path, executors: list[LocalExecutor]) -> None:
    """In a pool too small for all at once; of the last token also in chunks and from the prefix cache."""
    model = randomize(Qwen3Model(Qwen3Config(**DECODER)))
    options = {"block_size": 4, "num_blocks_override": 60, "attention_backend": backend}
    if method == "lasttoken":
        options["max_num_batched_tokens"] = 24
    client = start(save_encoder(model, tmp_path, method), executors, **options)
    states = [hidden_states(model, prompt) for prompt in PROMPTS]
    first = pool(client, PROMPTS, "first")
    assert_near(first, [state.mean(0) if method == "mean_tokens" else state[-1] for state in states])
    second = pool(client, PROMPTS[::-1], "second")[::-1]
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert bool(client.core.stats().prefix_cache_hits_total) == (method == "lasttoken")


def test_a_decoder_as_a_classifier(backend: str, tmp_path: Path, executors: list[LocalExecutor]) -> None:
    config = Qwen2Config(**{**DECODER, "num_key_value_heads": 3}, num_labels=2, pad_token_id=0)
    model = randomize(Qwen2ForSequenceClassification(config))
    client = start(save_encoder(model, tmp_path), executors, attention_backend=backend, num_blocks_override=60)
    logits = pool(client, PROMPTS, "text")
    assert_near(logits, [class_logits(model, prompt) for prompt in PROMPTS])


def test_a_prompt_that_no_step_holds_is_refused(tmp_path: Path, executors: list[LocalExecutor]) -> None:
    path = save_encoder(randomize(ENCODERS["bert"]()), tmp_path)
    client = start(path, executors, attention_backend="torch", max_num_batched_tokens=32)
    client.add("long", list(range(2, 40)), pooling=True, max_tokens=1)
    client.add("short", [2, 3, 4], pooling=True, max_tokens=1)
    client.run()
    assert (
        "the prompt has 38 tokens, and this model computes prompts in one step, of up to 32" in client.refused["long"]
    )
    assert list(client.pooled) == ["short"]


def test_a_cache_cannot_be_planned(tmp_path: Path) -> None:
    path = save_encoder(randomize(ENCODERS["modernbert"]()), tmp_path)
    with pytest.raises(UserError, match="sizes KV caches, and ModernBertModel keeps none"):
        plan.main([str(path)])


def test_shapes_count_all_weights(tmp_path: Path) -> None:
    for name, make in ENCODERS.items():
        model = make()
        config = resolve(EngineOptions(model=str(save_encoder(model, tmp_path / name))))
        weights = [weight for key, weight in model.named_parameters() if "pooler" not in key]
        assert config.model.shape.parameters() == sum(weight.numel() for weight in weights)


def test_weights_of_eight_bits(tmp_path: Path, executors: list[LocalExecutor]) -> None:
    pytest.importorskip("quire.kernels.cpu._native")
    model = randomize(ENCODERS["bert"]())
    path = save_encoder(model, tmp_path, "mean_tokens")
    expected = [hidden_states(model, prompt).mean(0) for prompt in PROMPTS]
    for method in ("int8", "w8a8"):
        client = start(path, executors, quantization=method)
        found = pool(client, PROMPTS, method)
        for vector, reference in zip(found, expected, strict=True):
            assert float(torch.cosine_similarity(vector, reference, dim=0)) > 0.98
