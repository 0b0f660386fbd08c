"""Hyper-connections: layers that read several streams of hidden states as one, and mix them anew."""

from __future__ import annotations

from dataclasses import dataclass

from quire.program import Builder, Value, WeightSpec
from quire.program.ops import CollapseStreams, Linear, MixStreams, RepeatStreams, StreamWeights


@dataclass(frozen=True, slots=True)
class Streams:
    """Records hyper-connections of `number` streams; eps, floor and rounds are those of StreamWeights."""

    b: Builder
    number: int
    eps: float
    floor: float
    rounds: int

    def begin(self, x: Value) -> Value:
        """Return streams that are all x [T, hidden]."""
        return self.b.record(RepeatStreams(self.b.value((self.number, x.width), x.count), x)).out

    def weights(self, x: Value, name: str, reading: bool = False) -> Value:
        """Return the weights of each token, or those of `reading` alone.

        `name` says where the checkpoint has the matrix `fn` and what `base` and `scale` are.
        """
        width, parts = (self.number, 1) if reading else (self.number * (self.number + 2), 3)
        fn, base, scale = (
            WeightSpec(name.format(part), shape, (name.format(part),))
            for part, shape in (("fn", (width, x.width)), ("base", (width,)), ("scale", (parts,)))
        )
        mixed = self.b.record(Linear(self.b.value((width,), x.count), x, fn)).out
        out = self.b.value((width,), x.count)
        return self.b.record(StreamWeights(out, x, mixed, base, scale, self.eps, self.floor, self.rounds)).out

    def collapse(self, x: Value, weights: Value) -> Value:
        """Return what a layer reads of the streams, [T, hidden]."""
        return self.b.record(CollapseStreams(self.b.value(x.shape[1:], x.count), x, weights)).out

    def mix(self, x: Value, y: Value, weights: Value) -> Value:
        """Return the streams after a layer that gave y."""
        return self.b.record(MixStreams(self.b.value(x.shape), x, y, weights)).out
