"""Triton's interpreter without PyTorch: kernels run on memory of this process.

Import this module before any kernel: it asks Triton to interpret. It mends faults of the interpreter of
Triton 3.9: of bfloat16, kept as 16-bit codes, products multiplied the codes, and conversion from float32 cut
bits off where a GPU rounds to nearest even; and a comparison of scalars became a tile of integers. It keeps
the types of tiles, which the interpreter makes anew for each operation, and which take most of its time. It
says nothing of races, speed, or the order of sums on a GPU.
"""

from __future__ import annotations

import warnings

from quire.environment import hand_down

hand_down({"TRITON_INTERPRET": "1"})  # read by Triton when it is imported

from collections.abc import Mapping, Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from functools import cache  # noqa: E402
from typing import Any, ClassVar  # noqa: E402

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import triton.language as tl  # noqa: E402
from triton._utils import validate_block_shape  # noqa: E402
from triton.language.semantic import TritonSemantic  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

_TYPES = {
    "float32": tl.float32,
    "float64": tl.float64,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float8_e4m3fn": tl.float8e4nv,
    "int64": tl.int64,
    "int32": tl.int32,
    "int16": tl.int16,
    "uint16": tl.uint16,
    "int8": tl.int8,
    "uint32": tl.uint32,
    "uint8": tl.uint8,
}
_NUMBERS = {
    tl.int1: np.bool_,
    tl.uint64: np.uint64,
} | {kind: np.dtype(name) for name, kind in _TYPES.items() if name not in ("bfloat16", "float8_e4m3fn")}
_STORED = {tl.bfloat16: np.dtype(ml_dtypes.bfloat16), tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn)}


@dataclass(frozen=True)
class Pointer:
    """An address with the type of what is there, in place of a tensor; `dtype` is a NumPy name."""

    address: int
    type: str

    @classmethod
    def to(cls, array: np.ndarray) -> Pointer:
        """Return the address of a contiguous array, which must outlive the launch."""
        if not array.flags.c_contiguous:
            raise ValueError("a kernel reads contiguous arrays")
        return cls(array.ctypes.data, array.dtype.name)

    @property
    def dtype(self) -> Any:
        return _TYPES[self.type]

    def data_ptr(self) -> int:
        return self.address

    # Triton copies the arguments of a launch to the host and back; these are there already.

    def untyped_storage(self) -> Pointer:
        return self

    def cpu(self) -> Pointer:
        return self

    def new_empty(self, *_: Any, **__: Any) -> Pointer:
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return ()

    def stride(self) -> tuple[int, ...]:
        return ()

    def set_(self, *_: Any) -> None: ...

    def copy_(self, *_: Any) -> None: ...


def run(
    kernel: InterpretedFunction[Any],
    grid: tuple[int, ...],
    args: Sequence[Pointer | TensorDescriptor | np.ndarray | int | float],
    constants: Mapping[str, Any],
) -> None:
    """Run a kernel once for each point of the grid, in order. Arrays are passed by address."""
    ready = [Pointer.to(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    with np.errstate(all="ignore"), warnings.catch_warnings():  # NaN and infinity are valid results
        warnings.simplefilter("ignore", RuntimeWarning)
        kernel[grid](*ready, **constants)


def tiled(array: np.ndarray, tile: tuple[int, int]) -> TensorDescriptor:
    """Return a matrix as kernels take it by tiles."""
    return TensorDescriptor(Pointer.to(array), list(array.shape), [array.shape[1], 1], list(tile))


def _to_float32(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar not in _STORED:
        return handle
    stored = handle.data.view(_STORED[handle.dtype.scalar])
    return TensorHandle(stored.astype(np.float32), tl.float32)


def _cast(self: Any, source: TensorHandle, to: Any, *_: Any) -> TensorHandle:
    """Convert numbers; those of formats that NumPy lacks by way of float32, rounded to nearest even."""
    wide = _to_float32(source)
    if (stored := _STORED.get(to.scalar)) is not None:
        codes = wide.data.astype(np.float32).astype(stored).view(f"u{stored.itemsize}")
        return TensorHandle(codes, to.scalar)
    return TensorHandle(wide.data.astype(_NUMBERS[to.scalar]), to.scalar)


def _dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any) -> TensorHandle:
    """Multiply tiles in the type of the accumulator, which holds products of two narrow numbers exactly.

    One input after the other: BLAS adds those of a row in an order that depends on the row's place in the
    tile, on some processors.
    """
    kind = d.data.dtype
    left, right = (np.ascontiguousarray(_to_float32(x).data.astype(kind)) for x in (a, b))
    total = np.zeros(d.data.shape, kind)
    for own, other in zip(left.T, right, strict=True):
        total += own[:, None] * other
    return TensorHandle(total + d.data, d.dtype.scalar)


def _splat(self: Any, to: Any, scalar: TensorHandle) -> TensorHandle:
    """Fill a tile with a scalar as it is: that of a comparison has the type of what was compared."""
    return TensorHandle(np.full(to.shape, scalar.data.item(), scalar.data.dtype), scalar.dtype.scalar)


def _language_everywhere() -> None:
    """Replace Triton's language by the interpreter's once, not anew in each call of each function."""
    scope = interpreter._patch_lang(_EveryModule)
    interpreter._patch_lang = lambda _: type(scope)()  # nothing to undo


class _EveryModule:
    """Stands for a function that uses every module of the language."""

    __globals__: ClassVar[dict[str, Any]] = {"tl": tl, "core": tl.core}


class _Shape:
    """A shape as types and tensors have it: made once for each, and never changed."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.of_type = tl.tuple(shape)
        self.numel = validate_block_shape(shape)
        self.of_tensor = tl.tuple([tl.constexpr(size) for size in shape])
        self.constexpr_numel = tl.constexpr(self.numel)


@cache
def _shape(shape: tuple[int, ...]) -> _Shape:
    if not shape:
        raise TypeError("a tile has at least one axis")
    return _Shape(shape)


_SCALAR = tl.tuple([]), tl.constexpr(1)


def _set_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    known = _shape(sizes)
    self.element_ty, self.shape, self.numel, self.known = element_ty, known.of_type, known.numel, known


def _name(self: Any) -> str:
    return f"<{self.shape}, {self.element_ty}>"


def _set_tensor(self: Any, handle: Any, type: Any) -> None:
    known = getattr(type, "known", None)
    self.shape, self.numel = (known.of_tensor, known.constexpr_numel) if known else _SCALAR
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Return tensors of one shape; those that have one are returned as they are."""
    if getattr(left.type, "known", None) is getattr(right.type, "known", None):
        return left, right
    return _broadcast_any(self, left, right)


_broadcast_any = TritonSemantic.broadcast_impl_value


def _is_type(self: Any, other: Any) -> bool:
    return self is other or _is_type_by_name(self, other)


_is_type_by_name = tl.dtype.__eq__


def _mend() -> None:
    for name in ("cast_impl", "create_fp_to_fp", "create_fp_ext", "create_fp_trunc"):
        setattr(InterpreterBuilder, name, _cast)
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.create_splat = _splat
    tl.block_type.__init__, tl.block_type.name = _set_block_type, property(_name)
    tl.dtype.__eq__ = _is_type
    tl.tensor.__init__ = _set_tensor
    TritonSemantic.broadcast_impl_value = _broadcast


_mend()
_language_everywhere()
