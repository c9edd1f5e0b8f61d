"""Special tokens of a directory, from all its files, with Transformers' precedence.

tokenizer_config.json wins. If it has `added_tokens_decoder`, only tokenizer.json counts besides; otherwise
special_tokens_map.json overrides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from quire.config.hf_json import read_optional_json, shown
from quire.errors import ModelLoadError
from quire.tokenization.tokenizer_classes import TokenizerClass
from quire.tokenization.vocabulary_limits import check_pieces

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDED_TOKENS_FILE, SPECIAL_TOKENS_FILE = "added_tokens.json", "special_tokens_map.json"
_EXTRA, _OLD_EXTRA, _OWN = "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"
Token = str | AddedToken


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of a model directory. named: by name, usual ones first. extra: tokens without a name. added: by
    id, as in `added_tokens_decoder`."""

    named: Mapping[str, Token]
    extra: tuple[Token, ...]
    added: Mapping[int, AddedToken]

    @property
    def texts(self) -> dict[str, str]:
        return {name: text_of(token) for name, token in self.named.items()}

    def add_to(self, backend: tokenizers.Tokenizer, again: str) -> None:
        """Add the tokens to `backend`. again: see TokenizerClass.special_again."""
        added: list[Token] = [token for _, token in sorted(self.added.items())]
        known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *self.added.values())}
        for token in (*self.named.values(), *self.extra):
            if text_of(token) not in known and token not in added:
                added.append(token)
        names = set(self.texts.values())
        for place, token in enumerate(added):
            if isinstance(token, str):
                added[place] = AddedToken(token, special=True)
            elif token.content in names:
                token.special = True
        backend.add_tokens(added)
        listed = [*self.named.values(), *self.extra]
        if again == "plain":
            backend.add_tokens([AddedToken(text_of(token), special=True) for token in listed])
        elif again == "same":
            backend.add_special_tokens(
                [
                    AddedToken(token, special=True, normalized=False) if isinstance(token, str) else token
                    for token in listed
                ]
            )


def text_of(token: Token) -> str:
    return token if isinstance(token, str) else str(token.content)


def read_special_tokens(
    path: Path, config: Mapping[str, Any], kind: TokenizerClass | None, backend: tokenizers.Tokenizer | None
) -> SpecialTokens:
    """Special tokens of the directory `path`.

    config: tokenizer_config.json. kind: tokenizer's class. backend: tokenizer.json's, if any. Raises ModelLoadError.
    """
    values = dict(config)
    if _OLD_EXTRA in values and not values.get(_EXTRA):
        values[_EXTRA] = values.pop(_OLD_EXTRA)
    own = {key: values.pop(key) for key in list(values) if _is_own_name(key) and isinstance(values[key], str)}
    if isinstance(values.get(_EXTRA), dict):
        own.update(values.pop(_EXTRA))
    if own:
        values[_OWN] = own
    if "added_tokens_decoder" in values:
        added = _listed(path, values["added_tokens_decoder"])
    else:
        _put_over(path, values)
        added = _older(path, values)
        if backend is not None:
            added |= backend.get_added_tokens_decoder()
    entries = {token.content: token for token in added.values()}
    found: dict[str, Token] = {}
    for name in SPECIAL_NAMES:
        default = kind.tokens.get(name) if kind is not None else None
        if (token := _token(path, name, values.get(name, default))) is not None:
            found[name] = entries.get(text_of(token), token) if name in values else token
    padding = None if backend is None else backend.padding
    if padding is not None and "pad_token" not in values and (kind is None or "pad_token" not in kind.tokens):
        found["pad_token"] = padding["pad_token"]
    found = {name: found[name] for name in SPECIAL_NAMES if name in found}
    further: dict[str, Any] = dict(kind.own_tokens) if kind is not None else {}
    further |= {key: value for key, value in values.items() if _is_own_name(key) and _is_entry(value)}
    stated = values.get(_OWN) or {}
    if not isinstance(stated, dict):
        raise ModelLoadError(f"{path / 'tokenizer_config.json'}: {_OWN} must map names to tokens")
    for key, value in {**further, **stated}.items():
        if (token := _token(path, key, value)) is not None:
            found[key] = token
    extra = values.get(_EXTRA) if _EXTRA in values else values.get(_OLD_EXTRA, kind.extra if kind is not None else ())
    if not isinstance(extra, list | tuple | None):
        raise ModelLoadError(f"{path / 'tokenizer_config.json'}: {_EXTRA} must list tokens, not {shown(extra)}")
    tokens = [_token(path, _EXTRA, each) for each in extra or ()]
    listed = tuple(token for token in tokens if token is not None)
    check_pieces(path, map(text_of, (*found.values(), *listed, *added.values())))
    return SpecialTokens(found, listed, added)


def _is_own_name(key: str) -> bool:
    return key.endswith("_token") and key not in SPECIAL_NAMES


def _is_entry(value: Any) -> bool:
    return isinstance(value, str | AddedToken) or (isinstance(value, dict) and value.get("__type") == "AddedToken")


def _token(path: Path, name: str, value: Any) -> Token | None:
    if value is None or isinstance(value, str | AddedToken):
        return value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return _entry(path, name, value)
    raise ModelLoadError(f"{path / 'tokenizer_config.json'}: {name} must be a token, not {shown(value)}")


def _entry(path: Path, name: str, value: Any, *, is_special: bool = False) -> AddedToken:
    """AddedToken of a file's entry, an object of its fields. is_special: special whatever the entry says."""
    options = {key: each for key, each in value.items() if key != "__type"}
    try:
        return AddedToken(**(options | ({"special": True} if is_special else {})))
    except TypeError as error:
        raise ModelLoadError(f"{path}: {name} is not a token: {error}") from None


def _listed(path: Path, listed: Any) -> dict[int, AddedToken]:
    try:
        return {int(token_id): _entry(path, token_id, token) for token_id, token in listed.items()}
    except (AttributeError, TypeError, ValueError):
        file = path / "tokenizer_config.json"
        raise ModelLoadError(f"{file}: added_tokens_decoder must map ids to tokens") from None


def _put_over(path: Path, values: dict[str, Any]) -> None:
    for key, value in read_optional_json(path / SPECIAL_TOKENS_FILE).items():
        if isinstance(value, dict) and key != _EXTRA:
            values[key] = _entry(path / SPECIAL_TOKENS_FILE, key, value, is_special=True)
        elif key == _EXTRA and isinstance(value, list):
            listed = [
                _entry(path / SPECIAL_TOKENS_FILE, key, each, is_special=True) if isinstance(each, dict) else each
                for each in value
            ]
            known = list(values.get(_EXTRA) or [])
            values[key] = known + [each for each in listed if each not in known]
        else:
            values[key] = value
    if isinstance(values.get(_EXTRA), dict):
        values[_OWN] = {**(values.get(_OWN) or {}), **values.pop(_EXTRA)}


def _older(path: Path, values: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Tokens of added_tokens.json by id; only those named in `values` are special."""
    named = [values.get(name) for name in SPECIAL_NAMES] + list(values.get(_EXTRA) or [])
    special = {text_of(token) for token in named if isinstance(token, str | AddedToken)}  # other objects do not count
    found = {}
    for text, token_id in read_optional_json(path / ADDED_TOKENS_FILE).items():
        if not isinstance(token_id, int):
            raise ModelLoadError(f"{path / ADDED_TOKENS_FILE}: the id of {shown(text)} is {shown(token_id)}")
        found[token_id] = AddedToken(text, normalized=text not in special, special=text in special)
    return found
