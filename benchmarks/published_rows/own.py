"""Quire's own figures in docs/performance.md, against the constants for CPUs: each row states its roof."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from quire.roofline.shares import TYPICAL, Span

_ROW = re.compile(r"\| (l1b|s135) int[48], (?:(prompt) of|decode,) (\d+).*?\*\*([\d,.]+)\*\*.*\| (\d+)% \|")
LAYERS = {"l1b": 16, "s135": 30}
TURNING = 8  # sequences from which these models are bound by arithmetic there


def rows(docs: Path) -> Iterator[tuple[Span, float]]:
    """Yield (predicted, measured) seconds of a step or of a prompt of 512."""
    for model, prompt, size, rate, share in _ROW.findall((docs / "performance.md").read_text()):
        count = int(size)
        measured_s = count / float(rate.replace(",", ""))
        roof_s = measured_s * int(share) / 100
        shares = TYPICAL["cpu"]
        part = shares.arithmetic if prompt or count >= TURNING else shares.memory
        overhead = shares.overhead_s(1, LAYERS[model]) + (1 if prompt else count) * shares.row_s
        yield Span(roof_s, roof_s / part + overhead), measured_s
