"""Settings of pooled requests. Names and meanings are vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.errors import UserError
from quire.sampling_params import RequestOutputKind

MAX_DIMENSIONS = 2**24
TASKS = ("embed", "classify", "score", "encode")
PADDINGS = ("max_length", "do_not_pad")
UNAVAILABLE = (
    *("skip_reading_prefix_cache", "extra_kwargs", "step_tag_id", "returned_token_ids", "late_interaction_params"),
    "late_chunking_params",
)
"""vLLM's fields for features that models that pool do not have here."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one pooled request. Invalid values raise UserError with `param` set.

    dimensions: leading elements of the vector to keep, for models trained for it (Matryoshka); None: all. normalize:
    scale the vector to length 1; None: as the model's files say. use_activation: apply the model's activation to a
    classifier's logits; None: yes. truncate_prompt_tokens: most tokens of a text; longer texts lose their ends; -1: the
    model's context; None: they are refused. padding: "max_length" pads a text to the context with tokens that the model
    reads as any other. task: "embed", "classify" or "score", which must match the call.

    The other fields are vLLM's and must keep their defaults, except requires_token_ids.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    padding: str | None = None
    task: str | None = None
    requires_token_ids: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    late_interaction_params: Any = None
    late_chunking_params: Any = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise UserError(f"task must be one of {', '.join(TASKS)}, not {self.task!r}", param="task")
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise UserError("output_kind must be FINAL_ONLY: a vector comes once", param="output_kind")
        for name in UNAVAILABLE:
            if getattr(self, name) not in (None, False, {}):
                raise UserError(f"{name} is not supported for models that pool", param=name)
        if self.dimensions is not None and not 1 <= self.dimensions <= MAX_DIMENSIONS:
            raise UserError(f"dimensions must be positive, not {self.dimensions}", param="dimensions")
        if self.padding not in (None, *PADDINGS):
            raise UserError(f"padding must be one of {', '.join(PADDINGS)}, not {self.padding!r}", param="padding")
        cut = self.truncate_prompt_tokens
        if cut is not None and cut != -1 and not 1 <= cut <= MAX_DIMENSIONS:
            raise UserError(
                f"truncate_prompt_tokens must be positive, or -1 for the model's context, not {cut}",
                param="truncate_prompt_tokens",
            )
