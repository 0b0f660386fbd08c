"""llama-bench rows of Llama-3.1-8B on three CPUs, with llama.cpp and ik_llama.cpp in many formats.

The memory in these machines is not published, and kernels of different formats differ, so a roof cannot be
computed from data sheets. What can be predicted is calibrated for each machine: its bandwidth and the
operations per second of a thread, when decoding and in prompts, from half of its rows. There is no roof then:
the range lies evenly around what is typical.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from published_rows.fitting import is_fitted, loss, search
from published_rows.models import costed
from quire.roofline.machines import Machine
from quire.roofline.shares import Span, TypicalShares, typical_law

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
NO_OVERHEAD = TypicalShares(1.0, 1.0)
# Bits of a weight with its scales, by the names of the formats without the suffixes of their layouts.
BITS = {
    "Q4_0": 4.5,
    "Q5_0": 5.5,
    "Q6_0": 6.5,
    "Q8_0": 8.5,
    "Q2_K": 2.625,
    "Q3_K": 3.4375,
    "Q4_K": 4.5,
    "Q5_K": 5.5,
    "Q6_K": 6.5625,
    "IQ2_KS": 2.1875,
    "IQ2_K": 2.375,
    "IQ3_K": 3.4375,
    "IQ4_KS": 4.25,
    "IQ4_XS": 4.25,
    "IQ4_K": 4.5,
    "IQ5_KS": 5.25,
    "IQ5_K": 5.5,
    "IQ6_K": 6.625,
    "BF16": 16.0,
}
THREADS = 16  # of the 9 rows that do not state them: those of the machine's other prompts


class Rates(NamedTuple):
    """The calibration of one machine: bytes/s, and operations/s of a thread."""

    bandwidth: float
    decode: float
    prefill: float


CALIBRATED = {
    "AMD Ryzen 9 7950X": Rates(64e9, 101e9, 219e9),
    "AMD Ryzen Threadripper PRO 5975WX": Rates(60e9, 40e9, 90e9),
    "Apple M2 Max (CPU)": Rates(130e9, 76e9, 129e9),
}


@dataclass
class CpuRow:
    """One row: `prompt` tokens at once, or tokens one at a time after a context."""

    cpu: str
    quant: str
    engine: str
    threads: int
    prompt: int  # 0 while decoding
    context: int
    test: str
    token_s: float
    configs: Path

    @property
    def fitted(self) -> bool:
        """True if constants are fitted on this row."""
        return is_fitted("|".join((self.cpu, self.quant, self.engine, str(self.threads), self.test)))

    def span(self, calibrated: dict[str, Rates]) -> Span:
        """Predict the time of a token."""
        rates = calibrated[self.cpu]
        rate = (rates.prefill if self.prompt else rates.decode) * self.threads
        machine = Machine(self.cpu, "cpu", 0.0, rates.bandwidth, {"f32": rate, "bf16": rate})
        model = costed(LLAMA, BITS[re.sub(r"_(S|R4|R16)$", "", self.quant)], self.configs)
        law = typical_law(model.folded, machine, layers=model.layers, shares=NO_OVERHEAD)
        rows = ((0, self.prompt),) if self.prompt else ((self.context, 1),)
        return Span(0.0, law.seconds(law.values(rows, 1)) / (self.prompt or 1))


def read_rows(data: Path) -> list[CpuRow]:
    """Return all rows of `cpu_llama31_8b.csv`."""
    with (data / "perf" / "cpu_llama31_8b.csv").open() as file:
        return [_row(raw, data / "configs") for raw in csv.DictReader(file)]


def _row(raw: dict[str, str], configs: Path) -> CpuRow:
    test, _, before = raw["test"].partition("@pp")
    prompt = int(test[2:]) if test.startswith("pp") else 0
    context = int(before or 0) + (0 if prompt else int(test[2:]) // 2)
    threads = int(raw["threads"] or THREADS)
    return CpuRow(
        raw["cpu"],
        raw["quant"],
        raw["engine"],
        threads,
        prompt,
        context,
        raw["test"],
        1 / float(raw["tokens_per_s"]),
        configs,
    )


def calibrate(rows: list[CpuRow]) -> dict[str, Rates]:
    """Fit the rates of each machine on its rows of the fitted half."""
    found = {}
    for cpu in dict.fromkeys(row.cpu for row in rows):
        own = [row for row in rows if row.cpu == cpu and row.fitted]

        def evaluate(rates: tuple[float, ...], own: list[CpuRow] = own) -> float:
            known = {own[0].cpu: Rates(*rates)}
            return loss([(row.token_s, row.span(known).typical) for row in own])

        found[cpu] = Rates(*search(evaluate, (60e9, 60e9, 120e9)))
    return found
