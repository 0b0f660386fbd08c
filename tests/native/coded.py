"""Checkpoints with weights of other formats, in memory, and weights by chance in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from lowered import Tensors

from quire.quantize.coded import Coded, pack_codes
from quire.quantize.kinds import StoredWeight
from quire.quantize.scales import FORMATS, Scales

# What `coded` takes for kinds of GGUF that are integers.
GGUF_KINDS: dict[str, dict[str, Any]] = {
    "q4_0": {"bits": 4, "table": "offset"},
    "q4_1": {"bits": 4, "minimums": "f16"},
    "q5_0": {"bits": 5, "table": "offset"},
    "q8_0": {"bits": 8, "table": "signed"},
    "q2_k": {"bits": 2, "group": 16, "scales": "i8", "minimums": "i8"},
    "q3_k": {"bits": 3, "table": "offset", "group": 16, "scales": "i8"},
    "q4_k": {"bits": 4, "scales": "u6", "minimums": "u6"},
    "q5_k": {"bits": 5, "scales": "u6", "minimums": "u6"},
    "q6_k": {"bits": 6, "table": "offset", "group": 16, "scales": "i8"},
}


class Header(NamedTuple):
    """The header of a tensor that is in memory."""

    weight: Coded
    place: str = "memory"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def storage(self) -> Any:
        return self.weight.storage


class Mixed(Tensors):
    """Arrays in memory, some of them Coded."""

    def __init__(self, arrays: Mapping[str, np.ndarray], coded: Mapping[str, Coded]) -> None:
        super().__init__({name: array for name, array in arrays.items() if name not in coded})
        self.coded = coded
        self._entries |= {name: Header(weight) for name, weight in coded.items()}  # type: ignore[misc]

    def pull(self, name: str) -> StoredWeight:  # type: ignore[override]
        return self.coded[name] if name in self.coded else super().pull(name)


def numbers_of(rng: np.random.Generator, shape: tuple[int, ...], form: str) -> Scales:
    """Scales or minimums by chance; `form` is a number format, or "i8" or "u6" for codes under f16."""
    if form == "e8m0":
        return Scales(rng.integers(118, 128, shape).astype(np.uint8))
    if form in ("i8", "u6"):
        codes = rng.integers(-100, 128, shape).astype(np.int8)
        if form == "u6":
            codes = rng.integers(0, 64, shape).astype(np.uint8)
        together = 16 if form == "i8" else 8
        values = rng.standard_normal((*shape[:-1], -(-shape[-1] // together))) * 0.002
        return Scales(values.astype(np.float16), codes, together, 8 if form == "i8" else 6)
    return Scales((rng.standard_normal(shape) * 0.1).astype(FORMATS[form]))


def coded(
    shape: tuple[int, ...],
    bits: int,
    table: str = "unsigned",
    group: int | None = 32,
    scales: str = "f16",
    minimums: str | None = None,
    zeros: bool = False,
    ordered: bool = False,
    seed: int = 0,
) -> Coded:
    """Make a weight by chance, [..., out, in]."""
    rng = np.random.default_rng([seed, bits, *shape])
    codes, groups = rng.integers(0, 1 << bits, shape).astype(np.uint8), -(-shape[-1] // (group or shape[-1]))
    rows = (*shape[:-1], groups)
    order = None
    if ordered:
        order = np.broadcast_to(rng.permutation(shape[-1]).astype(np.int32), (*shape[:-2], shape[-1]))
    return Coded(
        "made",
        pack_codes(codes, bits),
        bits,
        shape[-1],
        table,
        group,
        numbers_of(rng, rows, scales),
        None if minimums is None else numbers_of(rng, rows, minimums),
        rng.integers(0, 1 << bits, rows).astype(np.uint8) if zeros else None,
        order,
    )
