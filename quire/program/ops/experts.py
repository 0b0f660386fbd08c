"""Mixture of experts: each token is computed by the few experts that its router selects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from quire.program.numerics import ACTIVATIONS, Array, matmul, sigmoid
from quire.program.program import Load, Op, Run, Value, WeightBytes, WeightSpec

Routing = Literal["softmax", "softmax_of_chosen"]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """gate and up [experts, inner, hidden], down [experts, hidden, inner], biases or none."""

    gate: WeightSpec
    up: WeightSpec
    down: WeightSpec
    gate_bias: WeightSpec | None = None
    up_bias: WeightSpec | None = None
    down_bias: WeightSpec | None = None

    def all(self) -> tuple[WeightSpec, ...]:
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        return (self.gate, self.up, self.down, *(b for b in biases if b is not None))


@dataclass(frozen=True, slots=True)
class Experts(Op):
    """out[t] = sum over the chosen experts e of p[t, e] * down_e(activation(gate_e x) * up_e x).

    The `chosen` experts of a token are those with its largest `scores` [T, experts]. p is the softmax over
    all scores ("softmax") or over only the chosen ones ("softmax_of_chosen", the same as normalizing
    the former). With `limit` (gpt-oss) the activation is gate' * sigmoid(1.702 gate') * (up' + 1), gate'
    at most the limit and up' within plus and minus the limit. The sum runs in order of expert number.
    """

    x: Value
    scores: Value
    experts: ExpertWeights
    chosen: int
    routing: Routing
    activation: str
    limit: float | None = None

    def weights(self) -> tuple[WeightSpec, ...]:
        return self.experts.all()

    @property
    def num_experts(self) -> int:
        return self.experts.gate.shape[0]

    def flops(self, load: Load) -> float:
        """Count the products, the gated activation and the weighted sum of each chosen expert."""
        inner, hidden = self.experts.gate.shape[-2:]
        one = 2 * 3 * inner * hidden + 5 * inner + 2 * hidden
        return load.size(self.out.count) * self.chosen * one

    def weight_bytes(self, load: Load, nbytes: WeightBytes) -> float:
        """Return the bytes of the expected number of distinct experts under uniform independent routing."""
        touched = load.touched(self.out.count, self.chosen, self.num_experts)
        return touched * sum(nbytes(w) for w in self.weights())

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x, scores = inputs
        picked, shares = self.route(scores)
        out = np.zeros((len(x), *self.out.shape), np.float32)
        for expert in np.unique(picked):
            tokens, rank = np.nonzero(picked == expert)
            out[tokens] += shares[tokens, rank][:, None] * self._expert(run, int(expert), x[tokens])
        return out

    def route(self, scores: Array) -> tuple[np.ndarray, Array]:
        """Return (expert indices, shares), [T, chosen] each, best first; ties go to the lower index."""
        picked = np.argsort(-scores, axis=-1, kind="stable")[:, : self.chosen]
        chosen = np.take_along_axis(scores, picked, axis=-1)
        raised = np.exp(chosen - chosen[:, :1])
        if self.routing == "softmax_of_chosen":
            return picked, raised / raised.sum(axis=-1, keepdims=True)
        return picked, raised / np.exp(scores - chosen[:, :1]).sum(axis=-1, keepdims=True)

    def _expert(self, run: Run, expert: int, x: Array) -> Array:
        def linear(x: Array, weight: WeightSpec, bias: WeightSpec | None) -> Array:
            product = matmul(x, run.matrix(weight)[expert])
            return product if bias is None else product + run.weights[bias.name][expert]

        gate = linear(x, self.experts.gate, self.experts.gate_bias)
        up = linear(x, self.experts.up, self.experts.up_bias)
        if self.limit is None:
            inner = ACTIVATIONS[self.activation](gate) * up
        else:
            gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
            inner = gate * sigmoid(np.float32(1.702) * gate) * (up + np.float32(1))
        return linear(inner, self.experts.down, self.experts.down_bias)
