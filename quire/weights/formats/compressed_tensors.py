"""compressed-tensors, as llm-compressor and many publishers write it.

`config_groups` have the bits of the modules that their `targets` match: a class ("Linear"), a name or a
pattern. The tensors of a module tell the rest:

    pack-quantized    weight_packed i32 [out, ceil(in * bits / 32)], a stream along the inputs
                      weight_scale [out, groups], weight_shape, weight_g_idx
                      weight_zero_point i32 [ceil(out * bits / 32), groups], a stream along the outputs
    int-quantized     weight i8 [out, in], weight_scale [out, 1], weight_zero_point i8
    float-quantized   weight f8, weight_scale: see floats8.py; mxfp8 has scales u8
    *-pack-quantized  of nvfp4 and mxfp4: weight_packed u8, weight_scale, weight_global_scale: see fp4.py

W = weight_scale * (q - zero); a missing zero is 2^(bits - 1) of packed integers, and 0 of others.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.errors import ConfigError, quoted
from quire.weights.formats.floats8 import TABLES, block_of, float8_weight
from quire.weights.formats.fp4 import mxfp4_weight, nvfp4_weight
from quire.weights.formats.names import ModuleNames
from quire.weights.formats.packed import integer_weight, packed_weight
from quire.weights.formats.raw import BETTER, QuantizedWeight, RawTensors, Reading
from quire.weights.formats.settings import Settings
from quire.weights.formats.unused import notes_on, unused_scales

_PACKED, _SCALE = ".weight_packed", ".weight_scale"
_READ = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_CLASSES = ("Linear", "Embedding", "LinearBase", "FusedMoE", "MoEGMM")


def read_compressed_tensors(settings: Settings, raw: RawTensors) -> Reading:
    """Read every module that has packed weights, or weights with scales."""
    _refuse(settings)
    groups = Groups(settings)
    weights = tuple(_weights(groups, raw))
    unused = unused_scales(raw)
    rounded = any(weight.storage.integers for weight in weights)
    notes = notes_on(unused, settings.get("kv_cache_scheme"), rounded)
    dense = settings.get("format", default="dense") == "dense"
    return Reading("" if dense and not weights else "compressed-tensors", weights, notes, unused)


def _refuse(settings: Settings) -> None:
    """Raise ConfigError for what would change the meaning of weights, and is not supported."""
    format = settings.get("format", default="dense")
    if format not in _READ:
        raise ConfigError(f"the compressed-tensors format {quoted(format)} is not supported", BETTER)
    if settings.get("transform_config"):
        what = "quantization_config.transform_config rotates weights and activations, which is not supported"
        raise ConfigError(what, BETTER)
    sparsity = settings.inner("sparsity_config")
    if sparsity is not None and sparsity.get("format", default="dense") != "dense":
        what = f"sparse weights ({quoted(sparsity.get('format'))}) are not supported"
        raise ConfigError(f"quantization_config.sparsity_config: {what}", BETTER)


class Groups:
    """The groups of `config_groups`, found by the name of a module."""

    def __init__(self, settings: Settings) -> None:
        found = settings.inner("config_groups")
        self._groups: list[tuple[ModuleNames, Settings]] = []
        for name in found.values if found else ():
            group = found.inner(name) if found else None
            if group is not None:
                self._groups.append((ModuleNames(group.names("targets")), group))

    def of(self, raw: RawTensors, module: str, tensor: str) -> Settings:
        """Return the group of a module: by name or pattern, else by class. Raises ConfigError."""
        for targets, group in self._groups:
            if module in targets:
                return group
        by_class = [group for targets, group in self._groups if targets.exact.intersection(_CLASSES)]
        if not by_class:
            raise raw.fault(tensor, "is quantized, but no group of quantization_config targets its module")
        return by_class[0]


def _weights(groups: Groups, raw: RawTensors) -> Iterator[QuantizedWeight]:
    for module in raw.modules(_PACKED):
        group = groups.of(raw, module, module + _PACKED)
        yield _packed(raw, module, group)
    for module in raw.modules(_SCALE):
        if module + _PACKED not in raw:
            group = groups.of(raw, module, module + _SCALE)
            yield _unpacked(raw, module, group)


def _packed(raw: RawTensors, module: str, group: Settings) -> QuantizedWeight:
    weights = _scheme(group)
    name, packed, scale = module + ".weight", module + _PACKED, module + _SCALE
    if raw.need(packed).dtype == "I32":
        weights.one_of("type", "int", default="int")
        return packed_weight(raw, module, weights)
    weights.one_of("type", "float")
    weights.one_of("num_bits", 4)
    if raw.need(scale).dtype == "U8" and module + ".weight_global_scale" not in raw:
        return mxfp4_weight(raw, name, packed, scale)
    return nvfp4_weight(raw, name, packed, scale, module + ".weight_global_scale", "over")


def _unpacked(raw: RawTensors, module: str, group: Settings) -> QuantizedWeight:
    weights, name = _scheme(group), module + ".weight"
    entry = raw.need(name)
    if entry.dtype in TABLES:
        weights.one_of("type", "float")
        block = _block(weights)
        single = weights.get("strategy", default="tensor") == "tensor"
        return float8_weight(raw, "fp8", name, module + _SCALE, block, single=single)
    if entry.dtype == "I8":
        weights.one_of("type", "int", default="int")
        return integer_weight(raw, module, weights, _rounds_activations(group))
    what = (
        f"is stored as {entry.dtype} beside its scale: weights that are still to be rounded are not supported"
    )
    raise raw.fault(name, what, "compress the model: save it with save_compressed=True")


def _scheme(group: Settings) -> Settings:
    """Return the `weights` of a group. Raises ConfigError if it has none."""
    weights = group.inner("weights")
    if weights is None:
        raise group.fault("weights", None)
    return weights


def _block(weights: Settings) -> tuple[int, int] | None:
    shape = weights.get("block_structure")
    return block_of(Settings({"weight_block_size": shape}, weights.where)) if shape else None


def _rounds_activations(group: Settings) -> bool:
    """Return True if a group rounds activations to int8. Raises ConfigError for fewer bits."""
    activations = group.inner("input_activations")
    if activations is None:
        return False
    activations.one_of("num_bits", 8)
    return True
