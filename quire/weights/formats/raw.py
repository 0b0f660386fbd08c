"""The raw tensors of a quantized checkpoint, and what a reader makes of them.

A reader sees headers, checks them against each other and against `quantization_config`, and gives a
QuantizedWeight for every group of tensors that are one matrix. Data is read when a weight is pulled, except
for small tensors without which its storage kind is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from quire.errors import ConfigError, quoted, shortened
from quire.quantize.coded import Coded, CodedStorage
from quire.quantize.kinds import Array
from quire.quantize.scales import Scales
from quire.weights.formats.bits import group_order
from quire.weights.safetensors import Checkpoint, TensorEntry

WEIGHT = ".weight"
SCALES = {
    "F16": "f16",
    "BF16": "bf16",
    "F32": "f32",
}  # number formats of scales, as files name them and as kinds do
BETTER = "take another version of the model: unquantized, or in a format that docs/formats.md lists"


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix of several tensors: [..., out, in], in whichever order the file has them.

    `parts` are the names of its tensors, of `nbytes` together; `read` gives their data.
    """

    name: str
    shape: tuple[int, ...]
    storage: CodedStorage
    parts: tuple[str, ...]
    nbytes: int
    place: str
    read: Callable[[], Coded]


@dataclass(frozen=True, slots=True)
class Reading:
    """The findings of a reader: `summary` names the format; `notes` say what of the file is not used.

    `unused` are tensors that no weight needs: scales of activations or of a KV cache.
    """

    summary: str
    weights: tuple[QuantizedWeight, ...]
    notes: tuple[str, ...] = ()
    unused: frozenset[str] = field(default=frozenset())


class RawTensors:
    """The tensors of a checkpoint by name, as stored, with errors that name the file."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    @property
    def where(self) -> str:
        """The path of the checkpoint."""
        return self._checkpoint.where

    def modules(self, suffix: str) -> Iterator[str]:
        """Yield the names of modules that have a tensor with this suffix."""
        return (name.removesuffix(suffix) for name in self._checkpoint if name.endswith(suffix))

    def need(self, name: str, *dtypes: str, dims: int | None = None) -> TensorEntry:
        """Return the header of a tensor, in one of these number formats if any are given.

        Raises ConfigError for a missing tensor, other formats and another number of dimensions.
        """
        if name not in self._checkpoint:
            raise self.fault(name, "is missing, though others of its module are here")
        entry = self._checkpoint[name]
        if dtypes and entry.dtype not in dtypes:
            raise self.fault(name, f"is stored as {entry.dtype}, not as {' or '.join(dtypes)}")
        if dims is not None and len(entry.shape) != dims:
            raise self.fault(name, f"has shape {list(entry.shape)}, not {dims} dimensions")
        return entry

    def need_shape(self, name: str, *shapes: tuple[int, ...]) -> TensorEntry:
        """Return the header of a tensor of one of these shapes. Raises ConfigError."""
        entry = self.need(name)
        if entry.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise self.fault(name, f"has shape {list(entry.shape)}, expected {expected}")
        return entry

    def read(self, name: str) -> Array:
        """Return the data of a tensor as stored: floats of 8 bits as uint8."""
        return self._checkpoint.raw(name)

    def order(self, name: str, group: int) -> Array | None:
        """Return the inputs sorted by the groups in a tensor (see `group_order`). Raises ConfigError."""
        self.need(name, "I32", "I64", dims=1)
        try:
            return group_order(self.read(name), group)
        except ValueError as error:
            raise self.fault(name, str(error)) from None

    def weight(
        self,
        module: str,
        shape: tuple[int, ...],
        storage: CodedStorage,
        parts: tuple[str, ...],
        read: Callable[[], Coded],
        name: str | None = None,
    ) -> QuantizedWeight:
        """Return the weight of a module, made of the tensors `parts`; named MODULE.weight unless told."""
        entries = [self._checkpoint[part] for part in parts]
        size = sum(entry.nbytes for entry in entries)
        return QuantizedWeight(
            module + WEIGHT if name is None else name, shape, storage, parts, size, entries[0].place, read
        )

    def fault(self, name: str, what: str, hint: str | None = None) -> ConfigError:
        """Return an error about one tensor."""
        hint = hint or "the weights and quantization_config belong to different models, or a file is damaged"
        return ConfigError(f"{self.where}: tensor {quoted(shortened(name, 200))} {what}", hint)


def coded(
    storage: CodedStorage,
    width: int,
    packed: Array,
    scales: Scales,
    *,
    minimums: Scales | None = None,
    zeros: Array | None = None,
    order: Array | None = None,
) -> Coded:
    """Return the weight of a storage kind that has these arrays."""
    return Coded(
        storage.kind,
        packed,
        storage.bits,
        width,
        storage.table,
        storage.group,
        scales,
        minimums,
        zeros,
        order,
        storage.by_row,
    )
