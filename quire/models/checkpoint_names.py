"""Mapping of checkpoint tensors to a model's weight slots, with known deviations in names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from quire.config.families import ARCHITECTURES
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.layers.context import WeightSlot, WeightSlots
from quire.logging import get_logger
from quire.quantization.file_tensor import FileTensor
from quire.quantization.integer_weight import WeightSource
from quire.quantization.quantized_weight import QuantizedWeight

logger = get_logger(__name__)
SourceT = TypeVar("SourceT", bound=WeightSource)


@dataclass(frozen=True)
class CheckpointNames:
    """base: prefix (with dot) that checkpoints of the headless model lack. surplus: pattern of unneeded tensors in old
    checkpoints."""

    base: str
    surplus: re.Pattern[str]

    @classmethod
    def of(cls, config: ModelConfig) -> CheckpointNames:
        """Names of the model's family; a tied head is surplus."""
        family = ARCHITECTURES[config.architecture]
        head = r"|^lm_head\.weight$" if config.shape.is_tied else ""
        return cls(family.checkpoint_base, re.compile(family.checkpoint_surplus + head))

    def find(self, name: str, slots: Collection[str], elsewhere: Collection[str], tensor: WeightSource) -> str | None:
        """Slot of a checkpoint's tensor; None if unneeded or other ranks' (`elsewhere`). Raises ModelLoadError for an
        unknown tensor.

        Biases of zeros without a slot are ignored.
        """
        own = _LAYER_NORM.sub(lambda found: found[1] + _LAYER_NORM_NAMES[found[2]], name)
        for candidate in (own, self.base + own):
            if candidate in slots:
                return candidate
            if candidate in elsewhere:
                return None
        if self.surplus.search(name) or (name.endswith(".bias") and _is_zero(tensor)):
            return None
        raise ModelLoadError(f"tensor {name!r} does not belong to this model")


_LAYER_NORM_NAMES = {"gamma": "weight", "beta": "bias"}
_LAYER_NORM = re.compile(r"(LayerNorm\.)(gamma|beta)$")
_LANGUAGE_MODEL = re.compile(r"(?:model\.)?language_model\.(model\.|lm_head\.)?(.+)")
_VISUAL = re.compile(r"(?:model\.)?(?:visual\.(.+)|vision_tower\.(?:vision_model\.)?(.+)|(multi_modal_projector\..+))")
_PLAIN = re.compile(r"lm_head\.|model\.(?:layers|embed_tokens|norm)\.")


def language_tensors(
    tensors: Iterable[tuple[str, SourceT]], where: object, draft_prefix: str = ""
) -> Iterator[tuple[str, SourceT]]:
    """Multimodal checkpoint's language-model tensors under a text-only one's names: `language_model.model.X`,
    `model.language_model.X` and `model.X`. Others are skipped, with a line in the log. where: the checkpoint, for the
    log. draft_prefix: the draft head's tensors' ("": none)."""
    skipped: Counter[str] = Counter()
    for name, tensor in tensors:
        inner = _LANGUAGE_MODEL.fullmatch(name)
        if inner is not None:
            yield (inner[1] or "model.") + inner[2], tensor
        elif _PLAIN.match(name) or (draft_prefix and name.startswith(draft_prefix)):
            yield name, tensor
        else:
            skipped[name.removeprefix("model.").partition(".")[0]] += 1
    if skipped:
        parts = ", ".join(f"{part} ({count})" for part, count in sorted(skipped.items()))
        logger.info("%s: the language model alone is loaded, without the tensors of %s", where, parts)


def vision_tensors(tensors: Iterable[tuple[str, SourceT]]) -> Iterator[tuple[str, SourceT]]:
    """Multimodal checkpoint's vision tensors under the tower's own names."""
    for name, tensor in tensors:
        own = _VISUAL.fullmatch(name)
        if own is not None:
            yield own[1] or own[2] or own[3], tensor


def fill_slots(
    slots: WeightSlots,
    names: CheckpointNames,
    weights: Iterable[tuple[str, WeightSource]],
    elsewhere: Collection[str] = (),
) -> None:
    """Load every slot. elsewhere: other ranks' slots, whose tensors are not read. Raises ModelLoadError naming a
    surplus, misshapen, unscaled integer, duplicate or missing tensor."""
    loaded: set[str] = set()
    for name, tensor in weights:
        slot_name = names.find(name, slots, elsewhere, tensor)
        if slot_name is None:
            continue
        slot = slots[slot_name]
        _check(name, tensor, slot)
        if slot_name in loaded:
            raise ModelLoadError(f"tensor {name!r} occurs twice")
        try:
            slot.load(tensor)
        except ModelLoadError as error:
            raise ModelLoadError(
                error.message if name in error.message else f"tensor {name!r}: {error.message}"
            ) from None
        loaded.add(slot_name)
    missing = [name for name in slots if name not in loaded]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ModelLoadError(f"tensor {missing[0]!r}{others} missing from the checkpoint")


def _check(name: str, tensor: WeightSource, slot: WeightSlot) -> None:
    shape = slot.matrix_shape if isinstance(tensor, QuantizedWeight) else slot.shape
    found = tuple(tensor.shape)
    if found != shape and not (slot.turned and found == (*shape[:-2], shape[-1], shape[-2])):
        raise ModelLoadError(
            f"tensor {name!r} has shape {list(tensor.shape)}, the model's config.json asks for {list(shape)}"
        )
    if isinstance(tensor, QuantizedWeight):
        return
    if not tensor.is_floating_point():
        raise ModelLoadError(f"tensor {name!r} holds {tensor.dtype}, not floating-point numbers")
    if tensor.dtype.itemsize == 1:
        raise ModelLoadError(
            f"tensor {name!r} holds {tensor.dtype}, which the quantization_config of config.json says nothing about"
        )


def _is_zero(tensor: WeightSource) -> bool:
    if isinstance(tensor, FileTensor):
        tensor = tensor.read()
    return isinstance(tensor, torch.Tensor) and not bool(tensor.any())
