"""Checkpoints in safetensors: names, shapes and number formats first, data by mmap on demand.

File format (https://github.com/huggingface/safetensors): eight bytes with the length of the header, little
endian; the header, a JSON object `name -> {dtype, shape, data_offsets}`; then the data, whose tensors are
contiguous. The whole header is validated before use, and every error names the file and, if there is one, the
tensor.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire.errors import ConfigError, quoted
from quire.json_file import check_size, parse_object, read_json
from quire.program.program import MAX_TENSORS
from quire.quantize.kinds import DTYPES, Array, Dense, FloatStorage
from quire.regular_file import hint_for, open_regular
from quire.weights.tensors import Tensors

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_HEADER_LIMIT_BYTES = 100_000_000  # as in the reference implementation of the format
_MAX_DIMS, _MAX_DIM, _MAX_OFFSET = 8, 1 << 40, 1 << 62
_VALUES_OF_TENSOR = 10  # in a header: number format, up to four dimensions, two offsets, containers
_INDEX_VALUES = 1 << 20  # quantized checkpoints have several tensors per weight
_NO_PLAIN_NAME = re.compile(r"[/\\:\0]")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_INTEGERS = ("I32", "I64")
_NATIVE = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8}
_BITS |= {"F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
_BITS |= {"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}

# As arrays: floats of 8 bits by their bits
_ARRAYS = {name: DTYPES[kind] for name, kind in _NATIVE.items()} | {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
}

_DAMAGED = hint_for(b"")


class TensorEntry(NamedTuple):
    """A tensor of a checkpoint, as its header describes it. `offset` is from the start of the file."""

    name: str
    dtype: str  # as safetensors names it: "BF16", "F16", "F32", "I64", ...
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def storage(self) -> FloatStorage:
        """The storage kind. Raises ConfigError for unsupported formats."""
        if self.dtype not in _NATIVE:
            raise ConfigError(
                f"{self.file}: tensor {quoted(self.name)} is stored as {self.dtype}, which is not supported",
                "use a checkpoint in bfloat16, float16 or float32",
            )
        return FloatStorage(_NATIVE[self.dtype])

    @property
    def place(self) -> str:
        """The file."""
        return self.file.name


class Checkpoint(Tensors):
    """The tensors of a model by name, from one or several files. `read` maps one into memory."""

    def __init__(self, path: Path, entries: dict[str, TensorEntry]) -> None:
        self.path = path
        self._entries = entries
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open a model folder or one .safetensors file, reading only headers.

        In a folder: model.safetensors, else model.safetensors.index.json and its shards, else the only
        .safetensors file. Raises ConfigError, with no file left open, for anything invalid.
        """
        if path.is_dir():
            return cls(path, _folder_entries(path))
        if path.suffix != ".safetensors":
            raise ConfigError(f"{path}: not a folder and not a .safetensors file", _pickle_hint([path.name]))
        return cls(path, read_header(path))

    def read(self, name: str) -> Array:
        """Return the data of a tensor [*shape], bf16, f16 or f32: a read-only view of the mapped file.

        Pages are read from disk on first access. The file must not be truncated meanwhile; replacing it by a
        rename, as downloads do, is safe.
        """
        _ = self[name].storage  # raises for other formats
        return self.raw(name)

    def raw(self, name: str) -> Array:
        """Return the data of a tensor of any number format that has an array, floats of 8 bits as uint8."""
        entry = self[name]
        if (dtype := _ARRAYS.get(entry.dtype)) is None:
            raise ConfigError(
                f"{entry.file}: tensor {quoted(name)} is stored as {entry.dtype}, which is not read"
            )
        if not entry.nbytes:
            return np.zeros(entry.shape, dtype)
        flat = np.frombuffer(self._map(entry.file), dtype, math.prod(entry.shape), entry.offset)
        return np.require(flat, requirements="A").reshape(entry.shape)

    @property
    def where(self) -> str:
        """The path of the folder or file."""
        return str(self.path)

    def pull(self, name: str) -> Dense:
        """Return a tensor as a weight (see `read`)."""
        return Dense(self.read(name))

    def integers(self, name: str) -> Array:
        if self[name].dtype not in _INTEGERS:
            found = f"is stored as {self[name].dtype}, not as one of {', '.join(_INTEGERS)}"
            raise ConfigError(f"{self[name].file}: tensor {quoted(name)} {found}")
        return self.raw(name)

    def prefetch(self, name: str) -> None:
        self._advise(name, mmap.MADV_WILLNEED)

    def release(self, name: str) -> None:
        """Release the memory of a tensor that was read; the file stays mapped."""
        self._advise(name, mmap.MADV_DONTNEED)

    def _advise(self, name: str, advice: int) -> None:
        entry = self[name]
        if entry.nbytes:
            start = entry.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map(entry.file).madvise(advice, start, entry.offset + entry.nbytes - start)

    def identity(self) -> bytes:
        """Return a digest of path, size, modification time and header of each file."""
        found = hashlib.blake2b(digest_size=20)
        for path in sorted({entry.file.resolve() for entry in self._entries.values()}):
            status = path.stat()
            with open_regular(path) as file:
                header = file.read(int.from_bytes(file.read(8), "little"))
            found.update(repr((str(path), status.st_size, status.st_mtime_ns)).encode())
            found.update(hashlib.blake2b(header).digest())
        return found.digest()

    def close(self) -> None:
        """Drop the mappings: each is unmapped when no array uses it any more."""
        self._maps.clear()

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            try:
                with open_regular(file) as opened:
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{file}: cannot be mapped: {error}") from error
            expected = max(e.offset + e.nbytes for e in self._entries.values() if e.file == file)
            if len(self._maps[file]) < expected:
                raise ConfigError(f"{file}: has become shorter since it was opened", _DAMAGED)
        return self._maps[file]

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def weight_files(names: list[str], where: str) -> list[str]:
    """Return the names of the weight files in a model folder: safetensors files, or the index.

    Raises ConfigError if there is none, or more than one candidate; `where` names the folder.
    """
    for chosen in (SINGLE_NAME, INDEX_NAME):
        if chosen in names:
            return [chosen]
    files = sorted(name for name in names if name.endswith(".safetensors"))
    if not files:
        raise ConfigError(f"{where}: no safetensors weights", _pickle_hint(names))
    if len(files) > 1:
        raise ConfigError(
            f"{where}: {len(files)} safetensors files ({files[0]}, ...) but no {SINGLE_NAME} or {INDEX_NAME}",
            "give the path of one file, or fetch the index",
        )
    return files


def read_index(path: Path) -> dict[str, str]:
    """Read the `tensor -> file` map of an index. Raises ConfigError unless all files are plain names."""
    weight_map = read_json(path, max_values=_INDEX_VALUES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path}: has no 'weight_map' with the files of the tensors")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or _NO_PLAIN_NAME.search(file):
            what = f"is placed in {quoted(file)}, not a safetensors file of this folder"
            raise ConfigError(f"{path}: tensor {quoted(name)} {what}")
    return weight_map


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the tensors of one file, checked against its size. Raises ConfigError for an invalid header."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = file.read(8) or b""
            length = int.from_bytes(begin, "little")
            if size < 8 or length > size - 8 or length > _HEADER_LIMIT_BYTES:
                raise ConfigError(f"{path}: {_header_fault(size, length)}", hint_for(begin))
            text = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    check_size(text, f"{path}: header", _VALUES_OF_TENSOR * MAX_TENSORS)
    header = parse_object(text, f"{path}: header")
    header.pop("__metadata__", None)
    _check_number(path, len(header))
    start = 8 + length
    entries = [_entry(path, name, info, start) for name, info in header.items()]
    end = start
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != end:
            fault = "overlaps the one before it" if entry.offset < end else "follows a gap in the data"
            raise _fault(path, entry.name, fault)
        end += entry.nbytes
        if end > size:
            raise _fault(path, entry.name, f"ends at byte {end:,} of a file of {size:,}")
    if end != size:
        raise ConfigError(f"{path}: {size - end:,} bytes after the last tensor", _DAMAGED)
    return {entry.name: entry for entry in entries}


def _check_number(path: Path, tensors: int) -> None:
    if tensors > MAX_TENSORS:
        raise ConfigError(f"{path}: {tensors:,} tensors are more than any model has ({MAX_TENSORS:,})")


def _header_fault(size: int, length: int) -> str:
    if size < 8:
        return f"{size} bytes are too few for a safetensors file"
    return f"header of {length:,} bytes claimed in a file of {size:,}"


def _entry(path: Path, name: str, info: Any, start: int) -> TensorEntry:
    """Parse an entry of a header, or raise ConfigError; data begins at byte `start` of the file."""
    info = info if isinstance(info, dict) else {}
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _fault(path, name, f"has an unknown number format: {quoted(dtype)}")
    if not _counts(shape, _MAX_DIM) or len(shape) > _MAX_DIMS:
        raise _fault(path, name, f"has an impossible shape: {quoted(shape)}")
    if not _counts(offsets, _MAX_OFFSET) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _fault(path, name, f"has impossible data offsets: {quoted(offsets)}")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * _BITS[dtype] != nbytes * 8:
        raise _fault(path, name, f"claims {dtype} {list(shape)} but has {nbytes:,} bytes")
    return TensorEntry(name, dtype, tuple(shape), path, start + offsets[0], nbytes)


def _fault(path: Path, name: str, what: str) -> ConfigError:
    return ConfigError(f"{path}: tensor {quoted(name)} {what}", _DAMAGED)


def _counts(value: Any, most: int) -> bool:
    """Return True if this is a list of integers from 0 to `most`."""
    if not isinstance(value, list) or not {int}.issuperset(map(type, value)):
        return False
    return not value or 0 <= min(value) <= max(value) <= most


def _folder_entries(folder: Path) -> dict[str, TensorEntry]:
    try:
        names = {file.name for file in folder.iterdir()}
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror}") from error
    (chosen,) = weight_files([*names], str(folder))
    if chosen != INDEX_NAME:
        return read_header(folder / chosen)
    index = read_index(folder / INDEX_NAME)
    shards = dict.fromkeys(index.values())
    if missing := [shard for shard in shards if shard not in names]:
        raise ConfigError(
            f"{folder / missing[0]}: no such file, though {INDEX_NAME} names it"
            + (f" ({len(missing)} files are missing)" if len(missing) > 1 else ""),
            "fetch the missing files",
        )
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(folder / shard).items():
            if name in entries:
                raise ConfigError(f"{entry.file}: tensor {quoted(name)} is also in {entries[name].file.name}")
            entries[name] = entry
        _check_number(folder, len(entries))
    for name, shard in index.items():
        if name not in entries or entries[name].file.name != shard:
            raise ConfigError(
                f"{folder / shard}: tensor {quoted(name)} is not in it, though {INDEX_NAME} says so"
            )
    return entries


def _pickle_hint(names: list[str]) -> str:
    """Return the hint for a folder without safetensors: pickles are never opened, they can run any code."""
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return (
            f"{pickles[0]} may be a pickle, which can run any code when opened: it is never read. "
            "Use a safetensors version of the model (on the hub, a pull request of the conversion bot may "
            "have one: --revision refs/pr/NUMBER), or convert it where you trust it: load it with "
            "transformers and call save_pretrained(folder)"
        )
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return f"to use {ggufs[0]}, fetch it and give the path of the file"
    return f"expected {SINGLE_NAME}, or {INDEX_NAME} and its shards"
