from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.config.families import GGUF
from quire.config.families.family import EXPERT, GGUFNames
from quire.config.gguf_tensors import hf_name
from quire.config.hf_json import Fields, shown
from quire.config.peft import MOST_RANK, PeftConfig
from quire.utils.gguf import GGUFFile, TensorEntry

MATRIX, STACK = 2, 3
"""Numbers of dimensions, of all experts' matrices too."""
_PARTS = {".lora_a": "A", ".lora_b": "B"}
_VALUE_HEADS = re.compile(r"\.(ssm_[a-z]+|attn_qkv|attn_gate)\.")
"""Tensors whose rows or columns have another order in such files, where `GGUFNames.tiled`."""
_ALPHA = "adapter.lora.alpha"
_INVOCATION = "adapter.alora.invocation_tokens"


@dataclass(frozen=True)
class GGUFAdapter:
    """Adapter in a GGUF file, as llama.cpp's `convert_lora_to_gguf.py` writes it. names: GGUF names of the
    architecture. entries: a module's A and B, by module (Hugging Face's name)."""

    config: PeftConfig
    names: GGUFNames
    entries: Mapping[str, Mapping[str, TensorEntry]]


def read_gguf_adapter(file: GGUFFile) -> GGUFAdapter:
    """Read the header of an adapter's file. Raises ModelLoadError with file and key or tensor for another file, and for
    unsupported settings."""
    fields = Fields(file.metadata, str(file.path))
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (found := fields.text(key, "")) != wanted:
            raise file.error(f"{key} is {shown(found)}: an adapter's is {shown(wanted)}")
    if _INVOCATION in file.metadata:
        raise file.error(f"{_INVOCATION} is not supported: it counts from certain tokens on (aLoRA)")
    architecture = fields.choice("general.architecture", sorted({name for name, *_ in GGUF}))
    families = [family.gguf for (name, *_), family in GGUF.items() if name == architecture and family.gguf is not None]
    pairs = _pairs(file)
    # One architecture may be of several families, whose layers have other tensors.
    for names in families:
        modules = {base: hf_name(base, names) for base in pairs}
        unknown = [base for base, module in modules.items() if module is None]
        if not unknown:
            break
    if unknown:
        raise file.error(f"tensor {shown(unknown[0])} does not belong to a model of its architecture")
    reordered = next((base for base in pairs if names.tiled and _VALUE_HEADS.search(base)), None)
    if reordered is not None:
        raise file.error(f"tensor {shown(reordered)}: adapters of recurrent layers are read from directories alone")
    entries = {str(module).removesuffix(".weight"): pairs[base] for base, module in modules.items()}
    ranks = {module: pair["B"].shape[-1] for module, pair in entries.items()}
    rank = max(ranks.values())
    if rank > MOST_RANK:
        raise file.error(f"an adapter of rank {rank}")
    patterns = {module: re.escape(module).replace(re.escape(EXPERT), r"\d+") for module in ranks}
    others = {patterns[module]: own for module, own in ranks.items() if own != rank}
    alpha = fields.number(_ALPHA) if file.metadata.get(_ALPHA) else 0.0  # without it scales are 1
    of_ranks = {} if alpha else {pattern: float(own) for pattern, own in others.items()}
    config = PeftConfig(file.path, rank, alpha or float(rank), others, of_ranks, False, None, None)
    return GGUFAdapter(config, names, entries)


def _pairs(file: GGUFFile) -> dict[str, dict[str, TensorEntry]]:
    pairs: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in file.tensors.items():
        base, suffix = name[:-7], name[-7:]
        wanted = STACK if base.endswith("_exps.weight") else MATRIX
        if suffix not in _PARTS or not base.endswith(".weight") or len(entry.shape) != wanted:
            raise file.error(f"tensor {shown(name)} is no matrix of an adapter")
        pairs.setdefault(base, {})[_PARTS[suffix]] = entry
    for base, pair in pairs.items():
        for suffix, part in _PARTS.items():
            if part not in pair:
                raise file.error(f"tensor {shown(base + suffix)} is missing")
        if len({entry.shape[:-MATRIX] for entry in pair.values()}) > 1:
            raise file.error(f"tensors {shown(base)} have matrices of different numbers of experts")
    if not pairs:
        raise file.error("it holds no tensors")
    return pairs


def read_header(path: Path) -> PeftConfig:
    """PeftConfig of an adapter's GGUF file. Raises ModelLoadError."""
    with GGUFFile(path) as file:
        return read_gguf_adapter(file).config
