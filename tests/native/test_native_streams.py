"""Hyper-connections of the native backend against their reference twins, on every instruction set."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from lowered import ISAS, OneOp
from test_ops import draw
from tiny import same_bits

from quire.models.streams import Streams
from quire.program import Builder, Value
from quire.program.ops import GatedActivation


@pytest.mark.parametrize("isa", ISAS)
def test_layers_of_streams(isa: str) -> None:
    for streams, hidden, logits in product([1, 2, 4], [1, 33], [False, True]):

        def record(b: Builder, x: Value, n: int = streams, logits: bool = logits) -> Value:
            of = Streams(b, n, 1e-5, 1e-6, rounds=20)
            s = of.begin(x)
            w = of.weights(s, "a.{}")
            s = of.mix(s, b.scale(of.collapse(s, w), 3.0), w)
            s = b.sampled_rows(s) if logits else s
            return of.collapse(s, of.weights(s, "b.{}", reading=True))

        op = OneOp([draw(21, hidden)], record)
        found = op.native(isa, threads=2)
        np.testing.assert_allclose(found, op.reference(), rtol=3e-5, atol=3e-5)
        op.lengths = (3,)
        assert same_bits(op.native(isa), found[:3])


@pytest.mark.parametrize("isa", ISAS)
def test_gates_with_a_limit(isa: str) -> None:
    def record(b: Builder, gate: Value, up: Value) -> Value:
        return b.record(GatedActivation(b.value(up.shape), gate, up, "silu", 0.7)).out

    gate, up = draw(20, 37), draw(20, 37, seed=1) * 3
    gate[3, 4], up[4, 5] = np.inf, -np.inf
    op = OneOp([gate, up], record)
    np.testing.assert_allclose(op.native(isa), op.reference(), rtol=1e-5, atol=1e-6)
    wide = np.minimum(gate.astype(float), 0.7)
    expected = wide / (1 + np.exp(-wide)) * np.clip(up, -0.7, 0.7)
    np.testing.assert_allclose(op.reference(), expected, rtol=1e-5, atol=1e-6)
