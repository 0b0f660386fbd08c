"""Routings of experts, as the native core takes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.backends.native import _core
from quire.program.ops.experts import Routing
from quire.program.program import WeightSpec


def routing_of(of: Routing, vector: Callable[[WeightSpec | None], np.ndarray | None]) -> _core.Routing:
    """Return a routing, whose weights `vector` gives as vectors."""
    return _core.Routing(
        of.chosen,
        affinity=of.affinity,
        normalized=of.normalized,
        bias=vector(of.bias),
        groups=of.groups,
        kept_groups=of.kept_groups,
        by_two=of.group_rank == "top2",
        scaling=of.scaling,
        floor=of.floor,
        factors=vector(of.factors),
        on_inputs=of.on_inputs,
        margin=-1.0 if of.margin is None else of.margin,
        listed=vector(of.listed),
    )
