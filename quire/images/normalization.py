"""Normalization: how pixels become numbers."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class Normalization:
    """out = (pixel * factor - mean) / std, by channel; with `halves` each step is rounded to bfloat16."""

    factor: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    halves: bool = False

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """Return pixels [height, width, 3] uint8 as float32."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        if not self.halves:
            return (pixels.astype(np.float32) * np.float32(self.factor) - mean) / std
        scaled = _half(pixels.astype(np.float32) * np.float32(self.factor))
        return _half(_half(scaled - _half(mean)) / _half(std))


def _half(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)
