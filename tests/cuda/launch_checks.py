"""What Triton's interpreter does not notice in a launch, and a GPU may not forgive.

    an access outside of the arrays of the launch
    a place that one program writes and another one reads, or writes with another value
    a place that a program reads, or writes again, after it wrote it with no barrier between

The interpreter runs programs one after the other, and each operation for all threads of a program at once, so
results are right there in spite of all of these. On a GPU programs have no order, and threads of one program
none between barriers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.backends.cuda import interpreter

_Accesses = dict[int, list[tuple[int, np.ndarray]]]  # by array: a program, and bytes

# Kernels that read arrays by addresses which other arrays have.
_INDIRECT = frozenset({"adapter_down", "adapter_up", "place_images"})
# Places that are written with several values, none of which anybody reads.
_UNREAD = {
    "place_entries": "tokens of the slot that is nobody's, and drafts, after which the host knows all tokens",
    "top_logprobs": "ranks in a row whose logits are no numbers: it has a fault instead",
}


class LaunchFault(AssertionError):
    """A launch that may have other results on a GPU."""


class _Launch:
    """The accesses of a launch so far: by array, the bytes with their programs, and what was written."""

    def __init__(self, kernel: str, arrays: Iterable[tuple[int, int]]) -> None:
        spans: list[list[int]] = []
        for begin, end in sorted(arrays):
            if spans and begin <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([begin, end])
        self.kernel = kernel
        self._begins, self._ends = np.array(spans, np.int64).reshape(-1, 2).T
        self._program = -1
        self._reads: _Accesses = defaultdict(list)
        self._writes: _Accesses = defaultdict(list)
        self._values: dict[int, list[np.ndarray]] = defaultdict(list)
        self._unseen: dict[int, list[np.ndarray]] = {}  # written by the program since its last barrier

    def begin_program(self) -> None:
        self._program += 1
        self.barrier()

    def barrier(self) -> None:
        self._unseen = {}

    def read(self, addresses: np.ndarray, size: int) -> None:
        if self.kernel in _INDIRECT:
            return
        for array, own, _ in self._by_array(addresses, size, None):
            self._reads[array].append((self._program, own))
            self._meet(array, own, "reads")

    def write(self, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
        for array, own, written in self._by_array(addresses, size, values):
            order = np.argsort(own, kind="stable")
            if ((np.diff(own[order]) == 0) & (np.diff(written[order].astype(int)) != 0)).any():
                self._differ("threads write")
            self._writes[array].append((self._program, own))
            self._values[array].append(written)
            self._meet(array, own, "writes")
            self._unseen.setdefault(array, []).append(own)

    def _by_array(
        self, addresses: np.ndarray, size: int, values: np.ndarray | None
    ) -> Iterator[tuple[int, np.ndarray, Any]]:
        """Yield the addresses of all bytes of an access, and their values, by the array that they are in."""
        arrays = np.searchsorted(self._begins, addresses, side="right") - 1
        if (arrays < 0).any() or (addresses + size > self._ends[arrays]).any():
            raise LaunchFault(f"{self.kernel} accesses memory that is in none of its arrays")
        every, of_bytes = (addresses[:, None] + np.arange(size)).ravel(), np.repeat(arrays, size)
        for array in np.unique(arrays).tolist():
            own = of_bytes == array
            yield array, every[own], None if values is None else values[own]

    def _meet(self, array: int, own: np.ndarray, does: str) -> None:
        before = self._unseen.get(array)
        if before is not None and np.isin(own, np.concatenate(before)).any():
            raise LaunchFault(f"{self.kernel} {does} what its program wrote, without a barrier between")

    def end(self) -> None:
        """Raise LaunchFault for places that several programs use, if one of them changes what is there."""
        for array, accesses in self._writes.items():
            written, writers = _joined(accesses)
            order = np.argsort(written, kind="stable")
            written, writers = written[order], writers[order]
            values = np.concatenate(self._values[array])[order]
            again = written[1:] == written[:-1]
            if (again & (writers[1:] != writers[:-1]) & (values[1:] != values[:-1])).any():
                self._differ("programs write")
            read, readers = _joined(self._reads[array])
            at = np.minimum(np.searchsorted(written, read), len(written) - 1)
            if ((written[at] == read) & (writers[at] != readers)).any():
                raise LaunchFault(f"a program of {self.kernel} reads what another one writes")

    def _differ(self, who: str) -> None:
        if self.kernel not in _UNREAD:
            raise LaunchFault(f"{who} different values to one place, in {self.kernel}")


def _joined(accesses: list[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of accesses, and their programs."""
    none = np.zeros(0, np.int64)
    programs = [np.full(len(own), program) for program, own in accesses]
    return np.concatenate([none, *(own for _, own in accesses)]), np.concatenate([none, *programs])


class LaunchChecks:
    """Checks every launch in the interpreter while it is installed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._launch: _Launch | None = None
        self._run = interpreter.run
        builder = InterpreterBuilder
        self._load, self._store = builder.create_masked_load, builder.create_masked_store
        self._barrier, self._begin = builder.create_barrier, builder.set_grid_idx
        checks = self

        def load(own: Any, pointers: Any, mask: Any, *more: Any, **named: Any) -> Any:
            if checks._launch is not None:
                checks._launch.read(*_places(pointers, mask))
            return checks._load(own, pointers, mask, *more, **named)

        def store(own: Any, pointers: Any, value: Any, mask: Any, *more: Any, **named: Any) -> Any:
            if checks._launch is not None:
                checks._launch.write(*_places(pointers, mask), _bytes(value, mask, pointers.data.shape))
            return checks._store(own, pointers, value, mask, *more, **named)

        def barrier(own: Any) -> Any:
            if checks._launch is not None:
                checks._launch.barrier()
            return checks._barrier(own)

        def begin(own: Any, *index: int) -> Any:
            if checks._launch is not None:
                checks._launch.begin_program()
            return checks._begin(own, *index)

        patch.setattr(builder, "create_masked_load", load)
        patch.setattr(builder, "create_masked_store", store)
        patch.setattr(builder, "create_barrier", barrier)
        patch.setattr(builder, "set_grid_idx", begin)
        patch.setattr(interpreter, "run", self._checked)

    def _checked(self, kernel: Any, grid: Any, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        self._launch = launch = _Launch(kernel.fn.__name__, map(_span, filter(_is_array, args)))
        try:
            self._run(kernel, grid, args, constants)
            launch.end()
        finally:
            self._launch = None


def _is_array(arg: Any) -> bool:
    return isinstance(arg, np.ndarray | TensorDescriptor)


def _span(array: np.ndarray | TensorDescriptor) -> tuple[int, int]:
    """Return the addresses of the first byte of an array, and of that behind its last one."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data, array.ctypes.data + array.nbytes
    num_bytes = prod(array.shape) * array.base.dtype.primitive_bitwidth // 8
    return array.base.address, array.base.address + num_bytes


def _places(pointers: Any, mask: Any) -> tuple[np.ndarray, int]:
    """Return the addresses that an access has, and the bytes of each."""
    chosen = np.broadcast_to(mask.data, pointers.data.shape)
    size = max(8, pointers.get_element_ty().primitive_bitwidth) // 8
    return pointers.data[chosen.astype(bool)].astype(np.int64).ravel(), size


def _bytes(value: Any, mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the bytes that a store writes."""
    chosen = np.broadcast_to(mask.data, shape).astype(bool)
    return np.ascontiguousarray(np.broadcast_to(value.data, shape)[chosen]).ravel().view(np.uint8)
