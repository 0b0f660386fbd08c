"""Programs: models as flat lists of ops. The waist between mathematics and hardware."""

from quire.program.builder import Builder, Names
from quire.program.program import Cost, KVLayer, Load, Op, Program, Value, Weight, WeightSpec

__all__ = ["Builder", "Cost", "KVLayer", "Load", "Names", "Op", "Program", "Value", "Weight", "WeightSpec"]
