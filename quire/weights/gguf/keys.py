"""The metadata of one architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.errors import ConfigError, quoted
from quire.weights.gguf.container import TensorHeader
from quire.weights.gguf.metadata import Metadata

_MOST_FACTORS = 1 << 12
_MOST_LAYERS = 1 << 10


@dataclass(frozen=True, slots=True)
class Keys:
    """The metadata of one architecture: names without its prefix, and tensors that hold parameters."""

    metadata: Metadata
    prefix: str
    tensors: Mapping[str, TensorHeader]

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer, the same for all layers."""
        return self.metadata.size(f"{self.prefix}.{name}", default)

    def optional_size(self, name: str) -> int | None:
        return self.metadata.optional_size(f"{self.prefix}.{name}")

    def number(self, name: str) -> float | None:
        return self.metadata.number(f"{self.prefix}.{name}")

    def flag(self, name: str) -> bool | None:
        return self.metadata.flag(f"{self.prefix}.{name}")

    def text(self, name: str) -> str | None:
        return self.metadata.text(f"{self.prefix}.{name}")

    def value(self, name: str) -> Any:
        return self.metadata.values.get(f"{self.prefix}.{name}")

    def of_layers(self, name: str) -> list[int]:
        """Return an integer of each layer, where the file has one for each or one for all."""
        if not isinstance(value := self.value(name), np.ndarray):
            return [self.metadata.size(f"{self.prefix}.{name}", value, least=0)] * self.layers
        if value.dtype.kind not in "iub" or len(value) < self.layers or (value < 0).any():
            where = f"{self.metadata.where}: {self.prefix}.{name}"
            raise ConfigError(
                f"{where} = {quoted(value.tolist())} is not a size for each of {self.layers} layers"
            )
        return [int(number) for number in value[: self.layers]]

    def largest(self, name: str) -> int:
        """Return the largest of these integers; those of layers without such a part are 0."""
        return max(self.of_layers(name))

    @property
    def layers(self) -> int:
        """The number of layers, without those that predict further tokens."""
        last = self.metadata.size(f"{self.prefix}.nextn_predict_layers", 0, least=0)
        count = self.size("block_count") - last
        if 0 < count <= _MOST_LAYERS:
            return count
        problem = "no layers" if count < 1 else f"more than {_MOST_LAYERS:,} layers"
        raise ConfigError(f"{self.metadata.where}: {self.prefix}.block_count states {problem}")

    @property
    def heads(self) -> int:
        return self.largest("attention.head_count")

    @property
    def kv_heads_of_layers(self) -> list[int]:
        """The number of heads of keys of each layer; 0 for one without attention."""
        stated = self.value("attention.head_count_kv") is not None
        return self.of_layers("attention.head_count_kv" if stated else "attention.head_count")

    @property
    def kv_heads(self) -> int:
        """The same of layers with attention, the largest."""
        return max(self.kv_heads_of_layers)

    def has(self, part: str) -> bool:
        """Return True if a layer has this tensor."""
        return any(f"blk.{layer}.{part}" in self.tensors for layer in range(self.layers))

    def rows(self, tensor: str) -> int | None:
        """Return the number of rows of a matrix; None if it is absent."""
        header = self.tensors.get(tensor)
        return None if header is None or len(header.shape) != 2 else header.shape[0]

    @property
    def rotated(self) -> int:
        """The numbers of a head that are rotated."""
        return self.optional_size("rope.dimension_count") or self.head_dim

    @property
    def head_dim(self) -> int:
        hidden = self.size("embedding_length")
        return self.size("attention.key_length", max(hidden // max(self.heads, 1), 1))

    def factors(self, tensor: str) -> list[float] | None:
        """Return the divisors of the rope frequencies in a tensor; None if it is absent."""
        if (header := self.tensors.get(tensor)) is None:
            return None
        if header.type.name != "F32" or len(header.shape) != 1 or header.shape[0] > _MOST_FACTORS:
            raise ConfigError(f"{header.file.path}: tensor {quoted(tensor)} is no list of float32 factors")
        numbers = header.file.blocks(header).reshape(-1).view("<f4")
        return [float(number) for number in numbers]


def experts(keys: Keys) -> dict[str, Any]:
    """Return the number of experts, and how many a token meets."""
    count = keys.size("expert_count")
    return {
        "num_experts": count,
        "num_local_experts": count,
        "n_routed_experts": count,
        "num_experts_per_tok": keys.size("expert_used_count"),
    }


def partial(keys: Keys) -> dict[str, Any]:
    """Return which part of a head is rotated."""
    return {"partial_rotary_factor": keys.rotated / keys.head_dim}
