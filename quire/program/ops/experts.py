"""Mixture of experts: each token is computed by the few experts that its router selects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from quire.program.numerics import ACTIVATIONS, Array, matmul, sigmoid
from quire.program.program import Load, Op, Run, Value, WeightBytes, WeightSpec


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which the scores of a router choose the experts of a token, and give each a share.

    The affinity of an expert is the softmax over all scores, or the sigmoid of its own, or the square root of
    ln(1 + e^score) ("sqrtsoftplus", DeepSeek-V4). The `chosen` experts
    are those with the largest affinity + bias, among the `kept_groups` best of `groups` groups of adjacent
    experts; a group ranks by its largest affinity + bias ("max") or the sum of its two largest ("top2"). Ties
    go to the lower index. A share is scaling * affinity, if `normalized` divided by the sum of the chosen
    affinities + floor, and times the factor of its expert if there are `factors` [experts] (Gemma 4). With
    `on_inputs` it multiplies the input of its expert (Llama 4), not the result. The bias only chooses
    (DeepSeek-V3, arXiv:2412.19437). Affinities and shares are computed in float64 and rounded to float32
    once, affinity + bias and the sum of two are float32. If one of these is NaN, so is the token's result.

    With `margin` (SparseMixer, arXiv:2409.12136) experts are chosen by score, one after the other, and a
    share is the softmax among those left whose score s is near the best one t: (t - s) / max(|s|, t) is at
    most the margin.

    With `listed` [ids * chosen] the experts of a token are those that its id has there, whatever the scores,
    which give the shares alone; an id beyond the list has the experts of id 0.
    """

    chosen: int
    affinity: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    normalized: bool = False
    bias: WeightSpec | None = None
    groups: int = 1
    kept_groups: int = 1
    group_rank: Literal["max", "top2"] = "max"
    scaling: float = 1.0
    floor: float = 0.0
    factors: WeightSpec | None = None
    on_inputs: bool = False
    margin: float | None = None
    listed: WeightSpec | None = None

    def weights(self) -> tuple[WeightSpec, ...]:
        return tuple(weight for weight in (self.bias, self.factors, self.listed) if weight is not None)

    def shares(
        self,
        scores: Array,
        bias: Array | None = None,
        factors: Array | None = None,
        listed: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Array]:
        """Return (expert indices, shares), [T, chosen] each, best first, or as `listed` for these tokens."""
        if listed is not None:
            picked, shares = listed, self._of(self._affinities(scores), listed)
        elif self.margin is None:
            picked, shares = self._together(scores, bias)
        else:
            picked, shares = self._apart(scores, self.margin)
        shares = self.scaling * shares
        if factors is not None:
            shares *= factors[picked]
        return picked, shares.astype(np.float32)

    def _together(self, scores: Array, bias: Array | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the same by affinities of all experts, in float64 and not scaled."""
        affinities = self._affinities(scores)
        ranks = affinities.astype(np.float32)
        if bias is not None:
            ranks += bias.reshape(-1)
        lost = np.isnan(ranks).any(axis=-1)
        if self.groups > 1:
            ranks = self._without_other_groups(ranks)
        picked = np.argsort(-ranks, axis=-1, kind="stable")[:, : self.chosen]
        shares = self._of(affinities, picked)
        shares[lost] = np.nan
        return picked, shares

    def _of(self, affinities: np.ndarray, picked: np.ndarray) -> np.ndarray:
        """Return the shares of experts by their affinities, not scaled."""
        shares = np.take_along_axis(affinities, picked, axis=-1)
        if self.normalized:
            shares /= shares.sum(axis=-1, keepdims=True) + self.floor
        return shares

    def _apart(self, scores: Array, margin: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the same one expert after the other, each among those near it."""
        wide = scores.astype(np.float64)
        picked = np.argsort(-wide, axis=-1, kind="stable")[:, : self.chosen]
        shares, left = np.empty(picked.shape), wide.copy()
        for i, expert in enumerate(picked.T):
            top = np.take_along_axis(wide, expert[:, None], axis=-1)
            with np.errstate(invalid="ignore"):
                far = (top - wide) / np.maximum(np.abs(wide), top) > margin
                shares[:, i] = 1 / np.exp(np.where(far, -np.inf, left) - top).sum(axis=-1)
            np.put_along_axis(left, expert[:, None], -np.inf, axis=-1)
        shares[np.isnan(wide).any(axis=-1) | np.isnan(shares).any(axis=-1)] = np.nan
        return picked, shares

    def _affinities(self, scores: Array) -> np.ndarray:
        wide = scores.astype(np.float64)
        if self.affinity == "sigmoid":
            with np.errstate(over="ignore"):  # the limit is correct
                return np.asarray(1 / (1 + np.exp(-wide)))
        if self.affinity == "sqrtsoftplus":
            return np.asarray(np.sqrt(np.logaddexp(wide, 0)))
        raised = np.exp(wide - wide.max(axis=-1, keepdims=True))
        return np.asarray(raised / raised.sum(axis=-1, keepdims=True))

    def _without_other_groups(self, ranks: Array) -> Array:
        """Return ranks with minus infinity for experts outside of the kept groups."""
        grouped = ranks.reshape(len(ranks), self.groups, -1)
        best = np.sort(grouped, axis=-1)
        of_group = best[..., -1] if self.group_rank == "max" else best[..., -1] + best[..., -2]
        dropped = np.argsort(-of_group, axis=-1, kind="stable")[:, self.kept_groups :]
        np.put_along_axis(grouped, dropped[..., None], -np.inf, axis=1)
        return grouped.reshape(ranks.shape)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """gate and up [experts, inner, hidden], down [experts, hidden, inner], biases or none.

    Without gate, the activation is that of up (Nemotron-H).
    """

    gate: WeightSpec | None
    up: WeightSpec
    down: WeightSpec
    gate_bias: WeightSpec | None = None
    up_bias: WeightSpec | None = None
    down_bias: WeightSpec | None = None

    def all(self) -> tuple[WeightSpec, ...]:
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        return (*self.matrices(), *(b for b in biases if b is not None))

    def matrices(self) -> tuple[WeightSpec, ...]:
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


@dataclass(frozen=True, slots=True)
class Experts(Op):
    """out[t] = sum over the chosen experts e of p[t, e] * down_e(activation(gate_e x) * up_e x).

    Experts without gate have activation(up_e x) in its place.

    The experts of a token and their shares p follow from its `scores` [T, experts] (Routing). With `limit`
    gates are at most that, gate', and ups within plus and minus that, up'; if `shifted` too (gpt-oss), the
    activation is gate' * sigmoid(1.702 gate') * (up' + 1). The sum runs in order of expert number.
    """

    x: Value
    scores: Value
    experts: ExpertWeights
    routing: Routing
    activation: str
    limit: float | None = None
    shifted: bool = True

    def weights(self) -> tuple[WeightSpec, ...]:
        return (*self.experts.all(), *self.routing.weights())

    @property
    def num_experts(self) -> int:
        return self.experts.up.shape[0]

    def flops(self, load: Load) -> float:
        """Count the products, the activation and the weighted sum of each chosen expert."""
        inner, hidden = self.experts.up.shape[-2:]
        gates = self.experts.gate is not None
        one = 2 * (2 + gates) * inner * hidden + (4 + gates) * inner + 2 * hidden
        return load.size(self.out.count) * self.routing.chosen * one

    def weight_bytes(self, load: Load, nbytes: WeightBytes) -> float:
        """Return the bytes of the expected number of distinct experts under uniform independent routing."""
        touched = load.touched(self.out.count, self.routing.chosen, self.num_experts)
        listed = self.routing.listed
        routing: float = sum(nbytes(w) for w in self.routing.weights() if w is not listed)
        if listed is not None:
            routing += nbytes(listed) * load.num_tokens * self.routing.chosen / listed.size
        return touched * sum(nbytes(w) for w in self.experts.all()) + routing

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x, scores = inputs
        how = self.routing
        bias, factors = (None if w is None else run.weights[w.name] for w in (how.bias, how.factors))
        picked, shares = how.shares(scores, bias, factors, self._listed(run))
        out = np.zeros((len(x), *self.out.shape), np.float32)
        for expert in np.unique(picked):
            tokens, rank = np.nonzero(picked == expert)
            share = shares[tokens, rank][:, None]
            if self.routing.on_inputs:
                np.add.at(out, tokens, self._expert(run, int(expert), share * x[tokens]))
            else:
                np.add.at(out, tokens, share * self._expert(run, int(expert), x[tokens]))
        return out

    def _listed(self, run: Run) -> np.ndarray | None:
        """Return the experts that are listed for the tokens, [T, chosen]."""
        if self.routing.listed is None:
            return None
        table = run.weights[self.routing.listed.name].reshape(-1, self.routing.chosen)
        ids = run.batch.token_ids
        return table[np.where(ids < len(table), ids, 0)].astype(np.int64)

    def _expert(self, run: Run, expert: int, x: Array) -> Array:
        def linear(x: Array, weight: WeightSpec, bias: WeightSpec | None) -> Array:
            product = matmul(x, run.matrix(weight)[expert])
            return product if bias is None else product + run.weights[bias.name][expert]

        up = linear(x, self.experts.up, self.experts.up_bias)
        if self.experts.gate is None:
            return linear(ACTIVATIONS[self.activation](up), self.experts.down, self.experts.down_bias)
        gate = linear(x, self.experts.gate, self.experts.gate_bias)
        if self.limit is None:
            inner = ACTIVATIONS[self.activation](gate) * up
        else:
            gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
            if self.shifted:
                inner = gate * sigmoid(np.float32(1.702) * gate) * (up + np.float32(1))
            else:
                inner = ACTIVATIONS[self.activation](gate) * up
        return linear(inner, self.experts.down, self.experts.down_bias)
