"""Programs on the native backend: one checkpoint in memory for it and for its reference twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import Dense, Paged, random_weights
from tiny import plain as plain

from quire.backends.device import plan_weights
from quire.backends.native import _core
from quire.backends.native.backend import NativeBackend
from quire.backends.native.device import NativeDevice
from quire.backends.native.weights import Packed, load_packed
from quire.program import Builder, Names, Program, Value, numerics
from quire.program.ops import experts, linear
from quire.program.passes import fuse
from quire.quantize.kinds import DTYPES
from quire.weights.load import load
from quire.weights.plan import WeightPlan, all_in, plan
from quire.weights.safetensors import Checkpoint, TensorEntry

ISAS: tuple[str, ...] = tuple(_core.isas())  # of this machine, best first
Record = Callable[..., Value]  # of a Builder and Values
BF16_ISAS = ("avx512_vnni_bf16", "avx512_amx", "avx512_amx_twin")  # with products of bfloat16
FORMATS = ("f32", "f16", "bf16", "int8", "int4")
_TAGS = {DTYPES["f32"]: "F32", DTYPES["f16"]: "F16", DTYPES["bf16"]: "BF16"}


class Tensors(Checkpoint):
    """A checkpoint of arrays in memory."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays, nowhere = dict(arrays), Path("memory")
        super().__init__(
            nowhere,
            {
                n: TensorEntry(n, _TAGS[a.dtype], a.shape, nowhere, 0, a.nbytes)
                for n, a in self.arrays.items()
            },
        )

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def integers(self, name: str) -> np.ndarray:
        return self.arrays[name].astype(np.int64)

    def _advise(self, name: str, advice: int) -> None:
        """Memory is not read ahead."""


def tensors(weights: Mapping[str, Dense], format: str, **kept: np.ndarray) -> Tensors:
    """The weights of a plain program in this format, and those that are `kept` as they are.

    They are float32 for int8 and int4, which are made of them while loading.
    """
    dtype = DTYPES.get(format, DTYPES["f32"])
    return Tensors({name: kept.get(name, weight.array.astype(dtype)) for name, weight in weights.items()})


def scheme(format: str) -> str | None:
    """What `quantization` gives this format."""
    return format if format in ("int8", "int4") else None


def planned(program: Program, checkpoint: Checkpoint, quantization: str | None = None) -> WeightPlan:
    """How the native backend keeps the weights of a program."""
    return plan_weights(NativeDevice("test"), program, checkpoint, quantization, all_in("bf16"))


def nodes_of(threads: int | Sequence[int]) -> _core.Nodes:
    """So many threads, or so many on each of several nodes that this machine need not have."""
    return _core.Nodes(threads) if isinstance(threads, int) else _core.Nodes.of(threads)


def native(isa: str, threads: int | Sequence[int] = 1) -> Callable[..., NativeBackend]:
    """What Paged makes its backend with; its weights are then Packed."""
    return partial(_make, isa, threads)


def _make(
    isa: str,
    threads: int | Sequence[int],
    program: Program,
    packed: Packed,
    *,
    kv_cache_dtype: str,
    num_slots: int,
    **size: Any,
) -> NativeBackend:
    dtype = "float32" if kv_cache_dtype == "auto" else kv_cache_dtype
    how: dict[str, Any] = {"kv_cache_dtype": dtype, "isa": isa, "nodes": nodes_of(threads), **size}
    how["max_num_seqs"] = num_slots
    return NativeBackend(program, packed.matrices, packed.vectors, **how)


def on_native(
    program: Program,
    checkpoint: Tensors,
    format: str,
    isa: str,
    threads: int | Sequence[int] = 1,
    **options: Any,
) -> Paged:
    """A plain program with its weights packed as `format`."""
    packed = load_packed(planned(program, checkpoint, scheme(format)), isa=isa, nodes=nodes_of(threads))
    return Paged(program, packed, **options, make=native(isa, threads))


def in_used_blocks(op: OneOp, dtype: str, isa: str, counts: Sequence[int]) -> list[np.ndarray]:
    """Results of tokens 80 to 150 in steps of `counts`: in blocks never used, then in those of 0 to 80."""
    results = []
    for block_size, used in [(16, False), (8, True), (16, True), (64, True)]:
        how = {"kv_cache_dtype": dtype, "block_size": block_size, "num_blocks": 20}
        paged = on_native(op.program, op.checkpoint(), "f32", isa, **how)
        if used:
            before = paged.sequence(range(80))
            paged.step([(before, 80)])
            paged.free += before.blocks
        after = paged.sequence(range(80, 150))
        results.append(np.concatenate([paged.step([(after, count)])[0] for count in counts]))
    return results


def on_reference(program: Program, checkpoint: Tensors, format: str, **options: Any) -> Paged:
    """The same on the reference backend."""
    weights = load(plan(program.weights(), checkpoint, scheme(format), ()))
    return Paged(program, weights, **options)


def rounds_to_bf16(isa: str, format: str) -> bool:
    """Whether products round their activations: the machine multiplies pairs of bfloat16."""
    return format == "bf16" and isa in BF16_ISAS


@contextmanager
def rounding_to_bf16(rounded: bool = True) -> Iterator[None]:
    """The products of the reference round their activations as well, but for those with codes of integers."""

    def product(x: np.ndarray, weight: Any) -> np.ndarray:
        if isinstance(weight, np.ndarray) or getattr(weight, "table", None) in ("e4m3", "e5m2"):
            x = x.astype(DTYPES["bf16"]).astype(np.float32)
        return numerics.matmul(x, weight)

    with pytest.MonkeyPatch.context() as patch:
        for module in (linear, experts) if rounded else ():
            patch.setattr(module, "matmul", product)
        yield


class OneOp:
    """A program that `record` makes of values given as arrays [tokens, *shape], with random weights.

    `run` computes the tokens as sequences of these `lengths`, each from position `start` on.
    """

    def __init__(self, inputs: list[np.ndarray], record: Record, lengths: tuple[int, ...] = ()) -> None:
        tokens, b, first = len(inputs[0]), Builder(), 0
        self.table = np.concatenate([x.reshape(tokens, -1) for x in inputs], axis=1)
        wide, values = b.embed(Names("x"), *self.table.shape), []
        for x in inputs:
            values.append(b.slice(wide, first, x.shape[1:]))
            first += values[-1].width
        self.program = plain(fuse(b.program(record(b, *values))))
        self.lengths = lengths or (tokens,)
        self.weights = {**random_weights(self.program), "x.weight": Dense(self.table)}

    def reference(
        self, format: str = "f32", start: int = 0, *, rounded: bool = False, **how: Any
    ) -> np.ndarray:
        checkpoint = self.checkpoint(format)
        with rounding_to_bf16(rounded):
            return self.run(on_reference(self.program, checkpoint, format, **how), start)

    def native(self, isa: str, format: str = "f32", start: int = 0, **how: Any) -> np.ndarray:
        return self.run(on_native(self.program, self.checkpoint(format), format, isa, **how), start)

    def checkpoint(self, format: str = "f32", **kept: np.ndarray) -> Tensors:
        return tensors(self.weights, format, **{"x.weight": self.table, **kept})

    def run(self, paged: Paged, start: int = 0) -> np.ndarray:
        """What the op gives for all tokens, [tokens, width]."""
        rows, first = [], 0
        for length in self.lengths:
            sequence = paged.sequence([*[0] * start, *range(first, first + length)])
            sequence.computed = start
            rows.append((sequence, length))
            first += length
        return np.concatenate(paged.step(rows)).reshape(first, -1)


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in parts of the largest magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
