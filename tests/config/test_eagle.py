"""What a head for drafts says in its config.json, and which heads are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.eagle import with_verifier
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import ConfigError
from tests.models.eagle_heads import HeadTwin

TWIN = HeadTwin(32, 48, 97, (1, 3), [3, 1])
MODEL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def written(directory: Path, values: dict[str, Any]) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values))
    return str(directory)


def drafting(tmp_path: Path, head: dict[str, Any], **keys: object) -> EngineOptions:
    config = {"model": written(tmp_path / "head", head), "num_speculative_tokens": 3, **keys}
    given = {"model": written(tmp_path / "model", MODEL), "load_format": "dummy", "speculative_config": config}
    return EngineOptions.from_keywords(given)


def test_a_head_is_known_by_its_config(tmp_path: Path) -> None:
    config = resolve(drafting(tmp_path, TWIN.config()))
    chosen = config.speculation.draft_model
    assert config.speculation.method == "eagle3"
    assert chosen is not None
    assert chosen.head is not None
    assert chosen.model is not None
    assert (chosen.head.taps, chosen.head.width, chosen.head.draft_vocab_size) == ((0, 2), 96, 2)
    assert not chosen.head.norm_before_residual
    assert chosen.model.max_model_len == config.model.max_model_len == 256


def test_what_is_left_out(tmp_path: Path) -> None:
    """The layers are those that vLLM takes; a head of `speculators` adds normalised states."""
    values = HeadTwin(32, 48, 97, (1, 3), authors=False).config(tmp_path)
    del values["eagle_aux_hidden_state_layer_ids"], values["transformer_layer_config"]["max_position_embeddings"]
    chosen = resolve(drafting(tmp_path, values)).speculation.draft_model
    assert chosen is not None
    assert chosen.head is not None
    assert chosen.head.layers == (2, 3, 3)
    assert chosen.head.norm_before_residual
    assert chosen.head.draft_vocab_size == 97


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 98}, "a model with vocabulary of 98 elements"),
        ({"target_hidden_size": 40}, "hidden states of 40 elements"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, "must be from 1 to 5"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 6]}, "must be from 1 to 5"),
        ({"eagle_aux_hidden_state_layer_ids": ["1"]}, "must list 1 to 16 layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be true"),
        ({"parallel_drafting": True}, "parallel_drafting True is not supported"),
        ({"model_type": "gemma3"}, "a head of 'gemma3' layers is not supported"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type 'dflash' is not supported"),
        ({"draft_vocab_size": 98}, "draft_vocab_size"),
    ],
    ids=str,
)
def test_refused_heads(change: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(drafting(tmp_path, TWIN.config() | change))
    assert caught.value.param == "speculative_config"


def test_the_model_of_a_speculator(tmp_path: Path) -> None:
    verifier = written(tmp_path / "model", MODEL)
    name = written(tmp_path / "head", HeadTwin(32, 48, 97, (1, 3), authors=False).config(Path(verifier)))
    config = resolve(EngineOptions(model=name, load_format="dummy"))
    assert config.model.name == verifier
    assert config.speculation.max_drafts == 3
    assert config.speculation.draft_model is not None
    assert config.speculation.draft_model.name == name
    given = EngineOptions(model=name, revision="v1", speculative_config={"num_speculative_tokens": 7})
    found = with_verifier(given)
    assert (found.model, found.revision) == (verifier, None)
    assert found.speculative_config == {
        "method": "eagle3", "model": name, "revision": "v1", "num_speculative_tokens": 7
    }  # fmt: skip
    assert with_verifier(found) is found


def test_a_speculator_without_a_model(tmp_path: Path) -> None:
    values = HeadTwin(32, 48, 97, (1, 3), authors=False).config()
    values["speculators_config"]["verifier"] = {"name_or_path": None}
    with pytest.raises(ConfigError, match="does not name its model"):
        resolve(EngineOptions(model=written(tmp_path / "head", values)))
