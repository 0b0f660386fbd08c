"""Programs: models as flat lists of ops, the interface between mathematics and hardware."""

from quire.program.builder import Builder, Names
from quire.program.caches import CacheSpec, PagedIndex, PagedKV, PagedLatent, SlotState
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
    "PagedKV",
    "PagedLatent",
    "Program",
    "Rows",
    "SlotState",
    "Value",
    "Weight",
    "WeightSpec",
]
