"""All shapes that are measured, by their names."""

from __future__ import annotations

from peers import checkpoints
from peers.checkpoints import Shape
from peers.hybrids import HYBRIDS

SHAPES: dict[str, Shape] = {**checkpoints.SHAPES, **HYBRIDS}
