"""The routes of models that pool, with the official client and without, over tiny encoders."""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import MistralConfig, MistralForSequenceClassification, PreTrainedModel

from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.engine.client import DEFAULT_EXECUTOR
from quire.engine.request_part import IN_BACKGROUND
from quire.errors import UserError
from quire.outputs import RequestOutput
from quire.request import FinishReason
from quire.server import vector_format
from quire.server.app import create_app
from quire.server.settings import ServerSettings
from tests.fakes.adapters import merged, write_adapter
from tests.models.encoders import CLASSIFIERS, ENCODERS, class_logits, hidden_states
from tests.models.harness import randomize
from tests.server.conftest import HOST, Served
from tests.test_llm_pooling import TEXTS, save_with_tokenizer, say_default_prompt, tokens_of

DECODER = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {"embedder": ENCODERS["bert"], "classifier": CLASSIFIERS["bert"], "reranker": CLASSIFIERS["modernbert-one"]}


@pytest.fixture(scope="session")
def references() -> dict[str, object]:
    return {name: randomize(make()) for name, make in MODELS.items()}


@pytest.fixture(scope="session")
def paths(references: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_with_tokenizer(model, tmp_path_factory.mktemp(name), is_matryoshka=True)  # type: ignore[arg-type]
        for name, model in references.items()
    }


@contextlib.asynccontextmanager
async def client_of(path: Path, lora_dir: Path | None = None) -> AsyncIterator[httpx.AsyncClient]:
    settings = ServerSettings(
        served_model_name=["tiny"],
        port=0,
        allowed_hosts=[HOST],
        lora_dir=None if lora_dir is None else str(lora_dir),
        enable_admin_routes=True,
    )
    options = EngineOptions(
        model=str(path), num_threads=1, max_num_seqs=4, enable_lora=lora_dir is not None, max_loras=2
    )
    engine = AsyncLLM.from_options(options, in_process=True, executor=DEFAULT_EXECUTOR)
    try:
        app = create_app(engine, settings)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            yield client
    finally:
        engine.shutdown()


@pytest.fixture
async def embedder(paths: dict[str, Path]) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(paths["embedder"]) as client:
        yield client


async def test_embeddings_with_the_official_client(embedder: httpx.AsyncClient, references: dict[str, object]) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://{HOST}/v1", api_key="key", http_client=embedder) as client:
        plain = await client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        packed = await client.embeddings.create(model="tiny", input=TEXTS)  # asks for base64
        short = await client.embeddings.create(model="tiny", input=tokens_of(TEXTS[0]), dimensions=8)
    for text, each, same in zip(TEXTS, plain.data, packed.data, strict=True):
        state = torch.nn.functional.normalize(hidden_states(references["embedder"], tokens_of(text))[0], dim=0)
        assert np.allclose(each.embedding, state, atol=1e-5)
        assert np.array_equal(np.float32(each.embedding), np.float32(same.embedding))
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == sum(len(tokens_of(text)) for text in TEXTS)
    assert len(short.data[0].embedding) == 8
    assert [each.index for each in plain.data] == [0, 1, 2]


async def test_many_inputs_of_every_kind(embedder: httpx.AsyncClient) -> None:
    """More texts than the batch has rows; a list of token ids, and lists of them."""
    ids = [tokens_of(f"w{number}") for number in range(2, 40)]
    many = (await embedder.post("/v1/embeddings", json={"input": ids})).json()["data"]
    assert [each["index"] for each in many] == list(range(38))
    one = (await embedder.post("/v1/embeddings", json={"input": ids[7]})).json()["data"]
    assert one[0]["embedding"] == many[7]["embedding"]
    raw = (await embedder.post("/pooling", json={"input": "w9", "encoding_format": "base64"})).json()["data"][0]
    assert np.array_equal(np.frombuffer(base64.b64decode(raw["data"]), "<f4"), np.float32(one[0]["embedding"]))
    first, second = (np.float32(many[index]["embedding"]) for index in (7, 8))
    scores = (await embedder.post("/score", json={"text_1": "w9", "text_2": ["w9", "w10"]})).json()["data"]
    assert [each["score"] for each in scores] == [pytest.approx(1.0), pytest.approx(float(first @ second), abs=1e-5)]


@pytest.mark.parametrize("order", ["little", "big", "native"])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
async def test_numbers_as_bytes(embedder: httpx.AsyncClient, order: str, kind: str) -> None:
    plain = (await embedder.post("/v1/embeddings", json={"input": "w9 w3"})).json()["data"][0]["embedding"]
    body = {"input": "w9 w3", "encoding_format": "base64", "embed_dtype": kind, "endianness": order}
    answer = (await embedder.post("/v1/embeddings", json=body)).json()
    data = bytearray(base64.b64decode(answer["data"][0]["embedding"]))
    integer, size = {"float32": ("int32", 4), "float16": ("int16", 2), "bfloat16": ("int16", 2)}.get(kind, ("uint8", 1))
    dtype = np.dtype(integer).newbyteorder(order[0])  # type: ignore[arg-type]
    found = np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))
    torch_name = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(kind, kind)
    expected = torch.tensor(plain).to(getattr(torch, torch_name))
    assert np.array_equal(found, expected.view(getattr(torch, integer)).numpy())
    assert answer["usage"]["completion_tokens"] == 0
    for encoding in ("bytes", "bytes_only"):
        twice = await embedder.post(
            "/v1/embeddings", json={**body, "input": ["w9 w3"] * 2, "encoding_format": encoding}
        )
        assert (twice.content, twice.headers["content-type"]) == (data * 2, "application/octet-stream")
        if encoding == "bytes_only":
            assert "metadata" not in twice.headers
            continue
        told = json.loads(twice.headers["metadata"])
        half = len(data)
        place = {"embed_dtype": kind, "endianness": order, "shape": [half // size]}
        assert told["data"] == [{"index": n, "start": n * half, "end": (n + 1) * half, **place} for n in range(2)]
        assert told["usage"]["prompt_tokens"] == 2 * answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("kind", "name"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_numbers_of_eight_bits_are_those_of_torch(kind: str, name: str) -> None:
    """All of them, what lies half way between two, and beside that; and what is too large."""
    table = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).double()
    table = table[table.isfinite()].sort().values.unique()
    halves = (table[1:] + table[:-1]) / 2
    values = torch.cat([table, halves, halves * 1.001, halves * 0.999, torch.tensor([-0.0])]).tolist()
    expected = bytes(torch.tensor(values, dtype=torch.float64).to(getattr(torch, name)).view(torch.uint8).numpy())
    assert vector_format._to_float8(values, kind) == expected
    for value in (table[-1].item() * 1.2, math.inf, math.nan):
        with pytest.raises(UserError, match="too large"):
            vector_format._to_float8([value], kind)


async def test_the_texts_of_a_pair_are_cut_before_they_are_joined(paths: dict[str, Path]) -> None:
    async with client_of(paths["reranker"]) as client:
        body = {"query": "w1 w2 w3", "documents": ["w3 w4 w5 w6", "w7"]}
        whole, cut, short = [
            (await client.post("/rerank", json=each)).json()
            for each in (
                body,
                {**body, "max_tokens_per_query": 2, "max_tokens_per_doc": 3},
                {**body, "query": "w1 w2", "documents": ["w3 w4 w5", "w7"]},
            )
        ]
    assert cut["usage"] == short["usage"] != whole["usage"]
    scores = [{each["index"]: each["relevance_score"] for each in answer["results"]} for answer in (cut, short)]
    assert scores[0] == scores[1]
    assert {each["document"]["text"] for each in cut["results"]} == {*body["documents"]}


async def test_the_default_prompt_stands_before_texts(references: dict[str, object], tmp_path: Path) -> None:
    path = save_with_tokenizer(references["embedder"], tmp_path / "model")  # type: ignore[arg-type]
    say_default_prompt(path)
    async with client_of(path) as client:
        for special, extra in ((True, 2), (False, 0)):
            body = {"input": TEXTS[0], "add_special_tokens": special}
            answer = (await client.post("/v1/embeddings", json=body)).json()
            assert answer["usage"]["prompt_tokens"] == len(TEXTS[0].split()) + 2 + extra


async def test_a_conversation_has_a_vector(paths: dict[str, Path]) -> None:
    (paths["embedder"] / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    try:
        async with client_of(paths["embedder"]) as client:
            messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
            said = (await client.post("/v1/embeddings", json={"messages": messages})).json()
            plain = {"input": "w1 w2 w3", "add_special_tokens": False}
            expected = (await client.post("/v1/embeddings", json=plain)).json()
            assert said["data"] == expected["data"]
            assert said["usage"]["prompt_tokens"] == 3
            whole = (await client.post("/v1/embeddings", json={"input": "w1 w2 w3"})).json()
            assert whole["usage"]["prompt_tokens"] > 3
            both = await client.post("/v1/embeddings", json={"input": "w1", "messages": messages})
            assert (both.status_code, both.json()["error"]["param"]) == (400, "input")
            assert (await client.post("/pooling", json={"input": "w1", "task": "embed"})).status_code == 200
            for task in ("classify", "token_embed"):
                refused = await client.post("/pooling", json={"input": "w1", "task": task})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "task")
                assert refused.json()["error"]["message"].startswith(f"Unsupported task: {task!r} (")
    finally:
        (paths["embedder"] / "chat_template.jinja").unlink()


async def test_labels(paths: dict[str, Path], references: dict[str, object]) -> None:
    async with client_of(paths["classifier"]) as client:
        answer = (await client.post("/classify", json={"model": "tiny", "input": TEXTS})).json()
        refused = await client.post("/v1/embeddings", json={"input": "w1"})
    for text, each in zip(TEXTS, answer["data"], strict=True):
        expected = class_logits(references["classifier"], tokens_of(text)).softmax(0)
        assert np.allclose(each["probs"], expected, atol=1e-5)
        assert (each["label"], each["num_classes"]) == (f"LABEL_{int(expected.argmax())}", 3)
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == "tiny is a classifier: it gives no embeddings"


async def test_padding(paths: dict[str, Path], references: dict[str, object]) -> None:
    """Up to the context, read as other tokens are; pairs get none."""
    config = paths["embedder"] / "tokenizer_config.json"
    written = config.read_text()
    config.write_text(json.dumps({**json.loads(written), "pad_token": "w7"}))
    try:
        async with client_of(paths["embedder"]) as client:

            async def answer(**fields: object) -> dict[str, Any]:
                found: dict[str, Any] = (await client.post("/v1/embeddings", json={"input": TEXTS[0], **fields})).json()
                return found

            padded = await answer(padding="max_length")
            num_tokens = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
            assert padded["usage"]["prompt_tokens"] == num_tokens
            text = tokens_of(TEXTS[0])
            expected = await answer(input=[*text, *[7] * (num_tokens - len(text))])
            assert padded["data"] == expected["data"]
            plain = await answer()
            assert (await answer(padding="do_not_pad"))["data"] == plain["data"] != padded["data"]
            assert (await answer(padding="longest"))["error"]["param"] == "padding"
    finally:
        config.write_text(written)
    async with client_of(paths["reranker"]) as client:
        pair = {"text_1": "w1", "text_2": "w2"}
        assert (await client.post("/score", json={**pair, "padding": "do_not_pad"})).status_code == 200
        refused = await client.post("/score", json={**pair, "padding": "max_length"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "padding")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_in_order(path: str, paths: dict[str, Path], references: dict[str, object]) -> None:
    documents = ["w11 w12", "w40", "w7 w8 w9"]
    logits = [class_logits(references["reranker"], tokens_of("w5 w6", text)) for text in documents]
    expected = [float(logit.sigmoid()) for logit in logits]
    async with client_of(paths["reranker"]) as client:
        body = {"query": "w5 w6", "documents": documents, "top_n": 2}
        answer = (await client.post(path, json=body)).json()
        scores = (await client.post("/v1/score", json={"text_1": "w5 w6", "text_2": documents})).json()["data"]
    assert [each["score"] for each in scores] == pytest.approx(expected, abs=1e-5)
    order = sorted(range(3), key=lambda index: -expected[index])[:2]
    assert [each["index"] for each in answer["results"]] == order
    assert [each["document"]["text"] for each in answer["results"]] == [documents[index] for index in order]
    assert [each["relevance_score"] for each in answer["results"]] == [scores[index]["score"] for index in order]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": []}, "input", "length"),
        ({"input": [[3], 3]}, "input", "must hold token ids and texts, or inputs"),
        ({"input": {"content": []}}, "input.content", "length"),
        ({"input": {"content": [{"type": "image_url"}]}}, "input.content[0].type", "invalid enum value"),
        ({"input": {"prompt_string": "w1", "content": [{"text": "w1"}]}}, "input.content", "give either"),
        ({"input": {"prompt_string": "w1", "multimodal_data": ["x"]}}, "input.multimodal_data", "is not supported"),
        ({"input": "w1 " * 300}, "input", "maximum context length is 256"),
        ({"input": "w1", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "context of 256 tokens"),
        ({"input": "w1", "dimensions": 0}, "dimensions", "must be positive"),
        ({"input": "w1", "encoding_format": "hex"}, "encoding_format", "invalid enum value"),
        ({"input": "w1", "dimension": 1}, "dimension", "unknown field"),
        ({"input": "w1", "truncation_side": "left"}, "truncation_side", "is not supported"),
        ({"input": "w1", "padding": "max_length"}, "padding", "needs a tokenizer with a padding token"),
    ],
)
async def test_mistakes_are_named(
    embedder: httpx.AsyncClient, body: dict[str, object], param: str, message: str
) -> None:
    answer = await embedder.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


async def test_inputs_of_llama_cpp(embedder: httpx.AsyncClient) -> None:
    tokens = (await embedder.post("/tokenize", json={"prompt": "w9 w3"})).json()["tokens"]
    begin, first, second, end = tokens
    plain = (await embedder.post("/v1/embeddings", json={"input": "w9 w3"})).json()["data"][0]["embedding"]
    same: list[Any] = [
        {"prompt_string": "w9 w3"},
        {"content": [{"type": "text", "text": "w9 "}, {"type": "text", "text": "w3"}]},
        [begin, "w9", second, end],
        [begin, first, "w3", end],
        tokens,
    ]
    for given, number in [*((each, 1) for each in same), (same, len(same))]:
        found = (await embedder.post("/v1/embeddings", json={"input": given})).json()["data"]
        assert [each["embedding"] for each in found] == [pytest.approx(plain, abs=1e-6)] * number
        for path, field in (("/embedding", "content"), ("/embeddings", "input"), ("/embedding", "input")):
            theirs = (await embedder.post(path, json={field: given})).json()
            assert [each["embedding"][0] for each in theirs] == [each["embedding"] for each in found]
    for wrong in ({}, {"content": "w1", "input": "w1"}, {"content": ["w1"] * 2049}, {"input": [{"content": "w1"}]}):
        assert (await embedder.post("/embeddings", json=wrong)).status_code == 400
    long = {"input": [" ".join(["w1"] * 50_000), [begin, "w9", end], [[begin]]][:2]}
    assert (await embedder.post("/v1/embeddings", json=long)).json()["error"]["param"] == "input"


async def test_names_of_vllm(embedder: httpx.AsyncClient) -> None:
    """The texts of a score under each of their names, and `use_activation`, which is `normalize` of vectors."""
    scores = []
    for first, second in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        body = {first: "w1 w2", second: ["w3", "w1 w4"], "truncation_side": "right"}
        scores.append((await embedder.post("/score", json=body)).json()["data"])
    assert scores == [scores[0]] * 4
    for more in ({"text_1": "w1"}, {"instruction": "Find it."}, {"max_tokens_per_doc": -3}):
        answer = await embedder.post("/score", json={"queries": "w1 w2", "items": "w3", **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(more)))

    async def vector(**fields: object) -> list[float]:
        answer = await embedder.post("/v1/embeddings", json={"input": "w1 w2", "cache_salt": "salt", **fields})
        found: list[float] = answer.json()["data"][0]["embedding"]
        return found

    bare = await vector(normalize=False)
    assert await vector(use_activation=False) == bare != await vector()
    assert await vector(use_activation=True, normalize=False) == bare


async def test_a_model_that_pools_completes_nothing(embedder: httpx.AsyncClient) -> None:
    answer = await embedder.post("/v1/completions", json={"prompt": "w1"})
    assert answer.status_code == 400
    assert "generates none" in answer.json()["error"]["message"]


async def test_a_model_that_generates_has_no_vectors(served: Served) -> None:
    answer = await served.client.post("/v1/embeddings", json={"input": "abc"})
    assert answer.status_code == 404
    assert "runner='pooling'" in answer.json()["error"]["message"]


async def test_sagemakers_address(embedder: httpx.AsyncClient) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "w1 w2"}),
        ("/score", {"text_1": "w1", "text_2": ["w2", "w3"]}),
        ("/rerank", {"query": "w1", "documents": ["w2", "w3"]}),
    ):
        mine, theirs = [(await embedder.post(each, json=body)).json() for each in ("/invocations", path)]
        name = "results" if path == "/rerank" else "data"
        assert mine[name] == theirs[name]
    refused = await embedder.post("/invocations", json={"prompt": "w1"})
    assert refused.status_code == 400


@pytest.mark.parametrize(("is_line", "status"), [(True, 503), (False, 500)])
async def test_a_line_that_is_aborted_is_asked_again(
    embedder: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, is_line: bool, status: int
) -> None:
    real = AsyncLLM.pool

    async def aborted(self: AsyncLLM, *arguments: Any, **named: Any) -> RequestOutput:
        output = await real(self, *arguments, **named)
        output.outputs[0].finish_reason, output.pooled = FinishReason.ABORT, None
        return output

    monkeypatch.setattr(AsyncLLM, "pool", aborted)
    token = IN_BACKGROUND.set(is_line)
    answer = await embedder.post("/v1/embeddings", json={"model": "tiny", "input": "a"})
    IN_BACKGROUND.reset(token)
    assert answer.status_code == status


def classifying_decoder() -> PreTrainedModel:
    return MistralForSequenceClassification(MistralConfig(**DECODER, num_labels=3, pad_token_id=None))


def scoring_decoder() -> PreTrainedModel:
    return MistralForSequenceClassification(MistralConfig(**DECODER, num_labels=1, pad_token_id=None))


ADAPTED = {
    "embedder": ("/v1/embeddings", "/pooling", "/score", "/rerank"),
    "decoder": ("/classify", "/pooling"),
    "scoring decoder": ("/classify", "/score", "/rerank"),
    "classifier": ("/classify", "/pooling"),
    "reranker": ("/classify", "/score", "/v2/rerank"),
}
"""Routes of each model's adapters."""
BODIES: dict[str, dict[str, Any]] = {
    "score": {"text_1": TEXTS[0], "text_2": TEXTS},
    "rerank": {"query": TEXTS[0], "documents": TEXTS},
}


def numbers_of(path: str, answer: dict[str, Any]) -> list[list[float]]:
    """Scores or vectors, by index of the texts."""
    items = sorted(answer["results" if path.endswith("rerank") else "data"], key=lambda each: each["index"])
    fields = ("embedding", "probs", "score", "relevance_score", "data")
    found = [next(each[name] for name in fields if name in each) for each in items]
    return [each if isinstance(each, list) else [each] for each in found]


def wanted_of(name: str, path: str, model: PreTrainedModel) -> list[list[float]]:
    """What Transformers computes for BODIES."""
    if name == "embedder":
        states = [hidden_states(model, tokens_of(text))[0] for text in TEXTS]
        vectors = [torch.nn.functional.normalize(each, dim=0) for each in states]
        is_pair = path not in ("/v1/embeddings", "/pooling")
        return [[float(vectors[0] @ each)] if is_pair else each.tolist() for each in vectors]
    pairs = [(TEXTS[0], text) if path.endswith(("score", "rerank")) else (text,) for text in TEXTS]
    segments = [len(tokens_of(pair[0])) if len(pair) > 1 and name == "classifier" else 0 for pair in pairs]
    logits = [class_logits(model, tokens_of(*pair), at) for pair, at in zip(pairs, segments, strict=True)]
    return [(each.softmax(0) if len(each) > 1 else each.sigmoid()).tolist() for each in logits]


@pytest.mark.parametrize("name", ADAPTED)
async def test_adapters_by_name(name: str, tmp_path: Path) -> None:
    makers = {**MODELS, "decoder": classifying_decoder, "scoring decoder": scoring_decoder}
    model = randomize(makers[name]())
    saved = None if name == "embedder" else ["classifier", "score"]
    paths = {
        each: write_adapter(model, tmp_path / each, seed=len(each), modules_to_save=saved) for each in ("one", "three")
    }
    models = {"tiny": model.double(), **{each: merged(model, path) for each, path in paths.items()}}
    other = write_adapter(randomize(CLASSIFIERS["roberta"]()), tmp_path / "other", modules_to_save=["classifier"])
    async with client_of(save_with_tokenizer(model, tmp_path / "base"), tmp_path) as client:
        for path in ADAPTED[name]:
            body = BODIES.get(path.rpartition("/")[2], {"input": TEXTS})
            for asked, own in models.items():
                response = await client.post(path, json={**body, "model": asked})
                assert response.status_code == 200, response.text
                assert response.json()["model"] == asked
                found = np.array(numbers_of(path, response.json()))
                assert np.allclose(found, wanted_of(name, path, own), atol=1e-4), (path, asked)
            assert (await client.post(path, json={**body, "model": "unknown"})).status_code == 404
        load = {"lora_name": "misfit", "lora_path": str(other)}
        response = await client.post("/v1/load_lora_adapter", json=load)
        assert (response.status_code, "does not" in response.text) == (400, True)
        assert response.json()["error"]["param"] == "lora_path"
        cards = (await client.get("/v1/models")).json()["data"]
        assert {card["id"] for card in cards} == {"tiny", "one", "three"}
        body = BODIES.get(ADAPTED[name][0][1:], {"input": TEXTS})
        response = await client.post(ADAPTED[name][0], json={**body, "model": "other"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
        await client.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
        (tmp_path / "one" / "adapter_config.json").unlink()
        assert (await client.post(ADAPTED[name][0], json={**body, "model": "one"})).status_code == 404
