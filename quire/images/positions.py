"""Positions by which tokens of prompts with images rotate (M-RoPE of Qwen2-VL, arXiv:2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.types import PromptImage


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Three positions of each token: in time, height and width. Those of text are equal.

    An image begins at the next position after the text before it, and takes as many as its longer side.
    `known` [n, 3] are those up to the last image; tokens after it are `shift` away from their own.
    """

    known: np.ndarray
    shift: int

    @classmethod
    def of(cls, images: Sequence[PromptImage]) -> RotaryPositions:
        """Return those of a prompt with these images, in order."""
        parts, end, shift = [], 0, 0
        for image in images:
            text = np.arange(end, image.first) + shift
            grid = np.indices((image.rows, image.columns + image.gap)).reshape(2, -1)
            y, x = grid[:, : image.end - image.first]
            begin = image.first + shift
            parts += [np.stack([text] * 3, axis=1), begin + np.stack([0 * y, y, x], axis=1)]
            end = image.end
            shift += max(image.rows, image.columns) - (image.end - image.first)
        return cls(np.concatenate(parts) if parts else np.zeros((0, 3), np.int64), shift)

    def slice(self, start: int, end: int) -> np.ndarray:
        """Return those of tokens [start, end), [n, 3]."""
        after = np.arange(max(start, len(self.known)), end) + self.shift
        return np.concatenate([self.known[start:end], np.stack([after] * 3, axis=1)])
