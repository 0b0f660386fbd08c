"""Lowering attention over caches, and what belongs to it, to the native core."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatchmethod
from typing import Any

import numpy as np

from quire.backends.native import _core
from quire.backends.native.caches import NativeCaches
from quire.program import ops
from quire.program.program import Value, WeightSpec

OverPositions = ops.Attention | ops.SharedAttention | ops.LatentAttention | ops.ChoosePositions
CachedAttention = OverPositions | ops.Compress | ops.CompressedAttention


class AttentionLowering:
    """Records these ops in the core. `at` is the buffer of a value, `vector` the numbers of a weight."""

    def __init__(
        self,
        native: _core.Native,
        caches: NativeCaches,
        at: Callable[[Value], int],
        vector: Callable[[WeightSpec | None], np.ndarray | None],
    ) -> None:
        self._native, self._paged, self._at, self._vector = native, caches.paged, at, vector

    @singledispatchmethod
    def record(self, op: CachedAttention) -> None:
        raise TypeError(f"{type(op).__name__} reads no cache")

    @record.register
    def _(self, op: ops.Attention) -> None:
        self._native.write_kv(self._at(op.k), self._at(op.v), *self._paged[op.layer])
        self._attend(op, chunked=op.chunked, softcap=op.softcap or 0.0, sinks=self._vector(op.sinks))

    @record.register
    def _(self, op: ops.SharedAttention) -> None:
        self._attend(op, chunked=False, softcap=0.0, sinks=None)

    def _attend(self, op: ops.Attention | ops.SharedAttention, **how: Any) -> None:
        cache, layer = self._paged[op.layer]
        heads, window = op.q.shape[0], op.window or 0
        own: dict[str, Any] = {"heads": heads, "scale": op.scale, "window": window, "causal": op.causal}
        self._native.attend(op.q.count, self._at(op.out), self._at(op.q), cache, layer, **own, **how)

    @record.register
    def _(self, op: ops.LatentAttention) -> None:
        out, q, q_rest, c, r = (self._at(value) for value in (op.out, op.q, op.q_rope, op.c, op.r))
        self._native.write_kv(r, c, *self._paged[op.layer])
        how = (op.q.shape[0], op.scale, *self._lists(op))
        cache, layer = self._paged[op.layer]
        self._native.attend_latents(out, q, q_rest, cache, layer, *how)

    def _lists(self, op: ops.LatentAttention | ops.CompressedAttention) -> tuple[int, int]:
        """Return the buffer of the lists of an op, if it has any, and how long they are."""
        return (-1, 0) if op.chosen is None else (self._at(op.chosen), op.chosen.width)

    @record.register
    def _(self, op: ops.ChoosePositions) -> None:
        out, q, factors, k = (self._at(value) for value in (op.out, op.q, op.factors, op.k))
        where, how = self._paged[op.layer], (op.q.shape[0], op.number)
        self._native.write_kv(k, k, *where)
        self._native.choose_positions(out, q, factors, *where, *how)

    @record.register
    def _(self, op: ops.Compress) -> None:
        where, bias = self._paged[op.layer], self._vector(op.bias)
        assert bias is not None
        inputs = (self._at(op.values), self._at(op.gates))
        self._native.compress(self._at(op.out), *inputs, *where, bias, op.every, op.out.width)

    @record.register
    def _(self, op: ops.CompressedAttention) -> None:
        out, q, k = (self._at(value) for value in (op.out, op.q, op.k))
        cache, layer = self._paged[op.layer]
        self._native.write_kv(k, k, cache, layer)
        entries, entry_layer = None, -1
        if op.entries is not None:
            entries, entry_layer = self._paged[op.entry_layer]
            self._native.write_kv(self._at(op.entries), self._at(op.entries), entries, entry_layer)
        of_entries = (entries, entry_layer, *self._lists(op))
        how = (op.q.shape[0], op.scale, op.window, self._vector(op.sinks))
        self._native.attend_vectors(out, q, cache, layer, *how, *of_entries)
