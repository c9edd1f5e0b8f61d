"""LLM.embed, classify, score and encode over tiny encoders with a tokenizer of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel

from quire import LLM
from quire.engine.pooling_processor import activated, encode_pooled, normalized
from quire.errors import ConfigError, ModelLoadError, PromptTooLongError, UserError
from quire.pooling_params import PoolingParams
from quire.tokenization.tokenizer import load_tokenizer
from tests.models.encoders import CLASSIFIERS, ENCODERS, class_logits, hidden_states
from tests.models.harness import randomize

CLS, SEP = 95, 96
WORDS = [f"w{number}" for number in range(95)]
TEXTS = ["w11 w2 w3", "w7", " ".join(WORDS[10:60])]
QUIET = {"use_tqdm": False}


def save_with_tokenizer(model: PreTrainedModel, directory: Path, **config: object) -> Path:
    """A directory with a tokenizer of whole words, which puts [CLS] and [SEP] around texts and pairs."""
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({**{w: i for i, w in enumerate(WORDS)}, "[CLS]": CLS, "[SEP]": SEP}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return directory


def tokens_of(*texts: str) -> list[int]:
    parts = [[int(word[1:]) for word in text.split()] + [SEP] for text in texts]
    return [CLS, *(token for part in parts for token in part)]


@pytest.fixture(scope="module")
def embedder() -> PreTrainedModel:
    return randomize(ENCODERS["bert"]())


@pytest.fixture(scope="module")
def embedder_path(embedder: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(embedder, tmp_path_factory.mktemp("embedder"), is_matryoshka=True)


@pytest.fixture(scope="module")
def llm(embedder_path: Path) -> Iterator[LLM]:
    with LLM(str(embedder_path), num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def reranker() -> PreTrainedModel:
    return randomize(CLASSIFIERS["roberta"]())


@pytest.fixture(scope="module")
def reranking(reranker: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = save_with_tokenizer(reranker, tmp_path_factory.mktemp("reranker"), type_vocab_size=1)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    template = "[CLS] $A [SEP] $B [SEP]"  # RoBERTa has tokens of one type
    special = [("[CLS]", CLS), ("[SEP]", SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=template, special_tokens=special
    )
    tokenizer.save(str(path / "tokenizer.json"))
    with LLM(str(path), num_threads=1) as llm:
        yield llm


def near(found: list[float], expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((torch.tensor(found) - expected).abs().max() < tolerance * max(1.0, float(expected.abs().max())))


def test_embeddings_like_transformers(llm: LLM, embedder: PreTrainedModel) -> None:
    """Without files of sentence-transformers: the first token's hidden state, with length 1."""
    outputs = llm.embed(TEXTS, **QUIET)
    for text, output in zip(TEXTS, outputs, strict=True):
        assert output.prompt_token_ids == tokens_of(text)
        state = hidden_states(embedder, tokens_of(text))[0]
        assert near(output.outputs.embedding, torch.nn.functional.normalize(state, dim=0))
        assert output.outputs.hidden_size == 48
    raw = llm.embed({"prompt_token_ids": tokens_of(TEXTS[0])}, pooling_params=PoolingParams(normalize=False), **QUIET)
    assert near(raw[0].outputs.embedding, hidden_states(embedder, tokens_of(TEXTS[0]))[0])


def say_default_prompt(path: Path, name: str | None = "query") -> None:
    prompts = {"prompts": {"query": "w5 w6 ", "document": "w9 "}, "default_prompt_name": name}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def test_the_default_prompt_of_sentence_transformers(embedder: PreTrainedModel, tmp_path: Path) -> None:
    path = save_with_tokenizer(embedder, tmp_path / "model")
    say_default_prompt(path)
    with LLM(str(path), num_threads=1) as llm:
        found = llm.embed([TEXTS[0], {"prompt_token_ids": tokens_of(TEXTS[0])}], **QUIET)
        assert [each.prompt_token_ids for each in found] == [tokens_of("w5 w6 " + TEXTS[0]), tokens_of(TEXTS[0])]
        with pytest.raises(UserError, match="the text is empty"):
            llm.embed("", **QUIET)
    say_default_prompt(path, None)
    with LLM(str(path), num_threads=1) as llm:
        assert llm.embed(TEXTS[0], **QUIET)[0].prompt_token_ids == tokens_of(TEXTS[0])


def test_a_default_prompt_that_cannot_be_had_is_refused(embedder: PreTrainedModel, tmp_path: Path) -> None:
    path = save_with_tokenizer(embedder, tmp_path / "model")
    say_default_prompt(path, "other")
    with pytest.raises(ModelLoadError, match="default_prompt_name 'other' must be one of the prompts"):
        LLM(str(path))
    say_default_prompt(path)
    (path / "modules.json").write_text(
        json.dumps([{"type": "x.Transformer"}, {"type": "x.Pooling", "path": "1_Pooling"}])
    )
    (path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(ModelLoadError, match="a mean without the tokens of the default prompt"):
        LLM(str(path))


def test_fewer_dimensions(llm: LLM, embedder: PreTrainedModel) -> None:
    output = llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=5), **QUIET)[0]
    leading = hidden_states(embedder, tokens_of(TEXTS[0]))[0, :5]
    assert near(output.outputs.embedding, torch.nn.functional.normalize(leading, dim=0))
    with pytest.raises(UserError, match="dimensions must be at most 48, not 49"):
        llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=49), **QUIET)


def test_scores_of_an_embedder_are_cosines(llm: LLM, embedder: PreTrainedModel) -> None:
    vectors = [hidden_states(embedder, tokens_of(text))[0] for text in TEXTS]
    scores = llm.score(TEXTS[0], TEXTS, **QUIET)
    for vector, output in zip(vectors, scores, strict=True):
        assert output.outputs.score == pytest.approx(float(torch.cosine_similarity(vectors[0], vector, 0)), abs=1e-5)


def test_scores_of_a_cross_encoder(reranking: LLM, reranker: PreTrainedModel) -> None:
    scores = reranking.score(TEXTS[0], TEXTS[1:], **QUIET)
    raw = reranking.score(TEXTS[0], TEXTS[1:], pooling_params=PoolingParams(use_activation=False), **QUIET)
    for text, score, logit in zip(TEXTS[1:], scores, raw, strict=True):
        expected = float(class_logits(reranker, tokens_of(TEXTS[0], text)))
        assert score.prompt_token_ids == tokens_of(TEXTS[0], text)
        assert logit.outputs.score == pytest.approx(expected, abs=1e-4)
        assert score.outputs.score == pytest.approx(float(torch.sigmoid(torch.tensor(expected))), abs=1e-5)
    with pytest.raises(UserError, match="it gives no embeddings"):
        reranking.embed(TEXTS, **QUIET)


def test_probabilities_of_labels(tmp_path: Path) -> None:
    model = randomize(CLASSIFIERS["bert"]())
    with LLM(str(save_with_tokenizer(model, tmp_path)), num_threads=1) as llm:
        output, encoded = llm.classify(TEXTS[0], **QUIET)[0], llm.encode(TEXTS[0], **QUIET)[0]
        logits = class_logits(model, tokens_of(TEXTS[0]))
        assert near(output.outputs.probs, logits.softmax(0))
        assert output.outputs.num_classes == 3
        assert encoded.outputs.data == output.outputs.probs
        with pytest.raises(UserError, match="score needs an embedder or a classifier with one"):
            llm.score("w1", "w2", **QUIET)


def test_texts_that_are_too_long_are_refused_or_cut(llm: LLM) -> None:
    long = " ".join(["w5"] * 300)
    with pytest.raises(PromptTooLongError, match="context length is 256 tokens, but the prompt has 302"):
        llm.embed(long, **QUIET)
    assert llm.embed(long, truncate_prompt_tokens=-1, **QUIET)[0].prompt_token_ids == [CLS, *[5] * 254, SEP]
    assert llm.embed(long, truncate_prompt_tokens=4, **QUIET)[0].prompt_token_ids == [CLS, 5, 5, SEP]
    with pytest.raises(UserError, match="leaves no room"):
        llm.embed(long, truncate_prompt_tokens=2, **QUIET)


@pytest.mark.parametrize("limit", [None, 60, 20, 8, 5])
def test_pairs_are_cut_as_transformers_cuts_them(embedder_path: Path, limit: int | None) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = load_tokenizer(embedder_path)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(embedder_path / "tokenizer.json"))
    for pair in [(TEXTS[0], TEXTS[2]), (TEXTS[2], TEXTS[0]), (TEXTS[2], TEXTS[2]), (TEXTS[1], TEXTS[1])]:
        found = encode_pooled(tokenizer, *pair, limit)
        expected = reference(*pair, truncation=limit is not None, max_length=limit, return_token_type_ids=True)
        assert found.token_ids == expected["input_ids"]
        assert [int(i >= found.second_segment) for i in range(len(found.token_ids))] == expected["token_type_ids"]


def test_what_the_model_cannot_do_is_refused(llm: LLM, embedder_path: Path) -> None:
    with pytest.raises(UserError, match="gives vectors or scores of texts, and generates none"):
        llm.generate("w1", **QUIET)
    with pytest.raises(UserError, match="it is no classifier"):
        llm.classify("w1", **QUIET)
    for wrong in ("", []):
        with pytest.raises(UserError, match="is empty"):
            llm.embed([wrong], **QUIET)
    with pytest.raises(ConfigError, match="generates no text"):
        LLM(str(embedder_path), runner="generate")
    for name, value in (("kv_cache_memory", "1GiB"), ("num_blocks_override", 5), ("preemption_mode", "swap")):
        with pytest.raises(ConfigError, match="keeps none"):
            LLM(str(embedder_path), **{name: value})
    with pytest.raises(ConfigError, match="computes them whole here"):
        LLM(str(embedder_path), max_prefill_chunk=16)


def test_a_model_that_generates_gives_no_vectors() -> None:
    with LLM("bundled", num_threads=1, max_model_len=64) as llm, pytest.raises(UserError, match="runner='pooling'"):
        llm.embed("def f():", **QUIET)


def test_arithmetic_of_results() -> None:
    logits = [1.0, -2.0, 90.0]
    expected = torch.tensor(logits, dtype=torch.float64)
    assert activated(logits, "softmax") == pytest.approx(expected.softmax(0).tolist())
    assert activated(logits, "sigmoid") == pytest.approx(expected.sigmoid().tolist())
    assert normalized([0.0, 0.0, 0.0]) == [0, 0, 0]
