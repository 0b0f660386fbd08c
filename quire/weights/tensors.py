"""Tensors: the weights of a model by name, whatever holds them. Facts first, data on demand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

from quire.quantize.kinds import Storage, StoredWeight


class Tensor(Protocol):
    """The header of a tensor, known before any of its data is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """Bytes that are read of it, as they lie in the file."""
        ...

    @property
    def place(self) -> str:
        """The name of its file, for errors."""
        ...

    @property
    def storage(self) -> Storage:
        """Its storage kind. Raises ConfigError for formats that are not read."""
        ...


class Tensors(Mapping[str, Tensor], ABC):
    """Tensors by name. Of already quantized ones, the integers and what belongs to them are one tensor."""

    @property
    @abstractmethod
    def where(self) -> str:
        """A name of their place, for people."""

    @abstractmethod
    def pull(self, name: str) -> StoredWeight:
        """Return a tensor's data, as it is stored: views where possible."""

    @abstractmethod
    def prefetch(self, name: str) -> None:
        """Ask for the data of a tensor that will be pulled next; returns at once."""

    @abstractmethod
    def release(self, name: str) -> None:
        """Give back the memory of a tensor that was pulled. It may be pulled again."""

    @abstractmethod
    def under(self, prefix: str) -> Tensors:
        """Return the same tensors with a prefix to their names."""

    @abstractmethod
    def identity(self) -> bytes:
        """Name the data: other data have another name. Reads nothing but headers."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files, as far as nothing that was pulled needs them."""
