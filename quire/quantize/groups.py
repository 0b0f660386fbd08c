"""Integers whose inputs lie in groups with a scale each: the bytes, cuts, rows and values of all such kinds.

The last group of a row may be shorter than the others, so any row length can be stored; a group as long as
the row is one scale per output channel.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from quire.program.numerics import GROUP, quantized_matmul
from quire.quantize.kinds import DTYPE_NAMES, DTYPES, Array, Floats, StoredWeight, check_cut, require

G = TypeVar("G", bound="GroupWeight")
_FOLLOWS = {"scales": "groups", "minimums": "groups", "zeros": "groups", "channel_scales": "outputs"}
CODES = "i8"  # the format of scales that are integers, in units of a scale of their output


@dataclass(frozen=True, slots=True)
class GroupStorage:
    """Integers of `bits` bits, `group_size` consecutive inputs of an output sharing a scale.

    `scale` and `offset` are the number formats of the groups' scales ("i8": integers, with one f32 for
    each output) and of what shifts them: "" for none (symmetric), "u8" for integer zero points,
    "f16"/"f32" for minimums.
    """

    kind: str
    bits: int
    group_size: int
    scale: str
    offset: str = ""

    @property
    def is_float(self) -> bool:
        return False

    def nbytes(self, shape: tuple[int, ...]) -> int:
        rows, width = math.prod(shape[:-1]), shape[-1]
        group = DTYPES[self.scale].itemsize + (DTYPES[self.offset].itemsize if self.offset else 0)
        row = self.value_bytes(width) + ceil_div(width, self.group_size) * group
        return rows * (row + (4 if self.scale == CODES else 0))

    def value_bytes(self, width: int) -> int:
        """Return the bytes of the integers of a row."""
        return ceil_div(width * self.bits, 8)

    def product_bytes(self, shape: tuple[int, ...]) -> int:
        """A group of inputs and three sums as float64 (numerics.quantized_matmul); of integers that share
        bytes also two copies one by one, of which one stays.
        """
        outputs, inputs = shape[-2:]
        sums = 8 * (min(GROUP, inputs) + 3)
        return outputs * (max(2 * inputs, inputs + sums) if self.bits < 8 else sums)

    def __str__(self) -> str:
        shift = {"": "", "u8": ", zero points"}.get(self.offset, f", {self.offset} minimums")
        scale = "8-bit" if self.scale == CODES else self.scale
        return f"{self.kind} (groups of {self.group_size}, {scale} scales{shift})"


class GroupWeight(StoredWeight):
    """Integers q in groups: scale * (q - zero), or scale * q + minimum; arithmetic is float32 in this order.

    The scales are of one level, f16 or f32; or int8, -127 to 127, in units of `channel_scales` f32
    [..., out]. A subclass is a dataclass with these arrays and its own of integers, which `values_in` names;
    `zero` is the integer that stands for 0 where nothing shifts, and `coded_rows` says how activations are
    rounded beside it (numerics.quantized_matmul).
    """

    kind: ClassVar[str]
    bits: ClassVar[int]
    values_in: ClassVar[str]
    zero: ClassVar[int] = 0
    coded_rows: ClassVar[bool] = False

    scales: Array
    group_size: int
    minimums: Array | None = None
    zeros: Array | None = None
    channel_scales: Array | None = None

    @abstractmethod
    def integers(self) -> Array:
        """Return q, one number each, [..., out, in]."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for _, array in self._arrays())

    @property
    def storage(self) -> GroupStorage:
        offset = self.minimums if self.minimums is not None else self.zeros
        shift = "" if offset is None else DTYPE_NAMES[offset.dtype]
        return GroupStorage(self.kind, self.bits, self.group_size, DTYPE_NAMES[self.scales.dtype], shift)

    def dense(self) -> Floats:
        q, scale = self.integers().astype(np.float32), self.scales.astype(np.float32)
        if self.channel_scales is not None:
            scale = self.channel_scales[..., None] * scale
        scale = self._spread(scale)
        if self.minimums is not None:
            return scale * q + self._spread(self.minimums)
        return scale * (q - (np.float32(self.zero) if self.zeros is None else self._spread(self.zeros)))

    def rows(self, ids: Array) -> Floats:
        return self[ids].dense()

    def product(self, x: Floats) -> Floats:
        """x [T, in] times the matrix transposed, [T, out]: see `quantized_matmul`."""
        if self.channel_scales is None or self.group_size != GROUP:
            raise ValueError(f"only weights with 8-bit scales for groups of {GROUP} have an integer product")
        q = self.integers().view(np.int8)
        if self.zero:
            q = q - np.int8(self.zero)
        return quantized_matmul(x, q, self.scales, self.channel_scales, self.coded_rows)

    def __getitem__(self: G, index: Any) -> G:
        """Some of the first axis: an expert of [experts, out, in], or outputs of a matrix."""
        return self._each(lambda follows, array: array[index])

    def slice(self: G, axis: int, start: int, stop: int) -> G:
        """Cut along the outputs (axis -2) or the inputs (axis -1, whole groups)."""
        size, width = self.group_size, self.shape[-1]
        if axis != -1:
            check_cut(self.shape, axis, start, stop)
            return self._outputs(np.s_[start:stop])
        whole = start % size == 0 and (stop % size == 0 or stop == width)
        require(whole, f"cut [{start}, {stop}) of {width} inputs goes through a group of {size}")
        check_cut(self.shape, axis, start, stop)
        cuts: dict[str, Any] = {
            "inputs": np.s_[..., start * self.bits // 8 : ceil_div(stop * self.bits, 8)],
            "groups": np.s_[..., start // size : ceil_div(stop, size)],
            "outputs": np.s_[...],
        }
        return self._each(lambda follows, array: array[cuts[follows]], **self._of_width(stop - start))

    def every(self: G, first: int, step: int, axis: int = -2) -> G:
        require(axis == -2, f"{self.kind} has no outputs along axis {axis}")
        return self._outputs(np.s_[first::step])

    def transposed(self: G) -> G:
        raise ValueError(f"{self.kind} lies in groups of inputs, which cannot become outputs")

    @classmethod
    def stack(cls: type[G], parts: Sequence[G]) -> G:
        join: Callable[[list[Array]], Array] = np.stack if len(parts) > 1 else lambda one: one[0]
        arrays = [dict(part._arrays()) for part in parts]
        joined = {name: np.ascontiguousarray(join([own[name] for own in arrays])) for name in arrays[0]}
        return replace(parts[0], **joined)  # type: ignore[type-var]

    def _of_width(self, width: int) -> dict[str, Any]:
        """Return the fields that say how many inputs there are, where the integers' array does not."""
        return {}

    def _outputs(self: G, index: Any) -> G:
        where = {"outputs": np.s_[..., index], "inputs": np.s_[..., index, :], "groups": np.s_[..., index, :]}
        return self._each(lambda follows, array: array[where[follows]])

    def _arrays(self) -> Iterator[tuple[str, Array]]:
        for name in (self.values_in, *_FOLLOWS):
            if (array := getattr(self, name)) is not None:
                yield name, array

    def _each(self: G, change: Callable[[str, Array], Array], **others: Any) -> G:
        """Change every array, given what its last axis follows: "inputs", "groups" or "outputs"."""
        changed = {name: change(_FOLLOWS.get(name, "inputs"), array) for name, array in self._arrays()}
        return replace(self, **changed, **others)  # type: ignore[type-var]

    def _spread(self, per_group: Array) -> Floats:
        """[..., groups] -> [..., width]: each group's number for each of its inputs."""
        return np.repeat(per_group.astype(np.float32), self.group_size, axis=-1)[..., : self.shape[-1]]

    def _check(self) -> None:
        """Raise ValueError for arrays that do not belong together."""
        shifts = (self.minimums, self.zeros, self.channel_scales)
        require(sum(a is not None for a in shifts) <= 1, "either minimums, zeros or 8-bit scales")
        self._check_groups(self.scales, *(("f16", "f32") if self.channel_scales is None else (CODES,)))
        if self.minimums is not None:
            self._check_groups(self.minimums, "f16", "f32")
        if self.zeros is not None:
            self._check_groups(self.zeros, "u8")
        if (channels := self.channel_scales) is not None:
            require(channels.dtype == np.float32, "scales of outputs are f32")
            outputs = self.shape[:-1]
            require(channels.shape == outputs, f"{outputs} outputs have {channels.shape} scales")

    def _check_groups(self, per_group: Array, *dtypes: str) -> None:
        require(self.group_size > 0, "a group has at least one input")
        require(DTYPE_NAMES.get(per_group.dtype) in dtypes, f"numbers of a group are {' or '.join(dtypes)}")
        expected = (*self.shape[:-1], ceil_div(self.shape[-1], self.group_size))
        found = per_group.shape
        require(found == expected, f"numbers of groups have shape {found}, not {expected}")


def ceil_div(number: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-number // divisor)
