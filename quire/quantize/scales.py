"""Scales of groups of inputs, one level or two, in any number format, as checkpoints store them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from quire.quantize.kinds import DTYPES, Array, Floats, require, to_float32

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# Number formats by name. e8m0 is a power of two, 2^(byte - 127), and NaN for the byte 255.
FORMATS: Mapping[str, np.dtype[Any]] = DTYPES | {
    "e8m0": np.dtype(np.uint8),
    "e4m3": _E4M3,
}
_NAMES = {dtype: name for name, dtype in FORMATS.items()}
_CODES = {np.dtype(np.uint8): "u8", np.dtype(np.int8): "i8", _E4M3: "e4m3"}

with np.errstate(under="ignore"):
    _POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class ScaleForm:
    """The form of scales: the format of `values` and of `codes`, and how many groups share a value.

    0 in `together` stands for all groups of a row. With `divided` codes are divided by values.
    """

    values: str
    codes: str | None = None
    code_bits: int = 0
    together: int = 1
    divided: bool = False

    def nbytes(self, groups: int) -> int:
        """Return the bytes of the scales of one output."""
        blocks = -(-groups // (self.together or groups))
        return blocks * FORMATS[self.values].itemsize + (groups if self.codes else 0)

    def __str__(self) -> str:
        return f"two-level {self.values}" if self.codes else self.values


@dataclass(frozen=True, eq=False)
class Scales:
    """A number for each group of inputs of each output.

    `values` [..., out, blocks] are f16, bf16, f32, e4m3 or, as uint8, e8m0. Without `codes` a block is a
    group. With `codes` [..., out, groups], uint8, int8 or e4m3, the number of a group is float32(value of its
    block) * float32(code), or float32(code) / float32(value) if `divided`; a block is `together` groups, or
    all groups of the output if 0. Integer codes have `code_bits` bits.
    """

    values: Array
    codes: Array | None = None
    together: int = 1
    code_bits: int = 8
    divided: bool = False

    def __post_init__(self) -> None:
        require(self.values.dtype in _NAMES, f"scales cannot be {self.values.dtype}")
        if self.codes is None:
            require(self.together == 1, "only two-level scales have several groups in a block")
            return
        require(self.codes.dtype in _CODES, f"codes of scales cannot be {self.codes.dtype}")
        together = self.together or max(self.codes.shape[-1], 1)
        expected = (*self.codes.shape[:-1], -(-self.codes.shape[-1] // together))
        require(self.values.shape == expected, f"scales have shape {self.values.shape}, not {expected}")

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., out, groups)."""
        return tuple((self.values if self.codes is None else self.codes).shape)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.codes is None else self.codes.nbytes)

    @property
    def form(self) -> ScaleForm:
        name = _NAMES[self.values.dtype]
        if self.codes is None:
            return ScaleForm(name)
        return ScaleForm(name, _CODES[self.codes.dtype], self.code_bits, self.together, self.divided)

    def floats(self) -> Floats:
        """Return the numbers as float32, [..., out, groups]."""
        values = _POWERS[self.values] if self.values.dtype == np.uint8 else _widened(self.values)
        if self.codes is None:
            return values
        groups = self.codes.shape[-1]
        wide = np.repeat(values, self.together or groups, axis=-1)[..., :groups]
        codes = self.codes.astype(np.float32)
        return codes / wide if self.divided else wide * codes

    def map(self, change: Callable[[Array], Array]) -> Scales:
        """Apply an indexing of leading axes to all arrays."""
        codes = None if self.codes is None else change(self.codes)
        return replace(self, values=change(self.values), codes=codes)

    @staticmethod
    def stack(parts: Sequence[Scales]) -> Scales:
        """Join scales of one form along a new first axis."""
        codes = [part.codes for part in parts if part.codes is not None]
        values = np.stack([part.values for part in parts])
        return replace(parts[0], values=values, codes=np.stack(codes) if codes else None)


def _widened(values: Array) -> Floats:
    return values.astype(np.float32) if values.dtype == _E4M3 else to_float32(values)
