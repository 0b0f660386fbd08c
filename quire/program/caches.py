"""Cache specs: what each layer of a program caches of past tokens, and its size.

Layers with equal specs form a group (`Program.cache_groups`): the scheduler grants blocks and snapshots by
group, and the memory plan counts them by group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.program.dtypes import ITEM_BYTES, DType

MAX_DRAFTED = 32  # at most, for a row; backends keep what they need to roll back that far


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of every token, in blocks: `num_heads` of each.

    With a `window` a token sees only the last `window` positions, its own included; blocks before those
    visible to any future token are no longer needed.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    slot_bytes = snapshot_bytes = 0

    def token_bytes(self, item_bytes: int, scale_bytes: int = 0) -> int:
        """Return the bytes of a token; `scale_bytes` are those of the scale of a head's keys or values."""
        return self.num_heads * ((self.key_dim + self.value_dim) * item_bytes + 2 * scale_bytes)


@dataclass(frozen=True, slots=True)
class PagedLatent:
    """One vector of each token, in blocks, shared by all heads (MLA, arXiv:2405.04434).

    Its first `rank` numbers, the latent, are part of the key and all of the value of every head; the other
    `rope_dim`, rotated by position, are the rest of the key.
    """

    rank: int
    rope_dim: int

    window = None
    slot_bytes = snapshot_bytes = 0

    @property
    def dim(self) -> int:
        return self.rank + self.rope_dim

    def token_bytes(self, item_bytes: int, scale_bytes: int = 0) -> int:
        """Return the bytes of a token; `scale_bytes` are those of the scale of each part of its vector."""
        return self.dim * item_bytes + 2 * scale_bytes


@dataclass(frozen=True, slots=True)
class PagedIndex:
    """A key of each token, in blocks, by which later tokens choose what they attend to."""

    dim: int

    window = None
    slot_bytes = snapshot_bytes = 0

    def token_bytes(self, item_bytes: int, scale_bytes: int = 0) -> int:
        return self.dim * item_bytes + scale_bytes


@dataclass(frozen=True, slots=True)
class PagedVectors:
    """A vector of each token, or an entry of each `every` tokens, in blocks: all of the key and of the value.

    An entry lies in the block of its last token, so the content of a block depends on the tokens up to its
    end alone. With a `window` a token sees only the last `window` positions, its own included.
    """

    dim: int
    every: int = 1
    window: int | None = None

    slot_bytes = snapshot_bytes = 0

    def entries(self, block_size: int) -> int:
        """Return the entries in a block. Raises ConfigError if they would cross borders of blocks."""
        if block_size % self.every and self.every % block_size:
            problem = f"entries of {self.every} tokens do not fit into blocks of {block_size}"
            raise ConfigError(
                problem, f"choose a block_size that divides {self.every} or is a multiple of it"
            )
        return max(1, block_size // self.every)

    def token_bytes(self, item_bytes: int, scale_bytes: int = 0) -> int:
        """Return the bytes of a token, of an entry its share rounded up."""
        return -(-(self.dim * item_bytes + scale_bytes) // self.every)


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """Numbers of each token, in blocks, always in float32, from which those of later tokens are computed.

    The inputs of the last `window` positions are needed, a token's own included.
    """

    width: int
    window: int

    slot_bytes = snapshot_bytes = 0

    def token_bytes(self, item_bytes: int, scale_bytes: int = 0) -> int:
        return self.width * ITEM_BYTES["float32"]


@dataclass(frozen=True, slots=True)
class SlotState:
    """A state of fixed size per slot, independent of sequence length (recurrences, short convolutions).

    A recurrence is computed in chunks of CHUNK positions counted from position 0. A slot keeps its state, an
    array of `shape`, at the last two chunk boundaries, and the `inputs` numbers of each of the last
    positions. So a row may begin anywhere in the last chunk or the one before, is computed from the preceding
    boundary, and has the same bits however positions are divided into rows. `reach` is the number of previous
    positions whose inputs may be needed: CHUNK - 1, or kernel - 1 for a convolution over `kernel` positions,
    which has no other state (shape (0,)).

    A snapshot taken before a position is the state at the boundary before it and the inputs of the `reach`
    positions before it. Admission needs no initialization: position 0 reads nothing.
    """

    shape: tuple[int, ...]
    inputs: int
    reach: int
    dtype: DType = "float32"

    window = None

    @property
    def history(self) -> int:
        """Number of positions whose inputs are kept; position p is at index p modulo this."""
        return self.reach + MAX_DRAFTED  # a row starts at the end of the last one, less rejected drafts

    @property
    def slot_bytes(self) -> int:
        return (2 * math.prod(self.shape) + self.history * self.inputs) * ITEM_BYTES[self.dtype]

    @property
    def snapshot_bytes(self) -> int:
        return (math.prod(self.shape) + self.reach * self.inputs) * ITEM_BYTES[self.dtype]

    def token_bytes(self, item_bytes: int, scale_bytes: int = 0) -> int:
        return 0


CacheSpec = PagedKV | PagedLatent | PagedIndex | PagedVectors | PagedInputs | SlotState


def block_bytes(spec: CacheSpec, block_size: int, item_bytes: int, scale_bytes: int = 0) -> int:
    """Return the bytes of a block of one layer; `scale_bytes` as for its token_bytes."""
    if isinstance(spec, PagedVectors):
        return (spec.dim * item_bytes + scale_bytes) * spec.entries(block_size)
    return spec.token_bytes(item_bytes, scale_bytes) * block_size
