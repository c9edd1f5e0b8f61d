"""Bodies of GET /v1/models, OpenAI's and Anthropic's."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class ModelPermission(msgspec.Struct, kw_only=True):
    """Permissions that clients of OpenAI's older API read."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """aliases, tags: llama.cpp's."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[ModelPermission]
    aliases: list[str] | UnsetType = UNSET
    tags: list[str] | UnsetType = UNSET


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class ModelInfo(msgspec.Struct, kw_only=True):
    """Model in Anthropic's form."""

    id: str
    type: str = "model"
    display_name: str
    created_at: str
    lifecycle: str = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(msgspec.Struct):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None
