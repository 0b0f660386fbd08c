"""The lists of `quire plan`: the catalogue of machines, and the worked numbers."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from quire.roofline.machines import CATALOGUE, GPU_MEMORY_SHARE, catalogue
from quire.roofline.worked_numbers import worked_numbers

FORMATS = ("bf16", "fp16", "fp8", "int8", "fp4")


def machines(as_json: bool) -> None:
    """Print the catalogue; as JSON with notes and sources."""
    if as_json:
        print(CATALOGUE.read_text(), end="")
        return
    table = Table("machine", "memory", "bandwidth", *FORMATS, box=None, pad_edge=False)
    for machine in catalogue():
        rates = (machine.operations.get(kind) for kind in FORMATS)
        table.add_row(
            machine.name,
            f"{machine.memory_bytes / GPU_MEMORY_SHARE / 1e9:.0f} GB",
            f"{machine.bandwidth / 1e9:,.0f} GB/s",
            *(f"{rate / 1e12:,.0f} T" if rate else "" for rate in rates),
        )
    console = Console()
    console.print(table, highlight=False)
    note = "peak operations per second without sparsity, from data sheets; --json has the sources"
    console.print(note, style="dim", highlight=False)


def worked(as_json: bool) -> None:
    """Print each worked number: as published, recomputed, and why they differ."""
    rows = worked_numbers()
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table("", "as published", "recomputed", "why they differ", box=None, pad_edge=False)
    for row in rows:
        table.add_row(str(row.number), row.published, row.recomputed, row.why)
    Console().print(table, highlight=False, markup=False)
