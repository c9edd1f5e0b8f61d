"""Loading of LoRA adapters into the slots of a model's layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from quire.adapter_orders import AdapterRef
from quire.config.adapter_files import content_digest, read_config, scaled_digest, weight_file
from quire.config.adapters import EXPERTS, AdaptersConfig
from quire.config.hf_json import shown
from quire.config.peft import PeftConfig
from quire.errors import ModelLoadError
from quire.layers.adapters import AdapterPlace, Adapters, AdapterStorage, SavedHead, nothing_runs
from quire.layers.context import WeightSlots
from quire.layers.embedding import HEAD
from quire.layers.expert_adapters import STACKED, ExpertAdapters, ExpertPlace, StackedPlace
from quire.layers.table_adapters import TablePlace
from quire.models.checkpoint_names import CheckpointNames
from quire.models.gguf.weights import read_gguf_matrices
from quire.models.safetensors_files import BytesRead, read_safetensors
from quire.models.torch_files import read_torch
from quire.models.weight_files import Tensors
from quire.quantization.file_tensor import FileTensor
from quire.utils.gguf import SUFFIX as GGUF_SUFFIX

_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>(?:embedding_)?[AB])(?:\.(?:default|weight))*")
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.weight")
_WHOLE = re.compile(r"(?P<module>.+)\.(?P<part>weight|bias)")
_COPY = re.compile(r"\.modules_to_save(?:\.default)?(?=\.|$)")
_PREFIX = re.compile(r"base_model\.model\.")
_INNER = re.compile(r"(?:model\.)?language_model\.(model\.)?")
_MIXTURE = re.compile(rf"(?P<mixture>.+\.{EXPERTS})\.(?:\d+\.\w+\.weight|{'|'.join(STACKED)})")
_WRAPPED = ".base_layer"
"""Part of a module's name for each further parameter."""
_OLDER_NAMES = (".mlp.", ".block_sparse_moe.")
"""Mixtral's in Transformers and in checkpoints."""
KNOWN_PARTS = {
    "lora_magnitude_vector": "DoRA's magnitudes are not supported",
    ".bias": "biases are not supported",
    "modules_to_save": "whole modules beside the matrices are not supported",
    "base_layer": "it holds a tensor of the base",
    "token_adapter": "rows of the embedding are not supported",
}
"""Parts of tensor names that adapters may not have here, and why."""

Matrices = dict[str, dict[str, torch.Tensor]]
"""Module name in the file -> its matrices, by `AdapterPlace.names`."""
WHOLE, BIAS = "whole", "bias"
"""Names of a matrix and a bias in place of the base's."""
MATRIX_NAMES, EMBEDDING_NAMES = AdapterPlace.names, TablePlace.names
COMPARED_ROWS = 2**13
Placed = tuple[AdapterPlace | None, dict[str, torch.Tensor]]
"""Target of a module's matrices (None: on another stage), and these."""


class ModelAdapters:
    """Loads adapters into one model's layers, one at a time, beside steps without rows of its slot. `layers`: passed to
    the layers when they are built."""

    def __init__(self, config: AdaptersConfig, storage: AdapterStorage) -> None:
        self.layers = Adapters(storage)
        self._config = config
        self._storage = storage
        self._places: dict[str, AdapterPlace | None] = {}
        self._names: CheckpointNames | None = None
        self._heads = (1, 1)
        self._base: Callable[[], Tensors] | None = None
        self._mixtures: dict[str, ExpertAdapters | None] = {}
        """By the checkpoint's name; None: it takes no adapters."""
        self._ignores_surplus = False
        self._elsewhere: set[str] = set()
        """Checkpoint names of other stages' matrices and mixtures."""
        self._held: list[AdapterPlace | None] = []

    def model_is_loaded(
        self,
        slots: WeightSlots,
        names: CheckpointNames,
        heads: tuple[int, int],
        base: Callable[[], Tensors] | None = None,
        *,
        pools: bool = False,
        is_encoder: bool = False,
        outline: WeightSlots | None = None,
    ) -> None:
        """Allocate room for adapters once the weights are loaded. heads: query and key heads. base: streams the
        checkpoint again. pools: the model computes no tokens. is_encoder: heads that it lacks are ignored. outline:
        slots of all stages. Raises ModelLoadError if no layer takes any."""
        self._names, self._heads, self._base, self._ignores_surplus = names, heads, base, is_encoder
        own = {name: slot.adapter for name, slot in slots.items()} | ({} if pools else self.layers.places)
        self._places = {name: slot.adapter for name, slot in (outline or {}).items()} | own
        self._elsewhere = self._places.keys() - own.keys()
        self._held = [place for name, place in own.items() if self._config.allows(name.removesuffix(".weight"))]
        for name, place in sorted(self._places.items(), key=lambda each: each[0] in self._elsewhere):
            if found := _MIXTURE.fullmatch(name):
                mixture = place.mixture if isinstance(place, ExpertPlace | StackedPlace) else None
                here = self._mixtures.setdefault(found["mixture"], mixture)
                if here is not mixture and isinstance(place, ExpertPlace) and here is not None:  # another rank's expert
                    self._places[name] = ExpertPlace(here, place.expert, place.part)
                    self._elsewhere.remove(name)
                elif name in self._elsewhere:
                    self._elsewhere.add(found["mixture"])
        if not any(self._places.values()):
            raise ModelLoadError("enable_lora: no layer of this model takes adapters")
        self.layers.weights_are_loaded(
            {id(stack) for place in self._held if place is not None for stack in place.stacks}
        )

    def reserved_bytes(self) -> int:
        """Maximum bytes of adapters, all slots filled at the maximum rank, counted as weights in the memory profile."""
        of_ranks = self._config.slot_bytes(sum(place.local_elements for place in self._held if place is not None))
        rows = ((*each.shape, each.has_bias) for each in self.layers.saved.values())
        return of_ranks + self._config.saved_bytes(sum(outputs * (inputs + bias) for outputs, inputs, bias in rows))

    def steps_so_far(self) -> Callable[[], None]:
        return self._storage.steps_so_far()

    def load(self, slot: int, adapter: AdapterRef, wait: Callable[[], None] = nothing_runs) -> None:
        """Replace a slot's adapter. wait: waits for the steps that may have rows of the old one. Raises ModelLoadError
        naming file and tensor, and leaves the slot empty."""
        wait()
        for stack, _ in self.layers.stacks:
            self._storage.clear(stack, slot)
        for matrices in self.layers.in_torch:
            matrices.clear(slot)
        directory = Path(adapter.path)
        if scaled_digest(content_digest(directory), adapter.scale) != adapter.digest:
            raise ModelLoadError(f"{directory} has changed since it was named: name it anew")
        config, path = read_config(directory), weight_file(directory)
        try:
            of_gguf = path.suffix == GGUF_SUFFIX
            read = (
                read_gguf_matrices(path, self._heads)
                if of_gguf
                else read_matrices(path, self._check_base, config.saved)
            )
            for target in config.target_modules or ():
                if not any(_bare(module).endswith(target) for module in read):
                    raise ModelLoadError(f"target_modules names {shown(target)}, of which the file has no tensors")
            heads = [module for module in read if not read[module].keys().isdisjoint((WHOLE, BIAS))]
            saved = self._saved({module: read.pop(module) for module in heads}, config)
            found = self._placed(read, config)
            for own, whole in saved:
                own.load(slot, whole)
            for key, (place, pair) in found.items():
                if place is None:
                    continue
                scale = adapter.scale * config.scale_of(key)
                a, b = (pair[name] for name in place.names)
                place.load(self._storage, slot, a, b, scale)
        except ModelLoadError as error:
            message = error.message if str(directory) in error.message else f"{path}: {error.message}"
            raise ModelLoadError(message) from None

    def _placed(self, matrices: Matrices, config: PeftConfig) -> dict[str, Placed]:
        found: dict[str, Placed] = {}
        taken: dict[object, str] = {}
        used = {module: pair for module, pair in matrices.items() if not self._is_surplus(module)}
        if matrices and not used:
            raise ModelLoadError("its tensors are all of heads that this model lacks")
        for module, pair in used.items():
            name, place, key = self._stacked(module, config) or (*self._place(module), _bare(module))
            if config.targets_parameter(f"{key}.weight"):
                key += ".weight"
            for each in (name, *_experts_of(place)):
                if each in taken:
                    raise ModelLoadError(f"the modules {shown(taken[each])} and {shown(module)} are one")
                taken[each] = module
            if isinstance(place, StackedPlace) and "A" in pair:
                place = place.fitting(pair["A"], config.rank_of(key))
            _check(module, key, pair, place, config)
            if not self._config.allows(key.removesuffix(".weight")):
                raise ModelLoadError(
                    f"tensor {shown(module)} changes a module that lora_target_modules leaves out: "
                    f"{', '.join(self._config.target_modules or ())} may be changed"
                )
            is_elsewhere = not self._elsewhere.isdisjoint((name, name.rpartition(".")[0]))
            found[key] = (None if is_elsewhere else place, pair)
        for target in config.target_parameters:
            if not any(f".{key}".endswith(f".{target}") for key in found):
                raise ModelLoadError(f"target_parameters names {shown(target)}, of which the file has no tensors")
        return found

    def _place(self, module: str) -> tuple[str, AdapterPlace]:
        for own in self._possible_names(_bare(module)):
            name = f"{own}.weight"
            if name not in self._places:
                continue
            place = self._places[name]
            if place is None:
                raise ModelLoadError(f"tensor {shown(module)}: adapters of this module are not supported")
            return name, place
        raise ModelLoadError(f"tensor {shown(module)} does not belong to this model")

    def _is_surplus(self, module: str) -> bool:
        assert self._names is not None, "the model is loaded before adapters"
        names = [f"{name}.weight" for name in self._possible_names(_bare(module))]
        is_known = not self._places.keys().isdisjoint(names)
        return self._ignores_surplus and not is_known and self._names.surplus.search(names[0]) is not None

    def _saved(
        self, modules: Matrices, config: PeftConfig
    ) -> list[tuple[SavedHead, tuple[torch.Tensor, torch.Tensor | None]]]:
        """Targets, matrices and biases of whole layers."""
        found = {}
        for module, pair in modules.items():
            name = next((each for each in self._possible_names(_bare(module)) if each in self.layers.saved), "")
            own, matrix, bias = self.layers.saved.get(name), pair.get(WHOLE), pair.get(BIAS)
            if own is None or not any(map(self._config.allows, name.split("."))):
                why = "this model does not take" if own is None else "lora_target_modules leaves out"
                raise ModelLoadError(f"tensor {shown(module)} is a whole head, which {why}")
            if not pair.keys() <= {WHOLE, BIAS}:
                raise ModelLoadError(f"tensor {shown(module)} is a whole head, and has matrices of low rank too")
            if name in found:
                raise ModelLoadError(f"tensor {shown(module)} occurs twice")
            if bias is not None and not own.has_bias:
                raise ModelLoadError(f"tensor {shown(f'{module}.bias')}: biases are not the base head's")
            if matrix is None or (own.has_bias and bias is None):
                missing = f"{module}.weight" if matrix is None else f"{module}.bias"
                raise ModelLoadError(f"tensor {shown(missing)} is missing")
            for each, wanted in ((matrix, own.shape), (bias, own.shape[:1])):
                if each is not None and tuple(each.shape) != wanted:
                    raise ModelLoadError(
                        f"tensor {shown(module)} has shape {list(each.shape)}, where the base's labels ask for "
                        f"{list(wanted)}: num_labels or id2label of its config.json must be those of the adapter"
                    )
            found[name] = (own, (matrix, bias))
        if config.saved and not found:
            raise ModelLoadError(f"modules_to_save names {shown(config.saved[0])}, of which the file has no tensors")
        for module in config.saved:
            parts = [name for name in self.layers.saved if _is_within(name, (module,))]
            for name in parts if any(name in found for name in parts) else ():
                if name not in found:
                    raise ModelLoadError(f"tensor {shown(f'{name}.weight')} is missing")
        return list(found.values())

    def _stacked(self, module: str, config: PeftConfig) -> tuple[str, AdapterPlace, str] | None:
        """Name, target and PEFT's name of a parameter with all experts; None for other modules. PEFT wraps a module for
        each, the first innermost."""
        bare, depth = _bare(module), 0
        while bare.endswith(_WRAPPED):
            bare, depth = bare.removesuffix(_WRAPPED), depth + 1
        own = next((name for name in self._possible_names(bare) if name in self._mixtures), None)
        if own is None:
            return None
        mixture = self._mixtures[own]
        if mixture is None:
            raise ModelLoadError(f"tensor {shown(module)}: adapters of this module are not supported")
        targets = [name for name in STACKED if config.targets_parameter(f"{bare}.{name}")]
        if depth >= len(targets):
            raise ModelLoadError(
                f"tensor {shown(module)}: target_parameters of {config.path.name} names {len(targets)} of its "
                f"parameters {' and '.join(STACKED)}, too few for it"
            )
        matrix = targets[-1 - depth]
        places = (self._places.get(f"{own}.{matrix}"), StackedPlace(mixture, matrix, alternates=False))
        place = next(each for each in places if isinstance(each, StackedPlace))
        return f"{own}.{matrix}", place, f"{bare}.{matrix}"

    def _possible_names(self, bare: str) -> list[str]:
        assert self._names is not None, "the model is loaded before adapters"
        inner = _INNER.sub("model.", bare, count=1) if _INNER.match(bare) else bare
        names = list(dict.fromkeys((bare, inner, f"model.{bare}", self._names.base + bare)))
        return names + [name.replace(*_OLDER_NAMES) for name in names if _OLDER_NAMES[0] in name]

    def _check_base(self, module: str, tensor: torch.Tensor | FileTensor) -> None:
        """Raise ModelLoadError unless `tensor` is the base's embedding or head, as PEFT saves it too."""
        tensor_name = shown(f"{module}.base_layer.weight")
        name, place = self._place(module)
        embedding = next((each for each, found in self._places.items() if isinstance(found, TablePlace)), name)
        if not isinstance(place, TablePlace) and name != HEAD:
            raise ModelLoadError(f"tensor {tensor_name}: it holds a tensor of the base")
        assert self._names is not None, "the model is loaded before adapters"
        prefix, is_tied = self._names.base, self._names.surplus.search(name) is not None
        for found, own in () if self._base is None else self._base():
            if (embedding if is_tied else name) in (found, prefix + found):
                if tuple(own.shape) == tuple(tensor.shape) and _are_equal(own, tensor):
                    return
                raise ModelLoadError(f"tensor {tensor_name} is not the base's own")
        raise ModelLoadError(f"tensor {tensor_name} cannot be compared with this base's")


def _experts_of(place: AdapterPlace) -> list[object]:
    if isinstance(place, ExpertPlace):
        return [(place.mixture, place.expert, place.part)]
    return place.covered() if isinstance(place, StackedPlace) else []


def _are_equal(own: torch.Tensor | FileTensor, other: torch.Tensor | FileTensor) -> bool:
    for start in range(0, own.shape[0], COMPARED_ROWS):
        count = min(COMPARED_ROWS, own.shape[0] - start)
        if not torch.equal(*(each.narrow(0, start, count).to(other.dtype) for each in (own, other))):
            return False
    return True


def _is_within(module: str, names: Collection[str]) -> bool:
    return not set(names).isdisjoint(module.split("."))


def _bare(module: str) -> str:
    return _PREFIX.sub("", module, count=1) if _PREFIX.match(module) else module


def read_matrices(
    path: Path,
    check_base: Callable[[str, torch.Tensor | FileTensor], None] | None = None,
    saved: Collection[str] = (),
) -> Matrices:
    """Read all pairs of A and B from an adapter's weight file. check_base: called with module and tensor of the base.
    saved: modules that may be whole. Raises ModelLoadError for other tensors and incomplete pairs."""
    matrices: Matrices = {}
    source = read_safetensors(path, BytesRead()) if path.suffix == ".safetensors" else read_torch(path)
    for name, stored in source:
        of_base = _BASE.fullmatch(name)
        if of_base is not None and check_base is not None:
            check_base(of_base["module"], stored)
            continue
        tensor = stored.read() if isinstance(stored, FileTensor) else stored
        match, whole = _TENSOR.fullmatch(name), _WHOLE.fullmatch(_COPY.sub("", name))
        is_whole = match is None and whole is not None and _is_within(whole["module"], saved)
        match = whole if is_whole else match
        if match is None:
            why = next((why for part, why in KNOWN_PARTS.items() if part in name), "it is no matrix of an adapter")
            raise ModelLoadError(f"tensor {shown(name)}: {why}")
        pair = matrices.setdefault(match["module"], {})
        part = WHOLE if match["part"] == "weight" else match["part"]
        if part in pair:
            raise ModelLoadError(f"tensor {shown(name)} occurs twice")
        kind, dim = ("vector", 1) if part == BIAS else ("matrix", 2)
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or tensor.dim() != dim:
            raise ModelLoadError(
                f"tensor {shown(name)} is {tensor.dtype} {list(tensor.shape)}, not a {kind} of floating-point numbers"
            )
        if not bool(tensor.isfinite().all()):
            raise ModelLoadError(f"tensor {shown(name)} holds infinite numbers or NaN")
        pair[part] = tensor
    for module, pair in matrices.items():
        if pair.keys() <= {WHOLE, BIAS}:
            continue
        names = (EMBEDDING_NAMES, MATRIX_NAMES)[pair.keys().isdisjoint(EMBEDDING_NAMES)]
        for part in names:
            if part not in pair:
                raise ModelLoadError(f"tensor {_shown(module, part)} is missing")
    if not matrices:
        raise ModelLoadError("it holds no tensors")
    return matrices


def _shown(module: str, part: str) -> str:
    return shown(f"{module}.lora_{part}" + (".weight" if part in MATRIX_NAMES else ""))


def _check(module: str, key: str, pair: dict[str, torch.Tensor], place: AdapterPlace, config: PeftConfig) -> None:
    """key: PEFT's name of module or parameter."""
    rank = config.rank_of(key)
    if pair.keys() != set(place.names):
        own = " and ".join(f"lora_{part}" for part in place.names)
        raise ModelLoadError(f"tensor {_shown(module, min(pair))}: this module's matrices are {own}")
    for part, wanted in zip(place.names, place.shapes(rank), strict=True):
        if tuple(pair[part].shape) != wanted:
            raise ModelLoadError(
                f"tensor {_shown(module, part)} has shape {list(pair[part].shape)}, where the model "
                f"and rank {rank} of {config.path.name} ask for {list(wanted)}"
            )
