"""Programs: models as flat lists of ops, the interface between mathematics and hardware."""

from quire.program.builder import Builder, Names
from quire.program.caches import (
    CacheSpec,
    PagedIndex,
    PagedInputs,
    PagedKV,
    PagedLatent,
    PagedVectors,
    SlotState,
)
from quire.program.program import Cost, LeftOut, Load, Op, Program, Rows, Value, Weight, WeightSpec

__all__ = [
    "Builder",
    "CacheSpec",
    "Cost",
    "LeftOut",
    "Load",
    "Names",
    "Op",
    "PagedIndex",
    "PagedInputs",
    "PagedKV",
    "PagedLatent",
    "PagedVectors",
    "Program",
    "Rows",
    "SlotState",
    "Value",
    "Weight",
    "WeightSpec",
]
