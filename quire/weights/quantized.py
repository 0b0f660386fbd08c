"""Tensors of a quantized checkpoint: one for each weight, made of its codes, scales and all it needs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from quire.quantize.kinds import Array, StoredWeight
from quire.weights.formats.raw import QuantizedWeight, Reading
from quire.weights.safetensors import Checkpoint, TensorEntry
from quire.weights.tensors import Tensors


class QuantizedTensors(Tensors):
    """The tensors of a checkpoint, with those that belong together as one: see `formats.raw.Reading`.

    `settings` is what determines the meaning of the data besides the file, for `identity`.
    """

    def __init__(self, checkpoint: Checkpoint, reading: Reading, settings: str) -> None:
        self._checkpoint, self._reading, self._settings = checkpoint, reading, settings
        self._weights = {weight.name: weight for weight in reading.weights}
        taken = {part for weight in reading.weights for part in weight.parts} | reading.unused
        self._plain = [name for name in checkpoint if name not in taken]

    @property
    def where(self) -> str:
        return self._checkpoint.where

    @property
    def summary(self) -> str:
        return self._reading.summary

    @property
    def notes(self) -> tuple[str, ...]:
        return self._reading.notes

    def pull(self, name: str) -> StoredWeight:
        weight = self._weights.get(name)
        return self._checkpoint.pull(name) if weight is None else weight.read()

    def integers(self, name: str) -> Array:
        return self._checkpoint.integers(name)

    def prefetch(self, name: str) -> None:
        for part in self._parts(name):
            self._checkpoint.prefetch(part)

    def release(self, name: str) -> None:
        for part in self._parts(name):
            self._checkpoint.release(part)

    def identity(self) -> bytes:
        found = hashlib.blake2b(self._checkpoint.identity(), digest_size=20)
        found.update(self._settings.encode())
        return found.digest()

    def close(self) -> None:
        self._checkpoint.close()

    def _parts(self, name: str) -> tuple[str, ...]:
        return self._weights[name].parts if name in self._weights else (name,)

    def __getitem__(self, name: str) -> QuantizedWeight | TensorEntry:
        weight = self._weights.get(name)
        return self._checkpoint[name] if weight is None else weight

    def __iter__(self) -> Iterator[str]:
        return iter((*self._weights, *self._plain))

    def __len__(self) -> int:
        return len(self._weights) + len(self._plain)
