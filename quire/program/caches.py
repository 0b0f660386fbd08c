"""Cache specs: what each layer of a program keeps of the past, and how many bytes that takes.

Layers of equal spec form a group (`Program.cache_groups`): the scheduler grants blocks and places for
snapshots, and the memory plan counts them, group by group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.program.dtypes import ITEM_BYTES, DType
from quire.types import MAX_DRAFTED


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of every token, in blocks: `num_heads` of each.

    With a `window` a token sees the last `window` positions alone, its own included; blocks that lie before
    those of all tokens to come are needed no more.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    slot_bytes = snapshot_bytes = 0

    def token_bytes(self, item_bytes: int, scale_bytes: int = 0) -> int:
        """`scale_bytes`: of the scale that the numbers of one head share, for keys and for values."""
        return self.num_heads * ((self.key_dim + self.value_dim) * item_bytes + 2 * scale_bytes)


@dataclass(frozen=True, slots=True)
class PagedLatent:
    """One vector of every token, in blocks, which all heads read (MLA, arXiv:2405.04434)."""

    dim: int

    window = None
    slot_bytes = snapshot_bytes = 0

    def token_bytes(self, item_bytes: int, scale_bytes: int = 0) -> int:
        """`scale_bytes`: of the scale that the numbers of one vector share."""
        return self.dim * item_bytes + scale_bytes


@dataclass(frozen=True, slots=True)
class SlotState:
    """A state for each slot, whatever the length of its sequence (recurrences, short convolutions).

    A recurrence is computed in chunks of CHUNK positions counted from position 0. What is kept of a slot is
    its state, an array of `shape`, at the last two borders between chunks, and the `inputs` numbers that each
    of the last positions brought: so a row may begin anywhere in the last chunk but one, is computed from the
    border before it, and has the same bits however the positions were spread over rows. `reach` is how many
    positions back inputs may be needed: CHUNK - 1, or of a convolution over `kernel` positions, which has no
    state beside them (shape (0,)), kernel - 1.

    A snapshot, taken before some position is computed, is the state at the border before it and the inputs of
    the `reach` positions before it. Nothing is to be done when a slot is admitted: position 0 reads nothing.
    """

    shape: tuple[int, ...]
    inputs: int
    reach: int
    dtype: DType = "float32"

    window = None

    @property
    def history(self) -> int:
        """Positions whose inputs are kept; that of position p lies at p modulo this."""
        return self.reach + MAX_DRAFTED  # rejected drafts aside, no row begins before the last one's end

    @property
    def slot_bytes(self) -> int:
        return (2 * math.prod(self.shape) + self.history * self.inputs) * ITEM_BYTES[self.dtype]

    @property
    def snapshot_bytes(self) -> int:
        return (math.prod(self.shape) + self.reach * self.inputs) * ITEM_BYTES[self.dtype]

    def token_bytes(self, item_bytes: int, scale_bytes: int = 0) -> int:
        return 0


CacheSpec = PagedKV | PagedLatent | SlotState
