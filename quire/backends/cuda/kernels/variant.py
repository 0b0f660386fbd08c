"""A kernel that is compiled ahead of time: its types of arguments, constants, warps and stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.backends.cuda.manifest import variant_key

Constants = dict[str, Any]

MOST_EXPERTS = 512  # of a layer, a power of two
SMALL, LARGE = "small", "large"  # steps: of at most MOST_SMALL rows for each weight, and more
MOST_SMALL = 16
ROW_BLOCKS = (128, 1024)  # numbers of a row that a program has at once


def size_of(rows: int) -> str:
    """Return the size of a product of so many rows: SMALL or LARGE."""
    return SMALL if rows <= MOST_SMALL else LARGE


@dataclass(frozen=True)
class Variant:
    """A kernel to be compiled. `types` are those of its arguments in order, as Triton writes them.

    `tensor_cores` says that its products are large enough for the target's instructions of a whole warp
    group.
    """

    kernel: str
    types: dict[str, str]
    constants: Constants
    warps: int = 4
    stages: int = 3
    tensor_cores: str = ""  # "float" or "integer"

    @property
    def key(self) -> str:
        """The name of the compiled kernel."""
        return variant_key(self.kernel, list(self.types.values()), self.constants)


def types_of(text: str, **formats: str) -> dict[str, str]:
    """Return types by argument, written as "out:*fp32 rows:i32", with formats in braces."""
    return dict(pair.split(":") for pair in text.format(**formats).split())


def row_block(width: int) -> int:
    """Return the numbers of a row that a program holds at once, for norms and elementwise ops."""
    return ROW_BLOCKS[0] if width <= ROW_BLOCKS[0] else ROW_BLOCKS[1]
