"""Cache specs: what each layer of a program keeps of the past, and how many bytes that takes.

Layers of equal spec form a group (`Program.cache_groups`): the scheduler grants blocks, and the memory plan
counts them, group by group.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    def token_bytes(self, item_bytes: int, scale_bytes: int = 0) -> int:
        """`scale_bytes`: of the scale that the numbers of one head share, for keys and for values."""
        return self.num_heads * ((self.key_dim + self.value_dim) * item_bytes + 2 * scale_bytes)


@dataclass(frozen=True, slots=True)
class PagedLatent:
    """One vector of every token, in blocks, which all heads read (MLA, arXiv:2405.04434)."""

    dim: int
    window: None = None  # every token sees all before it

    def token_bytes(self, item_bytes: int, scale_bytes: int = 0) -> int:
        return self.dim * item_bytes + scale_bytes


CacheSpec = PagedKV | PagedLatent
