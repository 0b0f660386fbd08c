"""Hyper-connections: hidden states in several streams that each layer reads as one, and mixes anew.

Source: Zhu et al., arXiv:2409.19606; with matrices whose rows and columns sum to one (mHC), arXiv:2512.24880.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.numerics import Array
from quire.program.program import Load, Op, Run, Value, WeightSpec


@dataclass(frozen=True, slots=True)
class RepeatStreams(Op):
    """out[t, i] = x[t]: x [T, hidden], out [T, streams, hidden]."""

    x: Value

    def flops(self, load: Load) -> float:
        return 0

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        return np.repeat(inputs[0][:, None], self.out.shape[0], axis=1)


@dataclass(frozen=True, slots=True)
class StreamWeights(Op):
    """out = the weights by which each token's streams x [T, n, hidden] are read, written and mixed.

    `mixed` is x times a matrix, [T, n] or [T, n (n + 2)]; m = mixed / sqrt(mean of x^2 + eps) * scale + base,
    with a scale for each of up to three parts. Weights of reading are sigmoid(m) + floor for the first n;
    those of writing 2 sigmoid(m) for the next n. The others are a matrix [n, n] of weights from stream to
    stream: the softmax of each row of m, + floor, then made doubly stochastic (Sinkhorn): columns are divided
    by their sums + floor, then `rounds` - 1 times rows and columns. Computed in float64, rounded once.
    """

    x: Value
    mixed: Value
    base: WeightSpec
    scale: WeightSpec
    eps: float
    floor: float
    rounds: int

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.base, self.scale)

    def flops(self, load: Load) -> float:
        matrix = max(self.out.width - 2 * self.x.shape[0], 0)
        one = 2 * self.x.width + 5 * self.out.width + 4 * self.rounds * matrix
        return load.size(self.out.count) * one

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        n = self.x.shape[0]
        x = inputs[0].reshape(len(inputs[0]), self.x.width).astype(np.float64)
        sizes = np.array([n, n, n * n])[: len(run.weights[self.scale.name])]
        scale = np.repeat(run.weights[self.scale.name].astype(np.float64), sizes)
        root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        m = inputs[1] / root * scale + run.weights[self.base.name]
        with np.errstate(over="ignore"):  # the limit is correct
            opened = 1 / (1 + np.exp(-m[:, : 2 * n]))
        parts = [opened[:, :n] + self.floor, 2 * opened[:, n:]]
        if self.out.width > 2 * n:
            parts.append(self._doubly_stochastic(m[:, 2 * n :].reshape(-1, n, n)).reshape(len(m), n * n))
        return np.concatenate(parts, axis=-1).astype(np.float32)

    def _doubly_stochastic(self, m: np.ndarray) -> np.ndarray:
        raised = np.exp(m - m.max(axis=-1, keepdims=True))
        matrix = raised / raised.sum(axis=-1, keepdims=True) + self.floor
        matrix /= matrix.sum(axis=-2, keepdims=True) + self.floor
        for _ in range(self.rounds - 1):
            matrix /= matrix.sum(axis=-1, keepdims=True) + self.floor
            matrix /= matrix.sum(axis=-2, keepdims=True) + self.floor
        return np.asarray(matrix)


@dataclass(frozen=True, slots=True)
class CollapseStreams(Op):
    """out[t] = sum over i of w[t, i] * x[t, i], in order: streams x [T, n, hidden], w of StreamWeights."""

    x: Value
    w: Value

    def flops(self, load: Load) -> float:
        return 2 * load.size(self.out.count) * self.x.width

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x, w = inputs
        out = w[:, 0, None] * x[:, 0]
        for i in range(1, self.x.shape[0]):
            out = out + w[:, i, None] * x[:, i]
        return np.asarray(out)


@dataclass(frozen=True, slots=True)
class MixStreams(Op):
    """out[t, k] = w[t, n + k] * y[t] + sum over j of w[t, 2 n + j n + k] * x[t, j], in order.

    The streams x [T, n, hidden] after a layer with the output y [T, hidden]; w are those of StreamWeights.
    """

    x: Value
    y: Value
    w: Value

    def flops(self, load: Load) -> float:
        return 2 * load.size(self.out.count) * self.x.width * (1 + self.x.shape[0])

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        (x, y, w), n = inputs, self.x.shape[0]
        out = w[:, n : 2 * n, None] * y[:, None]
        for j in range(n):
            first = 2 * n + j * n
            out = out + w[:, first : first + n, None] * x[:, j, None]
        return np.asarray(out)
