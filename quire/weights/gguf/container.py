"""The container format GGUF, versions 2 and 3: metadata and tensor headers of one file, all validated.

A file is a header, pairs of a key and a typed value, the headers of the tensors, and their data, aligned
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Every count, length, type and offset is checked
against the size of the file before it is used, so that a damaged file gives one error at once.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from quire.errors import ConfigError, quoted
from quire.program.program import MAX_TENSORS
from quire.quantize.kinds import Array
from quire.regular_file import hint_for, open_regular
from quire.weights.gguf.metadata import Metadata
from quire.weights.gguf.types import TYPES, BlockType

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_PAIRS = 1 << 16
_WINDOW_BYTES = 1 << 20  # of texts that are read together
_UNUSUAL_AT_ONCE = 256  # texts that are read one by one before that is tried again
_MAX_VALUES = 1 << 23  # of all arrays: the largest vocabularies have some two million tokens and merges
_MAX_STRING_BYTES = 1 << 24
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_DAMAGED = hint_for(b"")
_U32, _U64 = Struct("<I"), Struct("<Q")
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    number: np.dtype(name)
    for number, name in {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1"}.items()
} | {10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}
_BOOL = 7


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor as its file describes it. `shape` has the inputs last, `offset` is from the file's start."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int
    file: GgufFile = field(repr=False)

    @property
    def row_bytes(self) -> int:
        """Bytes of the blocks of one row."""
        return self.shape[-1] // self.type.weights * self.type.nbytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """One file: its metadata and tensors. `data` is the mapped file, whose pages are read on first access."""

    path: Path
    metadata: Metadata
    tensors: dict[str, TensorHeader]
    data: mmap.mmap
    header_bytes: int

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Map a file and read its headers. Raises ConfigError for anything invalid."""
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(8) or b""
                _check_start(path, start, size)
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path}: cannot be read: {error}") from error
        reader = _Reader(path, data)
        tensors: dict[str, TensorHeader] = {}
        num_tensors, num_pairs = reader.count("tensors", MAX_TENSORS), reader.count("pairs", _MAX_PAIRS)
        metadata = Metadata(str(path), reader.pairs(num_pairs))
        alignment = metadata.size("general.alignment", 32, most=_MAX_ALIGNMENT)
        if alignment & (alignment - 1):
            raise ConfigError(f"{path}: general.alignment = {alignment} is no power of two", _DAMAGED)
        found = [reader.tensor() for _ in range(num_tensors)]
        opened = cls(path, metadata, tensors, data, reader.at)
        begin = _aligned(reader.at, alignment)
        for name, kind, shape, offset in found:
            if name in tensors:
                raise _fault(path, name, "is listed twice")
            tensors[name] = TensorHeader(name, kind, shape, begin + offset, opened)
        _check_places(path, tensors.values(), begin, alignment, len(data))
        return opened

    def blocks(self, tensor: TensorHeader) -> Array:
        """Return the bytes of a tensor, uint8 [rows, bytes of a row]: a read-only view of the mapped file."""
        flat = np.frombuffer(self.data, np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(-1, tensor.row_bytes)

    def advise(self, tensor: TensorHeader, first: int, nbytes: int, advice: int) -> None:
        """Tell the kernel that bytes of a tensor, from its `first` on, will be needed, or no longer are."""
        begin = tensor.offset + first
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        self.data.madvise(advice, start, begin + nbytes - start)


class _Reader:
    """A position in the mapped file that moves over values, each checked to be within the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.at = path, 8
        self._data, self._size, self._values = data, len(data), 0

    def count(self, what: str, most: int) -> int:
        """Read a count of at most `most`."""
        number = self._u64()
        if number > most:
            raise ConfigError(f"{self.path}: {number:,} {what} are claimed, more than {most:,}", _DAMAGED)
        return number

    def pairs(self, number: int) -> dict[str, Any]:
        """Read the metadata."""
        found: dict[str, Any] = {}
        for _ in range(number):
            key = self._string("a key")
            if key in found:
                raise ConfigError(f"{self.path}: the key {quoted(key)} is given twice", _DAMAGED)
            found[key] = self._value(key, self._u32())
        return found

    def tensor(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        """Read the header of a tensor: name, type, shape, offset from the start of the data."""
        name = self._string("a name of a tensor")
        dims = self._u32()
        if not 1 <= dims <= _MAX_DIMS:
            raise _fault(self.path, name, f"has {dims:,} dimensions")
        shape = tuple(self._u64() for _ in range(dims))[::-1]
        number, offset = self._u32(), self._u64()
        if (kind := TYPES.get(number)) is None:
            raise ConfigError(
                f"{self.path}: tensor {quoted(name)} has the type {number}, which is not known",
                "the file is damaged, or of a newer kind: take the Q4_K_M or Q8_0 file of the same model",
            )
        most = self._size // kind.nbytes * kind.weights
        if not all(0 < n <= most for n in shape) or math.prod(shape) > most:
            raise _fault(self.path, name, f"has the shape {list(shape)}, more than the file holds")
        if shape[-1] % kind.weights:
            raise _fault(
                self.path, name, f"has rows of {shape[-1]}, no multiple of {kind.weights} ({kind.name})"
            )
        return name, kind, shape, offset

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {quoted(key)}")
        if kind == _ARRAY:
            return self._array(key, self._u32(), self._u64())
        (value,) = self._numbers(key, kind, 1)
        return _plain(value)

    def _array(self, key: str, kind: int, count: int) -> list[str] | Array:
        self._values += count
        if self._values > _MAX_VALUES:
            raise ConfigError(
                f"{self.path}: {quoted(key)} has {count:,} values, more than any model", _DAMAGED
            )
        if kind != _STRING:
            return self._numbers(key, kind, count)
        if count * 8 > self._size - self.at:
            raise self._ended(f"the {count:,} texts of {quoted(key)}")
        return self._strings(key, count)

    def _numbers(self, key: str, kind: int, count: int) -> Array:
        if (dtype := _NUMBERS.get(kind)) is None:
            what = "an array of arrays" if kind == _ARRAY else f"a value of the unknown type {kind}"
            raise ConfigError(f"{self.path}: {quoted(key)} is {what}", _DAMAGED)
        if count * dtype.itemsize > self._size - self.at:
            raise self._ended(f"the {count:,} numbers of {quoted(key)}")
        numbers = np.frombuffer(self._data, dtype, count, self.at)
        self.at += numbers.nbytes
        if kind != _BOOL:
            return numbers
        if numbers.size and numbers.max() > 1:
            raise ConfigError(f"{self.path}: {quoted(key)} is neither true nor false", _DAMAGED)
        return numbers.astype(np.bool_)

    def _strings(self, key: str, count: int) -> list[str]:
        """Read texts. Vocabularies have hundreds of thousands, nearly all of them plain."""
        texts: list[str] = []
        while len(texts) < count:
            texts += self._plain_strings(count - len(texts))
            texts += self._any_strings(key, min(count - len(texts), _UNUSUAL_AT_ONCE))
        return texts

    def _plain_strings(self, most: int) -> list[str]:
        """Read the texts before the next that has no byte, more than 255, or one that is zero.

        Their lengths are bytes followed by seven zeros, each where the text before it ends.
        """
        size = min(self._size - self.at, _WINDOW_BYTES) // 8 * 8
        held = np.frombuffer(self._data, np.uint8, size, self.at)
        is_length = np.zeros(size, np.bool_)
        for shift in range(min(8, size)):
            words = np.frombuffer(self._data, "<u8", (size - shift) // 8, self.at + shift)
            is_length[shift::8][: words.size] = words - 1 < 255  # zero less one is the largest number
        begins = np.flatnonzero(is_length)[: most + 1]
        ends = begins + 8 + held[begins]
        follows = np.concatenate(([0], ends))[: len(begins)] == begins
        count = min(int(np.argmin(np.append(follows, False))), most)
        count = min(count, int(np.searchsorted(ends[:count], size, "right")))
        if count == 0:
            return []
        begins, end = begins[:count], int(ends[count - 1])
        separated, is_text = held[:end].copy(), np.ones(end, np.bool_)
        separated[begins] = 0
        for byte in range(1, 8):
            is_text[begins + byte] = False
        try:
            texts = separated[is_text].tobytes().decode().split("\0")[1:]
        except UnicodeDecodeError:
            return []
        if len(texts) != count:
            return []
        self.at += end
        return texts

    def _any_strings(self, key: str, count: int) -> list[str]:
        """Read texts of any length, one after the other."""
        data, size, at, length_at = self._data, self._size, self.at, _U64.unpack_from
        texts, found = [], b""
        try:
            for _ in range(count):
                (length,) = length_at(data, at) if at + 8 <= size else (size,)
                begin, at = at + 8, at + 8 + length
                if at > size:
                    raise self._ended(f"a text of {quoted(key)}")
                found = data[begin:at]
                texts.append(found.decode())
        except UnicodeDecodeError:
            raise ConfigError(
                f"{self.path}: {quoted(found)} in {quoted(key)} is not UTF-8", _DAMAGED
            ) from None
        self.at = at
        return texts

    def _string(self, what: str) -> str:
        length = self._u64()
        if length > self._size - self.at:
            raise self._ended(f"{what}, of {length:,} bytes")
        if length > _MAX_STRING_BYTES:
            raise ConfigError(f"{self.path}: {what} has {length:,} bytes, which is too long", _DAMAGED)
        text = self._data[self.at : self.at + length]
        self.at += length
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{self.path}: {what} is not UTF-8: {quoted(text)}", _DAMAGED) from None

    def _u32(self) -> int:
        return self._integer(_U32)

    def _u64(self) -> int:
        return self._integer(_U64)

    def _integer(self, form: Struct) -> int:
        if self.at + form.size > self._size:
            raise self._ended("a number")
        (value,) = form.unpack_from(self._data, self.at)
        self.at += form.size
        return int(value)

    def _ended(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: the file of {self._size:,} bytes ends before {what}", _DAMAGED)


def _check_start(path: Path, start: bytes, size: int) -> None:
    if start[:4] != MAGIC:
        raise ConfigError(f"{path}: not a GGUF file: it does not begin with GGUF", hint_for(start))
    if size < 24:
        raise ConfigError(f"{path}: {size} bytes are too few for a GGUF file", _DAMAGED)
    (version,) = _U32.unpack_from(start, 4)
    if version and version & 0xFFFF == 0:
        raise ConfigError(f"{path}: the file is big-endian", "take the little-endian file of the same model")
    if version not in _VERSIONS:
        known = "only versions 2 and 3 are read"
        raise ConfigError(f"{path}: GGUF version {version}: {known}", "take a newer file of the same model")


def _check_places(path: Path, tensors: Iterable[TensorHeader], begin: int, alignment: int, size: int) -> None:
    """Raise ConfigError unless the tensors follow each other in the data without gaps or overlaps."""
    end = begin
    for tensor in sorted(tensors, key=_offset):
        if tensor.offset != (expected := _aligned(end, alignment)):
            fault = "overlaps the one before it" if tensor.offset < expected else "follows a gap in the data"
            raise _fault(path, tensor.name, fault)
        end = tensor.offset + tensor.nbytes
        if end > size:
            raise _fault(path, tensor.name, f"ends at byte {end:,} of a file of {size:,}")


_offset: Callable[[TensorHeader], int] = lambda tensor: tensor.offset  # noqa: E731


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _plain(value: Any) -> int | float | bool:
    """Return a number of a file in Python's types: a float32 as the shortest decimal that rounds to it."""
    if isinstance(value, np.floating):
        return float(str(value))
    return bool(value) if isinstance(value, np.bool_) else int(value)


def _fault(path: Path, name: str, what: str) -> ConfigError:
    return ConfigError(f"{path}: tensor {quoted(name)} {what}", _DAMAGED)
