"""The ops, by topic. Each has its contract, its cost and its NumPy reference in one class."""

from quire.program.ops.attention import Attention
from quire.program.ops.elementwise import Add, GatedActivation, Scale, Slice, SoftCap, Unary
from quire.program.ops.embedding import Embed, PositionEmbed, SampledRows
from quire.program.ops.experts import Experts
from quire.program.ops.linear import GatedLinear, Linear
from quire.program.ops.norm import AddNorm, LayerNorm, RMSNorm
from quire.program.ops.rotary import Rotary
from quire.program.ops.state import GatedRecurrence, ShortConvolution

__all__ = [
    "Add",
    "AddNorm",
    "Attention",
    "Embed",
    "Experts",
    "GatedActivation",
    "GatedLinear",
    "GatedRecurrence",
    "LayerNorm",
    "Linear",
    "PositionEmbed",
    "RMSNorm",
    "Rotary",
    "SampledRows",
    "Scale",
    "ShortConvolution",
    "Slice",
    "SoftCap",
    "Unary",
]
