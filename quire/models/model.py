"""A model without its weights, as config.json describes it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.images.vision import Vision
from quire.models.config import ModelConfig
from quire.models.purpose import Pooling
from quire.program import Program
from quire.program.caches import PagedKV
from quire.program.ops import Embed, Rotary
from quire.program.rope import Rope


@dataclass(frozen=True, slots=True)
class Model:
    """The architecture of a checkpoint, its config and the recorded program, without weights.

    `pooling` says what it gives for a text in place of more text, if it does. `longest` is the number of
    positions that can be used, if not all are. `vision` is the tower for images, if it sees them.
    """

    architecture: str
    config: ModelConfig
    program: Program
    pooling: Pooling | None = None
    longest: int | None = None
    vision: Vision | None = None

    def context_variant(self, limit: int) -> int:
        """Return the set of rope frequencies for a request of at most `limit` tokens (quire.program.rope)."""
        return max((rope.variant(limit) for rope in self._ropes()), default=0)

    def seeing(self, max_tokens: int) -> Model:
        """Return this model for images of at most so many tokens, if it sees them at all."""
        return self if self.vision is None else replace(self, vision=self.vision.bounded(max_tokens))

    @property
    def embeds(self) -> bool:
        return self.pooling is not None and self.pooling.task == "embed"

    @property
    def num_kv_heads(self) -> int:
        """The heads of keys of layers with attention, the most that any has."""
        found = (spec.num_heads for spec in self.program.caches if isinstance(spec, PagedKV))
        return max(found, default=self.config.num_key_value_heads)

    @property
    def max_context(self) -> int:
        """The maximum sequence length: that of the model, or that to which its rope is scaled.

        Dynamic scaling always starts from max_position_embeddings. With other types, Gemma 3, whose window
        layers are not scaled, states the length after scaling.
        """
        most, ropes = self.longest or self.config.max_position_embeddings, self._ropes()
        dynamic = {rope for rope in ropes if rope.rope_type == "dynamic"}
        return min((rope.longest(most) for rope in dynamic or ropes), default=most)

    @property
    def tied_tensor(self) -> str | None:
        """The tensor used as both embedding and output matrix, or None if config.json does not tie them."""
        table = next(op.table for op in self.program if isinstance(op, Embed))
        return table.sources[0] if self.config.tie_word_embeddings else None

    def _ropes(self) -> set[Rope]:
        return {op.rope for op in self.program if isinstance(op, Rotary)}
