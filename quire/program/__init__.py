"""Programs: models as flat lists of ops, the interface between mathematics and hardware."""

from quire.program.builder import Builder, Names
from quire.program.caches import CacheSpec, PagedKV, PagedLatent, SlotState
from quire.program.program import Cost, Load, Op, Program, Value, Weight, WeightSpec

__all__ = [
    "Builder",
    "CacheSpec",
    "Cost",
    "Load",
    "Names",
    "Op",
    "PagedKV",
    "PagedLatent",
    "Program",
    "SlotState",
    "Value",
    "Weight",
    "WeightSpec",
]
