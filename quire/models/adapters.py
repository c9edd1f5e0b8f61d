"""Loading of LoRA adapters: from a directory in PEFT's layout into the slots of a model's layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from quire.adapter_orders import AdapterRef
from quire.config.adapter_files import content_digest, read_config, scaled_digest, weight_file
from quire.config.adapters import AdaptersConfig
from quire.config.hf_json import shown
from quire.config.peft import PeftConfig
from quire.errors import ModelLoadError
from quire.layers.adapters import AdapterPlace, Adapters, AdapterStorage, nothing_runs
from quire.layers.context import WeightSlots
from quire.models.checkpoint_names import CheckpointNames
from quire.models.gguf.weights import read_gguf_matrices
from quire.models.safetensors_files import BytesRead, read_safetensors
from quire.models.torch_files import read_torch
from quire.quantization.file_tensor import FileTensor
from quire.utils.gguf import SUFFIX as GGUF_SUFFIX

_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(?:\.(?:default|weight))*")
_PREFIX = re.compile(r"base_model\.model\.")
_INNER = re.compile(r"(?:model\.)?language_model\.(model\.)?")
KNOWN_PARTS = {
    "lora_magnitude_vector": "DoRA's magnitudes are not supported",
    "lora_embedding_": "adapters of embeddings are not supported yet",
    ".bias": "biases are not supported",
    "modules_to_save": "whole modules beside the matrices are not supported",
    "base_layer": "it holds a tensor of the base",
    "token_adapter": "rows of the embedding are not supported",
}
"""Parts of tensor names that adapters may not have here, and why."""

Matrices = dict[str, dict[str, torch.Tensor]]
"""Module name in the file -> its matrices "A" and "B"."""
Placed = tuple[AdapterPlace, dict[str, torch.Tensor]]
"""Target of a module's matrices, and its "A" and "B"."""


class ModelAdapters:
    """Loads adapters into one model's layers, one at a time, beside steps without rows of its slot. `layers`: passed to
    the layers when they are built."""

    def __init__(self, config: AdaptersConfig, storage: AdapterStorage) -> None:
        self.layers = Adapters(storage)
        self._config = config
        self._storage = storage
        self._slots: WeightSlots = {}
        self._names: CheckpointNames | None = None
        self._heads = (1, 1)

    def model_is_loaded(self, slots: WeightSlots, names: CheckpointNames, heads: tuple[int, int]) -> None:
        """Allocate room for adapters once the weights are loaded. heads: query and key heads. Raises ModelLoadError if
        no layer takes any."""
        self._slots, self._names, self._heads = slots, names, heads
        if not any(slot.adapter is not None for slot in slots.values()):
            raise ModelLoadError("enable_lora: no layer of this model takes adapters")
        self.layers.weights_are_loaded()

    def reserved_bytes(self) -> int:
        """Maximum bytes of adapters, all slots filled at the maximum rank, counted as weights in the memory profile."""
        places = [slot.adapter for slot in self._slots.values() if slot.adapter is not None]
        return self._config.slot_bytes(sum(place.local_elements for place in places))

    def steps_so_far(self) -> Callable[[], None]:
        """Function that waits for the steps begun so far (AdapterStorage)."""
        return self._storage.steps_so_far()

    def load(self, slot: int, adapter: AdapterRef, wait: Callable[[], None] = nothing_runs) -> None:
        """Replace a slot's adapter. wait: waits for the steps that may have rows of the old one. Raises ModelLoadError
        naming file and tensor, and leaves the slot empty."""
        wait()
        for stack, _ in self.layers.stacks:
            self._storage.clear(stack, slot)
        for heads in self.layers.heads:
            heads.clear(slot)
        directory = Path(adapter.path)
        if scaled_digest(content_digest(directory), adapter.scale) != adapter.digest:
            raise ModelLoadError(f"{directory} has changed since it was named: name it anew")
        config, path = read_config(directory), weight_file(directory)
        try:
            of_gguf = path.suffix == GGUF_SUFFIX
            read = read_gguf_matrices(path, self._heads) if of_gguf else read_matrices(path)
            found = self._placed(read, config)
            for module, (place, matrices) in found.items():
                scale = adapter.scale * config.scale_of(_bare(module))
                place.load(self._storage, slot, matrices["A"], matrices["B"], scale)
        except ModelLoadError as error:
            message = error.message if str(directory) in error.message else f"{path}: {error.message}"
            raise ModelLoadError(message) from None

    def _placed(self, matrices: Matrices, config: PeftConfig) -> dict[str, Placed]:
        found: dict[str, Placed] = {}
        taken: dict[str, str] = {}
        for module, pair in matrices.items():
            name, place = self._place(module)
            if name in taken:
                raise ModelLoadError(f"the modules {shown(taken[name])} and {shown(module)} are one")
            taken[name] = module
            _check(module, pair, place, config)
            allowed = self._config.target_modules
            if allowed is not None and module.rpartition(".")[2] not in allowed:
                raise ModelLoadError(
                    f"tensor {shown(module)} changes a module that lora_target_modules leaves out: "
                    f"{', '.join(allowed)} may be changed"
                )
            found[module] = (place, pair)
        for target in config.target_modules or ():
            if not any(_bare(module).endswith(target) for module in matrices):
                raise ModelLoadError(f"target_modules names {shown(target)}, of which the file has no tensors")
        return found

    def _place(self, module: str) -> tuple[str, AdapterPlace]:
        assert self._names is not None, "the model is loaded before adapters"
        bare = _bare(module)
        inner = _INNER.sub("model.", bare, count=1) if _INNER.match(bare) else bare
        for own in dict.fromkeys((bare, inner, f"model.{bare}", self._names.base + bare)):
            slot = self._slots.get(f"{own}.weight")
            if slot is None:
                continue
            if slot.adapter is None:
                raise ModelLoadError(f"tensor {shown(module)}: adapters of this module are not supported")
            return f"{own}.weight", slot.adapter
        raise ModelLoadError(f"tensor {shown(module)} does not belong to this model")


def _bare(module: str) -> str:
    return _PREFIX.sub("", module, count=1) if _PREFIX.match(module) else module


def read_matrices(path: Path) -> Matrices:
    """Read all pairs of A and B from an adapter's weight file. Raises ModelLoadError for other tensors and incomplete
    pairs."""
    matrices: Matrices = {}
    for name, tensor in _tensors(path):
        match = _TENSOR.fullmatch(name)
        if match is None:
            why = next((why for part, why in KNOWN_PARTS.items() if part in name), "it is no matrix of an adapter")
            raise ModelLoadError(f"tensor {shown(name)}: {why}")
        pair = matrices.setdefault(match["module"], {})
        if match["part"] in pair:
            raise ModelLoadError(f"tensor {shown(name)} occurs twice")
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or tensor.dim() != len("AB"):
            raise ModelLoadError(
                f"tensor {shown(name)} is {tensor.dtype} {list(tensor.shape)}, not a matrix of floating-point numbers"
            )
        if not bool(tensor.isfinite().all()):
            raise ModelLoadError(f"tensor {shown(name)} holds infinite numbers or NaN")
        pair[match["part"]] = tensor
    for module, pair in matrices.items():
        for part in "AB":
            if part not in pair:
                raise ModelLoadError(f"tensor {shown(f'{module}.lora_{part}.weight')} is missing")
    if not matrices:
        raise ModelLoadError("it holds no tensors")
    return matrices


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    source = read_safetensors(path, BytesRead()) if path.suffix == ".safetensors" else read_torch(path)
    for name, tensor in source:
        yield name, tensor.read() if isinstance(tensor, FileTensor) else tensor


def _check(module: str, pair: dict[str, torch.Tensor], place: AdapterPlace, config: PeftConfig) -> None:
    rank, (outputs, inputs) = config.rank_of(_bare(module)), place.shape
    for part, wanted in (("A", (rank, inputs)), ("B", (outputs, rank))):
        if tuple(pair[part].shape) != wanted:
            raise ModelLoadError(
                f"tensor {shown(f'{module}.lora_{part}.weight')} has shape {list(pair[part].shape)}, where the model "
                f"and rank {rank} of {config.path.name} ask for {list(wanted)}"
            )
