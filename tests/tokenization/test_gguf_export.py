"""Tokenizers written into GGUF files: read back they give the same ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from quire.errors import ModelLoadError
from quire.tokenization.gguf_export import check_same_ids, describe_tokenizer
from quire.tokenization.sentencepiece import BPE, BYTE, NORMAL, SPACE, UNIGRAM, USER_DEFINED
from quire.tokenization.tokenizer import Tokenizer, load_tokenizer
from quire.utils.gguf import GGUFFile
from quire.utils.gguf_writer import GGUFWriter
from tests.tokenization.build import byte_level_backend, wordpiece
from tests.tokenization.reference_pieces import random_texts, sentencepiece_vocabulary, to_proto
from tests.tokenization.test_gguf import LLAMA3, TEXTS, by_pattern, reference

PIECES, SCORES, KINDS = sentencepiece_vocabulary()
BOTH_ENDS = {"bos_token": "<s>", "eos_token": "</s>"}


def written(tokenizer: Tokenizer, directory: Path, vocab_size: int, end_ids: tuple[int, ...] = ()) -> Tokenizer:
    """The tokenizer of a file with nothing else."""
    described = describe_tokenizer(tokenizer, directory, vocab_size, end_ids)
    path = directory / "tokenizer.gguf"
    with GGUFWriter(path, {"general.architecture": "llama", **described}, []) as writer:
        writer.finish()
    return load_tokenizer(path)


def saved(backend: Backend, directory: Path, config: dict[str, object]) -> Tokenizer:
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(directory)


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o", "qwen35"])
def test_byte_level_ids_are_the_same(rule: str, tmp_path: Path) -> None:
    tokenizer = saved(reference(rule), tmp_path, dict(BOTH_ENDS))
    size = tokenizer.vocab_size + 5
    found = written(tokenizer, tmp_path, size)
    with GGUFFile(tmp_path / "tokenizer.gguf") as file:
        assert file.metadata["tokenizer.ggml.pre"] == rule
        assert len(file.strings("tokenizer.ggml.tokens") or []) == size
    for text in TEXTS:
        assert found.encode(text) == tokenizer.encode(text)
        assert found.decode(found.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    check_same_ids(tokenizer, found)


def test_special_tokens_ends_and_template(tmp_path: Path) -> None:
    config = {**BOTH_ENDS, "chat_template": "{{ messages }}", "pad_token": "<|im_start|>"}
    tokenizer = saved(reference("gpt-2"), tmp_path, config)
    found = written(tokenizer, tmp_path, tokenizer.vocab_size, (1, 7, 9))
    assert found.special_tokens == tokenizer.special_tokens
    assert found.chat_template == "{{ messages }}"
    with GGUFFile(tmp_path / "tokenizer.gguf") as file:
        ends = [file.metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
        around = [file.metadata[f"tokenizer.ggml.add_{name}_token"] for name in ("bos", "eos")]
    assert ends == [1, 7, 9]
    assert around == [False, False]


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentencepieces_file_gives_pieces_and_scores(tmp_path: Path, *, adds_space: bool) -> None:
    options = {"add_dummy_prefix": int(adds_space), "remove_extra_whitespaces": 0}
    (tmp_path / "tokenizer.model").write_bytes(to_proto(PIECES, SCORES, KINDS, BPE, **options))
    tokenizer = load_tokenizer(tmp_path)
    found = written(tokenizer, tmp_path, len(PIECES) + 3)
    texts = random_texts(300)
    assert found.encode_batch(texts) == tokenizer.encode_batch(texts)
    assert found.special_tokens == tokenizer.special_tokens
    with GGUFFile(tmp_path / "tokenizer.gguf") as file:
        assert file.metadata["tokenizer.ggml.add_bos_token"] is True
        assert (file.strings("tokenizer.ggml.tokens") or [])[-3:] == [f"[PAD{len(PIECES) + n}]" for n in range(3)]
        assert (file.numbers("tokenizer.ggml.token_type") or [])[-4:] == [KINDS[-1], 5, 5, 5]


def test_merges_say_the_scores_where_there_is_no_such_file(tmp_path: Path) -> None:
    """As a tokenizer.json that was made of a sentencepiece model has them: what scores more is merged before."""
    places = {piece: place for place, piece in enumerate(PIECES)}
    merges = []
    for piece in sorted((each for each in PIECES if len(each) > 1), key=lambda each: -SCORES[places[each]]):
        if KINDS[places[piece]] == NORMAL:
            cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
            merges += [(left, right) for left, right in cuts if left in places and right in places]
    backend = Backend(
        models.BPE(vocab=places, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=BYTE in KINDS)
    )
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    own = [piece for piece, kind in zip(PIECES, KINDS, strict=True) if kind == USER_DEFINED]
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in own])
    tokenizer = saved(backend, tmp_path, dict(BOTH_ENDS))
    found = written(tokenizer, tmp_path, len(PIECES))
    texts = [text for text in random_texts(300) if "<" not in text]
    assert found.encode_batch(texts, False) == tokenizer.encode_batch(texts, False)


def test_tokenizers_that_files_do_not_carry(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="of the kind WordLevel is not written; --no-tokenizer"):
        describe_tokenizer(wordpiece(), tmp_path, 1000, ())
    backend = byte_level_backend()
    backend.pre_tokenizer = by_pattern(LLAMA3.replace("{1,3}", "{1,7}"))
    with pytest.raises(ModelLoadError, match="the rule by which its tokenizer splits words has no name in files"):
        describe_tokenizer(Tokenizer(backend), tmp_path, 1000, ())
    with pytest.raises(ModelLoadError, match="its tokenizer has 332 tokens, and the model 331"):
        describe_tokenizer(Tokenizer(byte_level_backend()), tmp_path, 331, ())
    words = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    with pytest.raises(ModelLoadError, match="neither byte-level nor sentencepiece's"):
        describe_tokenizer(Tokenizer(words), tmp_path, 1000, ())
    (tmp_path / "tokenizer.model").write_bytes(to_proto(PIECES, SCORES, KINDS, UNIGRAM))
    with pytest.raises(ModelLoadError, match=r"a unigram model is not written|of the kind Unigram is not written"):
        describe_tokenizer(load_tokenizer(tmp_path), tmp_path, 1000, ())


def test_other_ids_are_refused(tmp_path: Path) -> None:
    """A normaliser that the named rule does not have shows in the ids."""
    backend = reference("llama-bpe")
    backend.normalizer = normalizers.Lowercase()
    tokenizer = saved(backend, tmp_path, dict(BOTH_ENDS))
    with pytest.raises(ModelLoadError, match=r"the ids of .* would be others; --no-tokenizer"):
        check_same_ids(tokenizer, written(tokenizer, tmp_path, tokenizer.vocab_size))
