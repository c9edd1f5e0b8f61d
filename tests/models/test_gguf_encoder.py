"""GGUF files of models that pool: BERT's vectors and tokens are those of Transformers on the same weights, and the file
says how texts become vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

from quire import LLM
from quire.config.hf_config import ModelChoices, load_model_config
from quire.errors import ConfigError, ModelLoadError
from quire.tokenization.tokenizer import load_tokenizer
from tests.fakes.gguf import BOOL, STRING, GGUFWriter, StoredTensor, Typed, typed
from tests.fakes.gguf_encoder import MATRICES, add_words, write_encoder
from tests.fakes.gguf_model import to_gguf
from tests.models.families import llama, qwen3
from tests.models.harness import random_prompts, randomize
from tests.models.test_gguf_sizes import counted_bytes

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
PROMPTS = random_prompts([5, 1, 23, 64], 97)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (*SPECIAL, "the", "na", "##ive", "##s", "cafe", "un", "##known", "3", ".", ",", "!", "'", "\u5317", "##t", "t")
TEXTS = ("The Caf\u00e9,  na\u00efves!", "un\u5317known 3.3", "", "don't [SEP] [MASK]", "qq the", "t" * 101)


def encoder() -> BertModel:
    torch.manual_seed(0)
    return randomize(BertModel(BertConfig(**SIZES)))  # type: ignore[return-value]


def vectors(path: Path, **options: object) -> list[torch.Tensor]:
    options = {"num_threads": 1, "skip_tokenizer_init": True, "dtype": "float32", **options}
    with LLM(str(path), **options) as llm:
        outputs = llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)
    return [torch.tensor(output.outputs.embedding) for output in outputs]


def expected(model: torch.nn.Module, method: str) -> list[torch.Tensor]:
    found = []
    for ids in PROMPTS:
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state[0]
        vector = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[method]
        found.append(vector / vector.norm())
    return found


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(("pooling", "method"), [(1, "mean"), (2, "cls"), (3, "last"), (None, "cls")])
def test_vectors_are_those_of_transformers(pooling: int | None, method: str, backend: str, tmp_path: Path) -> None:
    model = encoder()
    path = write_encoder(model, pooling).write(tmp_path / "model.gguf")
    for found, wanted in zip(vectors(path, attention_backend=backend), expected(model, method), strict=True):
        assert torch.allclose(found, wanted, atol=1e-4)


def test_quantised_matrices_are_nearly_the_same(tmp_path: Path) -> None:
    model = encoder()
    writer = write_encoder(model, 2, dict.fromkeys(MATRICES, "Q8_0") | {"ffn_down": "F16"})
    path = writer.write(tmp_path / "model.gguf")
    for found, wanted in zip(vectors(path), expected(model, "cls"), strict=True):
        assert float(found @ wanted) > 0.999
    config = load_model_config(str(path), dtype="auto", max_model_len=None, revision=None, config_only=False)
    assert counted_bytes(path, config) < 2 * path.stat().st_size


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """Files that say nothing of letters take the vocabulary's word for it: this one has small ones alone."""
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    for lowercase in (None, False):
        reference = BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=lowercase is None)
        writer = write_encoder(encoder(), 2)
        add_words(writer, WORDS, SPECIAL)
        if lowercase is not None:
            writer.metadata["tokenizer.ggml.normalizer.lowercase"] = Typed(BOOL, lowercase)
        tokenizer = load_tokenizer(writer.write(tmp_path / "model.gguf"))
        for text in TEXTS:
            assert tokenizer.encode(text) == reference(text)["input_ids"], text
    assert tokenizer.decode(tokenizer.encode("the cafe, unknown")) == "the cafe, unknown"


def test_a_vocabulary_with_capitals_keeps_them(tmp_path: Path) -> None:
    writer = write_encoder(encoder(), 2)
    add_words(writer, (*WORDS, "The"), SPECIAL)
    tokenizer = load_tokenizer(writer.write(tmp_path / "model.gguf"))
    assert tokenizer.encode("The the", add_special_tokens=False) == [len(WORDS), WORDS.index("the")]


def test_older_files_call_the_ends_beginning_and_end(tmp_path: Path) -> None:
    writer = write_encoder(encoder(), 2)
    add_words(writer, WORDS, SPECIAL)
    for new, old in (("cls_token_id", "bos_token_id"), ("seperator_token_id", "eos_token_id")):
        writer.metadata[f"tokenizer.ggml.{old}"] = writer.metadata.pop(f"tokenizer.ggml.{new}")
    assert load_tokenizer(writer.write(tmp_path / "model.gguf")).encode("the") == [2, 5, 3]


def test_words_without_an_end_are_refused(tmp_path: Path) -> None:
    writer = write_encoder(encoder(), 2)
    add_words(writer, WORDS, SPECIAL)
    for key in ("cls_token_id", "seperator_token_id"):
        del writer.metadata[f"tokenizer.ggml.{key}"]
    tokens = [word.replace("[SEP]", "[END]") for word in WORDS]
    writer.metadata["tokenizer.ggml.tokens"] = Typed(STRING, tokens)
    with pytest.raises(ModelLoadError, match=r"its vocabulary lacks '\[SEP\]', which stands around every text"):
        load_tokenizer(writer.write(tmp_path / "model.gguf"))


def test_a_decoder_pools_where_its_file_says_so(tmp_path: Path) -> None:
    """As Qwen3-Embedding's: the last token's state, behind the end that the tokenizer adds; another runner may be
    asked for, and of a file that says nothing as well."""
    model = randomize(qwen3(num_hidden_layers=2))
    writer, _ = to_gguf(model, "qwen3")
    silent = writer.write(tmp_path / "silent.gguf")
    writer.metadata["qwen3.pooling_type"] = typed(3)
    path = writer.write(tmp_path / "model.gguf")
    wanted = expected(model.model, "last")
    for found in (vectors(path), vectors(silent, runner="pooling")):
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one, other, atol=1e-4)
    assert pooling_of(silent) is None
    assert pooling_of(path, "generate") is None


def test_an_output_projection_is_left_out(tmp_path: Path) -> None:
    model = randomize(llama(num_hidden_layers=1, tie_word_embeddings=False))
    writer, _ = to_gguf(model, "llama")
    writer.metadata["llama.pooling_type"] = typed(1)
    for found, wanted in zip(
        vectors(writer.write(tmp_path / "model.gguf")), expected(model.model, "mean"), strict=True
    ):
        assert torch.allclose(found, wanted, atol=1e-4)


def pooling_of(path: Path, runner: str = "auto") -> str | None:
    config = load_model_config(
        str(path),
        dtype="auto",
        max_model_len=None,
        revision=None,
        config_only=False,
        choices=ModelChoices(runner=runner),
    )
    return None if config.pooling is None else config.pooling.method


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "bert.pooling_type",
            typed(4),
            r"pooling_type 4 is not supported \(known: 1 \(mean\), 2 \(cls\), 3 \(last\)\)",
        ),
        ("bert.attention.causal", Typed(BOOL, True), "attention.causal True is not supported"),
        (
            "bert.context_length",
            typed(32),
            r"'position_embd.weight' has shape \[64, 64\], the metadata asks for \[32, 64\]",
        ),
        ("general.architecture", typed("nomic-bert"), "nomic-bert"),
    ],
)
def test_what_is_not_supported(key: str, value: Typed, message: str, tmp_path: Path) -> None:
    writer = write_encoder(encoder(), 2)
    writer.metadata[key] = value
    refused(writer, tmp_path, message)


@pytest.mark.parametrize("name", ["token_types.weight", "blk.1.attn_q.bias", "token_embd_norm.bias"])
def test_missing_tensors_are_named(name: str, tmp_path: Path) -> None:
    writer = write_encoder(encoder(), 2)
    del writer.tensors[name]
    refused(writer, tmp_path, f"the tensor '{name}' is missing")


def test_a_classifier_is_refused(tmp_path: Path) -> None:
    writer = write_encoder(encoder(), 2)
    writer.tensors["cls.weight"] = StoredTensor(0, (64, 64), bytes(4 * 64 * 64))
    refused(writer, tmp_path, "'cls.weight' does not belong to a model of its architecture")


def test_an_encoder_generates_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BertModel generates no text"):
        pooling_of(write_encoder(encoder(), 2).write(tmp_path / "model.gguf"), "generate")


def refused(writer: GGUFWriter, directory: Path, message: str) -> None:
    path = writer.write(directory / "model.gguf")
    with pytest.raises(ModelLoadError, match=message):
        pooling_of(path)
