"""Backend: an executor of programs. What a runner needs of one."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quire.program.batch import Batch


class Backend(Protocol):
    """Holds a program's weights and its KV cache, and computes batches."""

    name: str

    def execute(self, batch: Batch) -> np.ndarray:
        """Run the program on one batch: logits [L, vocab] in float32, keys and values into the cache.

        The next call may overwrite the logits.
        """
        ...
