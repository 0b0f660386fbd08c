"""Adapters (LoRA) on an accelerator: their matrices, a table of them, and what they add to products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.backends.cuda.accelerator import DeviceArray, Memory, OfRank
from quire.backends.cuda.kernels.variants import ADAPTER_RANKS
from quire.errors import ConfigError
from quire.program.batch import Batch
from quire.program.ops import Linear
from quire.program.program import Count, LowRank, Program
from quire.quantize.kinds import DTYPES, Array, to_float32

KINDS = {"bf16": DTYPES["bf16"], "fp16": DTYPES["f16"], "fp32": DTYPES["f32"]}  # as Triton calls them
_LEAST_PLACES = 8  # of the table
_ALIGNMENT = 256  # bytes, of each matrix


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step: the place of that of each token and of each logit row, int32, -1 for none.

    `kinds` are the formats of those that any row has.
    """

    kinds: frozenset[str]
    places: Mapping[Count, DeviceArray]


class DeviceAdapters:
    """The adapters of a program. One is copied to the accelerator when a row first has it.

    So whoever loads one, from any thread, waits for nothing and calls no accelerator. For each format and
    each weight that is adapted each accelerator of a group has a table [places, 3] of the addresses of down
    and up, and the rank; the place of an adapter is its number, as long as it is loaded. Of a divided weight
    each has its part of up.
    """

    def __init__(self, memory: Memory, program: Program) -> None:
        self._memory = memory
        adapted = (op.weight for op in program if isinstance(op, Linear) and op.adapted)
        self._weights = tuple(dict.fromkeys(adapted))
        self._sites = {weight.name: site for site, weight in enumerate(self._weights)}
        self._waiting: dict[str, Mapping[str, LowRank]] = {}
        self._places: dict[str, int] = {}
        self._kinds: dict[str, frozenset[str]] = {}
        self._held: dict[str, DeviceArray] = {}  # the matrices of each adapter
        self.moves = 0  # how often the tables were allocated
        self._tables = np.zeros((len(KINDS), len(self._sites), memory.num_ranks, 0, 3), np.int64)
        self._scales = np.zeros((len(self._sites), 0), np.float32)
        self._allocate(_LEAST_PLACES)

    def _allocate(self, places: int) -> None:
        """Make tables of so many places, with what is known."""
        tables = np.zeros((*self._tables.shape[:3], places, 3), np.int64)
        scales = np.zeros((len(self._sites), places), np.float32)
        known = self._scales.shape[1]
        tables[..., :known, :], scales[:, :known] = self._tables, self._scales
        device_tables, device_scales = (
            self._memory.allocate(max(1, array.nbytes)).part(0, array.shape, array.dtype)
            for array in (tables, scales)
        )
        self._tables, self._scales = tables, scales
        self._device_tables, self._device_scales = device_tables, device_scales
        self.moves += 1

    def add(self, adapter: str, parts: Mapping[str, LowRank]) -> None:
        """Keep an adapter for rows that will have it. Raises ConfigError for one that has no kernels."""
        if (rank := max(len(part.down) for part in parts.values())) > ADAPTER_RANKS:
            problem = f"the cuda backend has no kernels for adapters of rank {rank}"
            raise ConfigError(problem, f"at most {ADAPTER_RANKS}: use device='native'")
        self._waiting[adapter] = {name: part for name, part in parts.items() if name in self._sites}

    def drop(self, adapter: str) -> None:
        """Free the memory of an adapter."""
        self._waiting.pop(adapter, None)
        self._held.pop(adapter, None)
        self._kinds.pop(adapter, None)
        if (place := self._places.pop(adapter, None)) is not None:
            self._tables[..., place, :] = 0

    def numbers(self, batch: Batch) -> tuple[frozenset[str], dict[Count, np.ndarray]]:
        """Return the formats of the adapters of a batch, and the place of each token's and logit row's.

        There are none if no product may have adapters.
        """
        kinds, found = set[str](), dict[Count, np.ndarray]()
        if not self._sites:
            return frozenset(), found
        counts: tuple[tuple[Count, int], ...] = (("T", batch.num_tokens), ("L", len(batch.logit_rows)))
        for count, rows in counts:
            found[count] = np.full(rows, -1, np.int32)
            for adapter, own in batch.by_adapter(count == "L").items():
                found[count][own] = self._place(adapter)
                kinds |= self._kinds[adapter]
        return frozenset(kinds), found

    def _place(self, adapter: str) -> int:
        """Return the place of an adapter, which is copied to the accelerator if it was not yet."""
        if adapter not in self._places:
            parts = self._waiting[adapter]
            taken = set(self._places.values())
            place = next(number for number in range(len(taken) + 1) if number not in taken)
            if place == self._scales.shape[1]:
                self._allocate(2 * place)
            self._put(adapter, place, parts)
            self._places[adapter] = place
            del self._waiting[adapter]
        return self._places[adapter]

    def _put(self, adapter: str, place: int, parts: Mapping[str, LowRank]) -> None:
        """Copy the matrices of an adapter, and the tables with their addresses."""
        matrices = {name: self._stored(name, part) for name, part in parts.items()}
        sizes = [matrix.nbytes for _, both in matrices.values() for matrix in both]
        held = self._memory.allocate(max(1, sum(map(_aligned, sizes))))
        first = 0
        self._tables[..., place, :] = 0
        for name, (kind, both) in matrices.items():
            site = self._sites[name]
            tables = self._tables[list(KINDS).index(kind), site]
            for number, of_ranks in enumerate(both):
                array = held.part(first, of_ranks.shape, of_ranks.dtype)
                self._memory.write(array, of_ranks)
                own = np.minimum(np.arange(len(tables)), len(of_ranks) - 1) * array.rows(0, 1).num_bytes
                tables[:, place, number] = self._memory.addresses(array) + own
                first += _aligned(of_ranks.nbytes)
            tables[:, place, 2] = len(parts[name].down)
            self._scales[site, place] = parts[name].scale
        self._memory.write(self._device_tables, self._tables)
        self._memory.write(self._device_scales, self._scales)
        self._held[adapter] = held
        self._kinds[adapter] = frozenset(kind for kind, _ in matrices.values())

    def table(self, kind: str, weight: str) -> tuple[OfRank, DeviceArray]:
        """Return the table of a weight and a format, [places, 3], and the scales [places].

        They begin at multiples of 16 bytes, as there are 8 places or more.
        """
        site, (ranks, places, _) = self._sites[weight], self._tables.shape[2:]
        number = list(KINDS).index(kind) * len(self._sites) + site
        tables = self._device_tables.part(number * ranks * places * 24, (ranks, places, 3))
        return OfRank(tables), self._device_scales.part(site * places * 4, (places,))

    def _stored(self, name: str, part: LowRank) -> tuple[str, tuple[Array, Array]]:
        """Return the format of a part, and down and up as they are stored; float32 if formats differ.

        down [1, rank, in]; up [parts, rank, out padded], as many parts as ranks divide the weight's outputs.
        """
        down, up, outputs = part.down, part.up, self._weights[self._sites[name]].shape[0]
        if down.dtype != up.dtype:
            down, up = to_float32(down), to_float32(up)
        padded = np.zeros((len(up) // outputs, up.shape[1], -(-outputs // 16) * 16), up.dtype)
        padded[..., :outputs] = up.reshape(len(padded), outputs, -1).swapaxes(1, 2)
        return next(kind for kind, dtype in KINDS.items() if dtype == down.dtype), (down[None], padded)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
