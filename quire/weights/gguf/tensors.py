"""The tensors of GGUF files under the names that the model gives them, in the form it needs.

What the files store otherwise is undone on the blocks of a tensor, whose rows move whole: nothing is lost.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from quire.errors import ConfigError, quoted
from quire.quantize.coded import Coded
from quire.quantize.kinds import DTYPES, Array, Dense, FloatStorage, Storage, StoredWeight
from quire.weights.gguf.architectures import Architecture
from quire.weights.gguf.blocks import CODINGS, read_blocks
from quire.weights.gguf.changes import PLAIN, Alteration
from quire.weights.gguf.container import GgufFile, TensorHeader
from quire.weights.gguf.names import Naming, Sizes, naming_of
from quire.weights.tensors import Tensors

_FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_LARGE_BYTES = 1 << 20  # of blocks, read by several threads
_USED_FOR_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the model, made of one of a file, of an expert in it, or of the rows of several.

    The rows of several follow each other, or alternate. `change` is how the file has it otherwise.
    """

    parts: tuple[TensorHeader, ...]
    expert: int | None = None
    change: Alteration = PLAIN
    alternating: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the model's world: floats may be transposed there, codes are always [..., out, in]."""
        shape = self.parts[0].shape if self.expert is None else self.parts[0].shape[1:]
        if len(self.parts) > 1 and self.change.form != "frames":
            axis = len(shape) - (2 if self._is_matrix else 1)
            shape = (*shape[:axis], shape[axis] * len(self.parts), *shape[axis + 1 :])
        if self.change.transposed and self.storage.is_float:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return self.change.shaped(shape)

    @property
    def nbytes(self) -> int:
        total = sum(part.nbytes for part in self.parts)
        return total if self.expert is None else total // self.parts[0].shape[0]

    @property
    def place(self) -> str:
        """The name of the file."""
        return self.parts[0].file.path.name

    @property
    def storage(self) -> Storage:
        """The storage kind. Raises ConfigError for unsupported types."""
        kinds = {part.type.name for part in self.parts}
        for part in self.parts:
            if part.type.name not in _FLOATS and part.type.name not in CODINGS:
                raise ConfigError(
                    f"{part.file.path}: tensor {quoted(part.name)} has the type {part.type.name}, "
                    "which is not supported",
                    "take the Q4_K_M file of the same model, or any of Q2_K to Q8_0, IQ4_NL or IQ4_XS",
                )
        if len(kinds) > 1:
            raise ConfigError(f"{self.place}: {quoted(self.parts[0].name)} has another type than its partner")
        (kind,) = kinds
        if kind in _FLOATS:
            return FloatStorage("f32" if self.change.numbers else _FLOATS[kind])
        if self.change.numbers or self.change.form not in ("", "row"):
            raise ConfigError(
                f"{self.place}: {quoted(self.parts[0].name)} has the type {kind}, not one of floats"
            )
        return replace(CODINGS[kind].storage, ordered=self.change.columns is not None)

    @property
    def _is_matrix(self) -> bool:
        return not self.parts[0].name.endswith(".bias")


class GgufTensors(Tensors):
    """The tensors of a model in one or several GGUF files."""

    def __init__(self, where: str, files: tuple[GgufFile, ...], tensors: dict[str, GgufTensor]) -> None:
        self._where, self._files, self._tensors = where, files, tensors

    @classmethod
    def of(
        cls, where: str, files: tuple[GgufFile, ...], architecture: Architecture, sizes: Sizes
    ) -> GgufTensors:
        """Name the tensors of the files of a text model."""
        found: dict[str, GgufTensor] = {}
        for file in files:
            for header in file.tensors.values():
                if header.name not in _USED_FOR_ROPE:
                    for name, tensor in _named(header, naming_of(architecture, sizes, header.name)):
                        _add(found, name, replace(tensor, alternating=architecture.alternating))
        return cls(where, files, found)

    def beside(self, file: GgufFile, tensors: Mapping[str, GgufTensor]) -> GgufTensors:
        """Return these tensors and those of another file of the model."""
        return GgufTensors(self._where, (*self._files, file), {**tensors, **self._tensors})

    @property
    def where(self) -> str:
        return self._where

    @property
    def summary(self) -> str:
        """The types of the weights: "GGUF, 84% Q4_K and 16% Q6_K". What the file says may be wrong."""
        counts: Counter[str] = Counter()
        for file in self._files:
            for tensor in file.tensors.values():
                counts[tensor.type.name] += math.prod(tensor.shape)
        shares = [(name, round(100 * count / counts.total())) for name, count in counts.most_common()]
        *others, last = [f"{share}% {name}" for name, share in shares if share] or ["no weights"]
        return "GGUF, " + (f"{', '.join(others)} and {last}" if others else last.removeprefix("100% "))

    def pull(self, name: str) -> StoredWeight:
        """Return a tensor: codes and scales taken out of its blocks, or a view of the mapped file."""
        tensor = self[name]
        blocks = [_rows(tensor, part) for part in tensor.parts]
        rows = blocks[0] if len(blocks) == 1 else _joined(tensor, blocks)
        if tensor.change.rows is not None:
            rows = rows[tensor.change.rows.of(len(rows))]
        return _floats(tensor, rows) if tensor.storage.is_float else _coded(tensor, rows)

    def prefetch(self, name: str) -> None:
        self._advise(name, mmap.MADV_WILLNEED)

    def release(self, name: str) -> None:
        self._advise(name, mmap.MADV_DONTNEED)

    def _advise(self, name: str, advice: int) -> None:
        tensor = self[name]
        for part in tensor.parts:
            nbytes = tensor.nbytes // len(tensor.parts)
            part.file.advise(part, (tensor.expert or 0) * nbytes, nbytes, advice)

    def identity(self) -> bytes:
        """Return a digest of path, size, modification time and headers of each file."""
        found = hashlib.blake2b(digest_size=20)
        for file in self._files:
            path = file.path.resolve()
            status = path.stat()
            found.update(repr((str(path), status.st_size, status.st_mtime_ns)).encode())
            found.update(hashlib.blake2b(file.data[: file.header_bytes]).digest())
        return found.digest()

    def close(self) -> None:
        """The files stay mapped while their metadata or a tensor is in use."""

    def __getitem__(self, name: str) -> GgufTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _named(header: TensorHeader, naming: Naming | None) -> Iterable[tuple[str, GgufTensor]]:
    """Yield the tensors of the model that one of a file gives: several for a stack of experts."""
    if naming is None:
        yield header.name, GgufTensor((header,))  # named in the error, if the model does not ignore it
        return
    tensor = GgufTensor((header,), change=naming.change)
    rows = header.shape[0] if _is_vector(header, naming.change) else math.prod(header.shape[:-1])
    for what, order, count in (
        ("rows", naming.change.rows, rows),
        ("columns", naming.change.columns, header.shape[-1] if header.shape else 0),
    ):
        if order is not None and not order.fits(count):
            problem = f"has {count} {what}, which do not fit the heads of the model"
            raise ConfigError(f"{header.file.path}: tensor {quoted(header.name)} {problem}")
    if not naming.stacked:
        yield naming.name, tensor
        return
    for expert in range(header.shape[0] if len(header.shape) > 1 else 0):
        yield naming.name.replace("*", str(expert)), replace(tensor, expert=expert)


def _is_vector(header: TensorHeader, change: Alteration) -> bool:
    """Return True for a vector, whose rows are its numbers."""
    return len(header.shape) == 1 or change.form == "vector"


def _add(found: dict[str, GgufTensor], name: str, tensor: GgufTensor) -> None:
    """Add a tensor, or the partner of one whose rows belong to its own: gate first, then up."""
    if name not in found:
        found[name] = tensor
        return
    pair = sorted((*found[name].parts, *tensor.parts), key=lambda part: part.name)
    if len(pair) != 2 or pair[0].name.replace("ffn_gate", "ffn_up") != pair[1].name:
        raise ConfigError(f"{tensor.place}: tensor {quoted(tensor.parts[0].name)} is there twice")
    if pair[0].shape != pair[1].shape:
        raise ConfigError(f"{tensor.place}: {quoted(pair[0].name)} has another shape than its partner")
    found[name] = replace(tensor, parts=tuple(pair))


def _rows(tensor: GgufTensor, part: TensorHeader) -> Array:
    """Return the blocks of a tensor or of one expert in it, uint8 [rows, bytes]; those of a bias in one row.

    Rows of a bias that are to move are numbers.
    """
    blocks = part.file.blocks(part)
    if tensor.expert is not None:
        each = len(blocks) // part.shape[0]
        blocks = blocks[tensor.expert * each : (tensor.expert + 1) * each]
    if tensor.change.rows is not None and _is_vector(part, tensor.change):
        blocks = blocks.reshape(-1, part.type.nbytes)
    return blocks


def _joined(tensor: GgufTensor, parts: list[Array]) -> Array:
    """Return the rows of several tensors; a bias of each expert alternates by number, frames by kernel."""
    if tensor.change.form == "frames":
        kernels = [part.reshape(math.prod(tensor.shape[:2]), -1) for part in parts]
        return np.stack(kernels, axis=1).reshape(-1, parts[0].shape[1])
    if not tensor.alternating:
        return np.concatenate(parts)
    if not tensor.parts[0].name.endswith(".bias"):
        return np.stack(parts, axis=1).reshape(-1, parts[0].shape[1])
    size = tensor.parts[0].type.nbytes
    numbers = [part.reshape(len(part), -1, size) for part in parts]
    return np.stack(numbers, axis=2).reshape(len(parts[0]), -1)


def _floats(tensor: GgufTensor, rows: Array) -> Dense:
    kind = DTYPES[_FLOATS[tensor.parts[0].type.name]]
    array = tensor.change.restored(np.require(rows, requirements="C").reshape(-1).view(kind))
    shape = tensor.shape
    if tensor.change.form == "pixels":
        array = array.reshape(tensor.parts[0].shape).transpose(0, 2, 3, 1)
    if not tensor.change.transposed:
        array = array.reshape(shape)
        order = tensor.change.columns
        return Dense(array if order is None else array[..., order.of(shape[-1])])
    return Dense(array.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2))


def _coded(tensor: GgufTensor, rows: Array) -> Coded:
    """Read blocks, in as many threads as there are processors."""
    coding, shape = CODINGS[tensor.parts[0].type.name], tensor.shape
    if rows.nbytes < _LARGE_BYTES:
        weight = read_blocks(coding, rows, shape)
    else:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="quire-gguf") as pool:
            weight = read_blocks(coding, rows, shape, pool.map)
    if tensor.change.columns is None:
        return weight
    order = np.argsort(tensor.change.columns.of(shape[-1])).astype(np.int32)
    return replace(weight, order=order)
