"""Adapters (LoRA) as PEFT writes them: adapter_config.json and adapter_model.safetensors of one folder.

Format (https://huggingface.co/docs/peft): tensors `base_model.model.MODULE.lora_A.weight` [rank, in] and
`...lora_B.weight` [out, rank]; the configuration has the rank and alpha of modules, for the scale of their
products. What is not a low-rank addition to products is refused by name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ConfigError, quoted
from quire.json_file import read_json
from quire.program.passes import module_of
from quire.program.program import LowRank, WeightSpec
from quire.quantize.kinds import DTYPES, Array, to_float32
from quire.regular_file import present, read_limited
from quire.weights.renamed import LAYOUTS, renamed
from quire.weights.safetensors import TensorEntry, read_header

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"

_WIDEST, _HEADER_BYTES = 4, 16 << 20  # of a number, and of the header of a file
_CONFIG_LIMIT_BYTES, _CONFIG_VALUES = 1 << 20, 1 << 14
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora_[AB])\.weight")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_PATTERN = re.compile(r"\^?[A-Za-z0-9_.]+")
_PICKLE = "adapter_model.bin"
# Fields that change what an adapter computes, beyond rank and scale: refused unless empty or false.
_UNSUPPORTED = {
    "use_dora": "DoRA, which also rescales the weights",
    "lora_bias": "biases of its own",
    "use_qalora": "QALoRA",
    "modules_to_save": "whole modules that replace those of the model",
    "target_parameters": "parameters that are not modules, such as those of experts",
    "trainable_token_indices": "new embeddings of tokens",
    "layer_replication": "layers that are repeated",
    "alora_invocation_tokens": "an activation by tokens",
    "arrow_config": "routing among adapters",
}
_CHANGES_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations, by their beginnings


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter that was read: its parts by the names of weights, and a digest of its files."""

    parts: Mapping[str, LowRank]
    digest: str
    rank: int  # the largest
    modules: tuple[str, ...]  # the last parts of their names: "q_proj"

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


def read_adapter(folder: Path, inside: Path, weights: Iterable[WeightSpec], max_rank: int) -> AdapterWeights:
    """Read the adapter in a folder, for the weights that adapters may add to.

    Its files must lie in `inside`, wherever links lead. Raises ConfigError for anything that is not
    supported, does not fit the model or is damaged.
    """
    paths = [_own_file(folder, inside, name) for name in (CONFIG_NAME, WEIGHTS_NAME)]
    specs = list(weights)
    config = _Config.read(paths[0], max_rank)
    tensors = _Tensors.read(paths[1], _WIDEST * max_rank * sum(sum(spec.shape) for spec in specs))
    modules = _modules(tensors, config)
    places = _places(tensors.where, modules, specs)
    parts: dict[str, LowRank] = {}
    for module, own in modules.items():
        low_rank = _low_rank(tensors, module, own, config)
        for spec in places[module]:
            parts[spec.name] = _fitted(low_rank, spec, f"{tensors.where}: {quoted(module)}")
    digest = hashlib.sha256(repr(config).encode())
    digest.update(tensors.data)
    rank = max(len(part.down) for part in parts.values())
    return AdapterWeights(parts, digest.hexdigest()[:16], rank, tuple(sorted({_last(m) for m in modules})))


def stored_bytes(folder: Path) -> int:
    """Return the size of the weights of all adapters in a folder, as far as they can be seen."""
    sizes = 0
    for name in found_in(folder):
        with suppress(OSError):
            sizes += (folder / name / WEIGHTS_NAME).stat().st_size
    return sizes


def found_in(folder: Path) -> list[str]:
    """Return the names of the sub-folders with adapters. Raises ConfigError if there is no such folder."""
    try:
        entries = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ConfigError(f"adapter_dir {str(folder)!r} cannot be read: {error.strerror}") from error
    return [name for name in entries if name[0] != "." and present(folder / name / CONFIG_NAME)]


@dataclass(frozen=True, slots=True)
class _Tensors:
    """A file of tensors in memory: it may be replaced or shortened at any time."""

    where: str
    entries: Mapping[str, TensorEntry]
    data: bytes

    @classmethod
    def read(cls, path: Path, limit_bytes: int) -> _Tensors:
        entries = read_header(path)
        data = read_limited(path, limit_bytes + _HEADER_BYTES)
        if len(data) != max((entry.offset + entry.nbytes for entry in entries.values()), default=len(data)):
            raise ConfigError(f"{path}: has changed while it was read", "load the adapter again")
        return cls(str(path), entries, data)

    def array(self, name: str) -> Array:
        """Return a matrix. Raises ConfigError unless all its numbers are finite, in a supported format."""
        entry = self.entries[name]
        dtype = DTYPES[entry.storage.kind]
        flat = np.frombuffer(self.data, dtype, math.prod(entry.shape), entry.offset)
        array = np.require(flat, requirements="A").reshape(entry.shape)
        if not np.isfinite(to_float32(array)).all():
            raise ConfigError(f"{self.where}: tensor {quoted(name)} has numbers that are not finite")
        return array


def _own_file(folder: Path, inside: Path, name: str) -> Path:
    """Return the place of a file after all links. Raises ConfigError if it is missing or elsewhere."""
    path = folder / name
    if not present(path):
        hint = None
        if name == WEIGHTS_NAME and present(folder / _PICKLE):
            hint = f"{_PICKLE} is a pickle, which can run any code: save the adapter as safetensors"
        raise ConfigError(f"{path}: no such file", hint)
    found = path.resolve()
    if not found.is_relative_to(inside.resolve()):
        raise ConfigError(f"{path}: leads out of {inside}", "copy the adapter into the folder")
    return found


@dataclass(frozen=True, slots=True)
class _Config:
    """The ranks and scales that adapter_config.json states. Its representation is part of a digest."""

    where: str = field(repr=False)
    rank: int
    alpha: float
    by_root: bool  # alpha / sqrt(rank): Kalajdzievski, arXiv:2312.03732
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: tuple[str, ...] | None  # None: any
    layers: frozenset[int] | None

    @classmethod
    def read(cls, path: Path, max_rank: int) -> _Config:
        raw, where = read_json(path, _CONFIG_LIMIT_BYTES, _CONFIG_VALUES), str(path)
        if raw.get("peft_type") != "LORA":
            what = f"peft_type = {quoted(raw.get('peft_type'))}"
            raise ConfigError(f"{where}: {what} is not supported", "only LoRA adapters are")
        _check_supported(raw, where)
        ranks = _patterns(raw, "rank_pattern", where)
        rank = _rank(raw.get("r"), f"{where}: r", max_rank)
        return cls(
            where=where,
            rank=rank,
            alpha=_number(raw.get("lora_alpha"), f"{where}: lora_alpha"),
            by_root=raw.get("use_rslora") is True,
            ranks={key: _rank(value, f"{where}: rank_pattern", max_rank) for key, value in ranks.items()},
            alphas={
                key: _number(value, f"{where}: alpha_pattern")
                for key, value in _patterns(raw, "alpha_pattern", where).items()
            },
            targets=_targets(raw.get("target_modules"), where),
            layers=_layers(raw.get("layers_to_transform"), where),
        )

    def rank_of(self, module: str) -> int:
        return next((rank for key, rank in self.ranks.items() if _matches(key, module)), self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = next((alpha for key, alpha in self.alphas.items() if _matches(key, module)), self.alpha)
        return alpha / math.sqrt(rank) if self.by_root else alpha / rank

    def check(self, module: str) -> None:
        """Raise ConfigError for a module that this configuration does not target."""
        layer = _LAYER.search(module)
        outside = self.layers is not None and layer is not None and int(layer[1]) not in self.layers
        named = self.targets is None or any(module == t or module.endswith(f".{t}") for t in self.targets)
        if outside or not named:
            raise ConfigError(f"{self.where}: does not target {quoted(module)}, which has weights")


def _check_supported(raw: Mapping[str, Any], where: str) -> None:
    for name, what in _UNSUPPORTED.items():
        if raw.get(name):
            raise ConfigError(f"{where}: {name}: adapters with {what} are not supported", "train it without")
    if raw.get("bias", "none") != "none":
        problem = f"bias = {quoted(raw['bias'])}: adapters with biases are not supported"
        raise ConfigError(f"{where}: {problem}", "train it with bias='none'")
    start = str(raw.get("init_lora_weights", "")).lower()
    if start.startswith(_CHANGES_MODEL):
        hint = "save it with path_initial_model_for_weight_conversion, which makes a plain adapter of it"
        raise ConfigError(f"{where}: init_lora_weights = {quoted(start)} changes the model's weights", hint)


def _patterns(raw: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """Return a dict by module. Its keys are names, whole or their ends: no expressions are evaluated."""
    found = raw.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: {name} is not an object")
    for key in found:
        if not _PATTERN.fullmatch(key):
            raise ConfigError(f"{where}: {name}: {quoted(key)} is not the name of modules")
    return found


def _matches(key: str, module: str) -> bool:
    """Return True if a key of a pattern means this module, as PEFT matches them."""
    return module == key.removeprefix("^") or (key[0] != "^" and module.endswith(f".{key}"))


def _rank(value: Any, what: str, most: int) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{what} = {quoted(value)} is not a rank")
    if value > most:
        raise ConfigError(f"{what} = {value:,} is more than max_lora_rank = {most}", "raise max_lora_rank")
    return value


def _number(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 1e6:
        raise ConfigError(f"{what} = {quoted(value)} is not a number from -1e6 to 1e6")
    return float(value)


def _targets(value: Any, where: str) -> tuple[str, ...] | None:
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    if value is None or isinstance(value, str):  # an expression, or "all-linear": its tensors tell the rest
        return None
    raise ConfigError(f"{where}: target_modules is neither text nor a list of names")


def _layers(value: Any, where: str) -> frozenset[int] | None:
    if value is None:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(type(layer) is int for layer in layers):
        raise ConfigError(f"{where}: layers_to_transform is not a number or a list of them")
    return frozenset(layers)


def _modules(tensors: _Tensors, config: _Config) -> dict[str, dict[str, str]]:
    """Return the names of the two tensors of each module, "lora_A" and "lora_B"."""
    found: dict[str, dict[str, str]] = {}
    for name in tensors.entries:
        match = _TENSOR.fullmatch(name)
        if match is None:
            problem = f"tensor {quoted(name)} is not a lora_A or lora_B weight of a linear module"
            raise ConfigError(f"{tensors.where}: {problem}", "only LoRA of linear modules is supported")
        own = found.setdefault(match[1], {})
        if match[2] in own:
            raise ConfigError(f"{tensors.where}: {quoted(match[1])} has two tensors {match[2]}")
        own[match[2]] = name
    if not found:
        raise ConfigError(f"{tensors.where}: has no tensors")
    for module, own in found.items():
        if len(own) != 2:
            raise ConfigError(f"{tensors.where}: {quoted(module)} has {next(iter(own))} only")
        config.check(module)
    return found


def _places(
    where: str, modules: Iterable[str], weights: Iterable[WeightSpec]
) -> Mapping[str, Sequence[WeightSpec]]:
    """Return the weights of the program that each module is, under its name there or in a composite."""
    by_module: dict[str, list[WeightSpec]] = {}
    for spec in weights:
        if (module := module_of(spec)) is not None:
            by_module.setdefault(module, []).append(spec)
    found: dict[str, Sequence[WeightSpec]] = {}
    for name in modules:
        names = [name, *(renamed(name, layout) for layout in LAYOUTS)]
        own = next((by_module[other] for other in names if other in by_module), None)
        if own is None:
            hint = "experts, embeddings, tied heads and absorbed projections take no adapters"
            raise ConfigError(f"{where}: {quoted(name)} is no linear module that takes adapters", hint)
        found[name] = own
    return found


def _low_rank(tensors: _Tensors, module: str, own: Mapping[str, str], config: _Config) -> LowRank:
    down, up = (tensors.entries[own[part]].shape for part in ("lora_A", "lora_B"))
    rank = config.rank_of(module)
    if len(down) != 2 or len(up) != 2 or down[0] != rank or up[1] != rank:
        problem = f"{quoted(module)} has shapes {list(down)} and {list(up)}, not of rank {rank}"
        raise ConfigError(f"{tensors.where}: {problem}")
    return LowRank(tensors.array(own["lora_A"]), tensors.array(own["lora_B"]), config.scale_of(module))


def _fitted(part: LowRank, spec: WeightSpec, where: str) -> LowRank:
    """Return the outputs that a weight of the program takes of a module, whose shape is checked."""
    up: Array = part.up
    if spec.rows is not None and len(up) % spec.rows.period == 0:
        up = up[spec.rows.of(len(up))]
    if (len(up), part.down.shape[1]) != spec.shape:
        shape = f"[{len(part.up)}, {part.down.shape[1]}]"
        raise ConfigError(f"{where} adds to a matrix {shape}, but the model has {list(spec.shape)}")
    return LowRank(part.down, up, part.scale)


def _last(module: str) -> str:
    return module.rpartition(".")[2]
