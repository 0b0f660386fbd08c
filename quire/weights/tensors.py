"""Tensors: the weights of a model by name, in any format: headers first, data on demand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

from quire.errors import ConfigError, quoted
from quire.quantize.kinds import Array, Storage, StoredWeight


class Tensor(Protocol):
    """The header of a tensor, known before any of its data is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        ...

    @property
    def place(self) -> str:
        """The name of the file, for errors."""
        ...

    @property
    def storage(self) -> Storage:
        """The storage kind. Raises ConfigError for unsupported formats."""
        ...


class Tensors(Mapping[str, Tensor], ABC):
    """Tensors by name. A quantized weight, with its integers and scales, counts as one tensor.

    Its shape is [..., out, in], however a checkpoint of floats would have it (WeightSpec.transposed).
    """

    @property
    @abstractmethod
    def where(self) -> str:
        """A readable name of their location."""

    @property
    def summary(self) -> str:
        """The format of quantized weights in a line: "GPTQ, 4 bits, groups of 128"; "" if all are floats."""
        return ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what the files define and Quire does not use."""
        return ()

    @abstractmethod
    def pull(self, name: str) -> StoredWeight:
        """Return the data of a tensor as stored: views if possible."""

    def integers(self, name: str) -> Array:
        """Return the data of a tensor of integers. Raises ConfigError for any other."""
        raise ConfigError(f"{self.where}: tensor {quoted(name)} has no integers")

    @abstractmethod
    def prefetch(self, name: str) -> None:
        """Prefetch the data of a tensor that will be pulled next, without blocking."""

    @abstractmethod
    def release(self, name: str) -> None:
        """Release the memory of a tensor that was pulled. It may be pulled again."""

    def name_in_files(self, name: str) -> str:
        """Return what a tensor is called in the files."""
        return name

    @abstractmethod
    def identity(self) -> bytes:
        """Return a digest that identifies the data, from headers alone."""

    @abstractmethod
    def close(self) -> None:
        """Close the files, unless pulled tensors still need them."""
