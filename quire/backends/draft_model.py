"""A draft model as backends take it, and the block table of its target that it uses (decision 0030)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from quire.errors import ConfigError
from quire.program.caches import MAX_DRAFTED, SlotState
from quire.program.program import Program

HIDDEN_ITEM_BYTES = 2  # hidden states are kept as bfloat16
V = TypeVar("V")
W = TypeVar("W", covariant=True)


@dataclass(frozen=True, slots=True)
class DraftModel(Generic[W]):
    """The program called `name`, which proposes what may follow the tokens of another one, the target.

    In a step it computes at most `max_tokens` tokens that it lacks, and never a position from `max_len` on.
    `weights` are in the form that the receiver takes; None if those of the target contain them.
    """

    program: Program
    weights: W | None
    max_tokens: int
    max_len: int
    name: str = ""

    @property
    def hidden_width(self) -> int:
        """The numbers of a hidden state, if it reads those of its target; 0 if it does not."""
        return 0 if self.program.hidden is None else self.program.hidden.width

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of the hidden states of the tokens of a block."""
        return block_size * self.hidden_width * HIDDEN_ITEM_BYTES

    def having(self, weights: V | None) -> DraftModel[V]:
        """Return the model with its weights in another form."""
        return DraftModel(self.program, weights, self.max_tokens, self.max_len, self.name)


class SharedTable(NamedTuple):
    """The cache group of a target whose block table all cache groups of its draft model use.

    `window` is that of this group, `reach` how far back the draft model looks; None: to the beginning.
    """

    group: int
    window: int | None
    reach: int | None

    def oldest(self, start: int, block_size: int) -> int:
        """Return the first position whose block a row still has when it computes position `start`."""
        return 0 if self.window is None else max(0, start - self.window + 1) // block_size * block_size

    def allows(self, position: int, oldest: int) -> bool:
        """Return True if the draft model may compute a position with blocks from position `oldest` on."""
        first = 0 if self.reach is None else max(0, position - self.reach + 1)
        return first >= oldest


def shared_table(target: Program, draft: Program) -> SharedTable:
    """Choose the cache group of the target that reaches back farthest.

    Raises ConfigError if the draft model looks back farther, or keeps what cannot be shared.
    """
    paged = [(i, spec) for i, spec in enumerate(target.cache_groups) if not isinstance(spec, SlotState)]
    hint = "take another draft model, or leave it out with speculative = 'auto'"
    if any(isinstance(spec, SlotState) for spec in draft.caches):
        raise ConfigError(
            "a draft model cannot have recurrent states, which refused tokens would spoil", hint
        )
    if not paged:
        raise ConfigError("the model has no cache in blocks, which a draft model would share", hint)
    group, spec = max(paged, key=lambda one: one[1].window or 1 << 62)
    windows = [spec.window for spec in draft.caches]
    reach = None if None in windows or not windows else max(filter(None, windows))
    if spec.window is not None and (reach is None or reach > spec.window):
        seen = "all tokens" if reach is None else f"{reach:,} tokens"
        problem = f"the draft model looks back at {seen}, but the model keeps no more than {spec.window:,}"
        raise ConfigError(problem, hint)
    return SharedTable(group, spec.window, reach)


def spare_blocks(block_size: int) -> int:
    """Return the blocks that a slot needs for proposed positions beyond the blocks granted to it."""
    return -(-MAX_DRAFTED // block_size)
