"""Machines to plan for: the catalogue of published peak rates, and this machine at its measured ceilings.

The catalogue (quire/assets/machines.json) holds facts of data sheets, each with its sources. They are peaks,
not measurements: `quire.roofline.shares` has what part of them published measurements reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from quire.errors import ConfigError, did_you_mean, quoted
from quire.json_file import read_json
from quire.roofline.probe import Ceilings

CATALOGUE = Path(__file__).parent.parent / "assets" / "machines.json"
GPU_MEMORY_SHARE = 0.9  # of a GPU's memory: the rest is for the driver, graphs and the allocator's gaps

Kind = Literal["gpu", "cpu"]


@dataclass(frozen=True, slots=True)
class Machine:
    """One device with its peak rates.

    `bandwidth` is in bytes per second; `operations` per second by number format, without those that have no
    instruction. `memory_bytes` is what weights, cache and steps may use of it. This machine has its
    `measured` ceilings, of caches too.
    """

    name: str
    kind: Kind
    memory_bytes: float
    bandwidth: float
    operations: Mapping[str, float]
    sources: tuple[str, ...] = ()
    note: str = ""
    measured: Ceilings | None = None

    def rate(self, arithmetic: str) -> float:
        """Return operations per second in a number format, or in the nearest wider one that is supported."""
        for wider in (arithmetic, *_WIDER):
            if wider in self.operations:
                return self.operations[wider]
        raise ConfigError(f"{self.name}: no rate of {quoted(arithmetic)} is known")

    def ceilings(self, cards: int = 1) -> Ceilings:
        """Return the rates of `cards` such machines together in the form of measured ones."""
        if self.measured is not None and cards == 1:
            return self.measured
        rates = {kind: self.rate(kind) * cards for kind in {*_ARITHMETIC, *self.operations}}
        return Ceilings(self.name, "", 1, rates, {1: {"memory": self.bandwidth * cards}}, 0.0)

    def ridge(self, arithmetic: str) -> float:
        """Return the operations per byte at which memory and arithmetic take equal time."""
        return self.rate(arithmetic) / self.bandwidth


_WIDER = ("bf16", "fp16", "f32")
_ARITHMETIC = ("int8", "bf16", "f32")  # of Quire's ops (Device.arithmetic_of); on a GPU, f32 is 16 bits


@cache
def catalogue() -> tuple[Machine, ...]:
    """Return the machines of the catalogue."""
    return tuple(_machine(entry) for entry in read_json(CATALOGUE)["machines"])


def _machine(entry: dict[str, Any]) -> Machine:
    peaks = {kind: rate * 1e12 for kind, rate in entry["peak_dense_tflops"].items() if rate is not None}
    return Machine(
        entry["name"],
        "gpu",
        entry["memory_gb"] * 1e9 * GPU_MEMORY_SHARE,
        entry["memory_bandwidth_gb_s"] * 1e9,
        peaks,
        tuple(entry["sources"]),
        entry.get("note", ""),
    )


def find(name: str) -> Machine:
    """Return the machine of the catalogue with this name, or the only one whose name holds all its words.

    Raises ConfigError, with the names that are near.
    """
    words = name.lower().split()
    found = [machine for machine in catalogue() if machine.name.lower() == name.lower().strip()]
    found = found or [one for one in catalogue() if words and all(word in one.name.lower() for word in words)]
    if len(found) == 1:
        return found[0]
    hint = "'quire plan --machines' lists all"
    if found:
        names = ", ".join(machine.name for machine in found)
        raise ConfigError(f"machine {quoted(name)}: there are several: {names}", "give one of these names")
    near = did_you_mean(name[:80], [machine.name for machine in catalogue()])
    raise ConfigError(f"machine {quoted(name)} is not in the catalogue", f"{near} {hint}" if near else hint)


def this_machine(ceilings: Ceilings, available_bytes: float) -> Machine:
    """Return this machine at its measured ceilings."""
    known = {kind: rate for kind, rate in ceilings.operations.items() if rate}
    where = f"{ceilings.cpu}, {ceilings.threads} threads" if ceilings.threads > 1 else ceilings.cpu
    sources = ("measured by quire probe",)
    return Machine(where, "cpu", available_bytes, ceilings.bandwidth, known, sources, measured=ceilings)
