"""The index of texts in the native core, which every backend has; csrc/core/text_index.h describes it."""

from __future__ import annotations

from quire.backends.native._core import BOUNDARY, LONGEST_MATCH, TextIndex, continuations

__all__ = ["BOUNDARY", "LONGEST_MATCH", "TextIndex", "continuations"]
