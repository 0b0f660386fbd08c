"""The ops, by topic. Each has its contract, its cost and its NumPy reference in one class."""

from quire.program.ops.attention import Attention, RowAttention, SharedAttention
from quire.program.ops.compressed import Compress, CompressedAttention
from quire.program.ops.delta import DeltaRule
from quire.program.ops.elementwise import (
    Add,
    Clip,
    GatedActivation,
    Join,
    Scale,
    ScaleByPosition,
    ScaleByWeight,
    ScaleParts,
    Slice,
    SoftCap,
    Standardize,
    Unary,
    Xielu,
)
from quire.program.ops.embedding import (
    Embed,
    EmbedSegments,
    PoolRows,
    PositionEmbed,
    PreviousHidden,
    SampledRows,
)
from quire.program.ops.experts import Experts
from quire.program.ops.images import JoinRows, MeanOfRows, MixedRows, Patches, PlaceImages, RotaryAt
from quire.program.ops.latent import ChoosePositions, LatentAttention
from quire.program.ops.linear import GatedLinear, Linear, LinearByHead
from quire.program.ops.norm import AboveCutoff, AddNorm, GatedRMSNorm, LayerNorm, MatchMagnitude, RMSNorm
from quire.program.ops.rotary import Rotary
from quire.program.ops.state import GatedRecurrence, ShortConvolution
from quire.program.ops.state_space import StateSpace
from quire.program.ops.streams import CollapseStreams, MixStreams, RepeatStreams, StreamWeights

__all__ = [
    "AboveCutoff",
    "Add",
    "AddNorm",
    "Attention",
    "ChoosePositions",
    "Clip",
    "CollapseStreams",
    "Compress",
    "CompressedAttention",
    "DeltaRule",
    "Embed",
    "EmbedSegments",
    "Experts",
    "GatedActivation",
    "GatedLinear",
    "GatedRMSNorm",
    "GatedRecurrence",
    "Join",
    "JoinRows",
    "LatentAttention",
    "LayerNorm",
    "Linear",
    "LinearByHead",
    "MatchMagnitude",
    "MeanOfRows",
    "MixStreams",
    "MixedRows",
    "Patches",
    "PlaceImages",
    "PoolRows",
    "PositionEmbed",
    "PreviousHidden",
    "RMSNorm",
    "RepeatStreams",
    "Rotary",
    "RotaryAt",
    "RowAttention",
    "SampledRows",
    "Scale",
    "ScaleByPosition",
    "ScaleByWeight",
    "ScaleParts",
    "SharedAttention",
    "ShortConvolution",
    "Slice",
    "SoftCap",
    "Standardize",
    "StateSpace",
    "StreamWeights",
    "Unary",
    "Xielu",
]
