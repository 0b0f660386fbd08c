"""Measured points on H100 SXM: the time per output token of closed loops of equal requests, on 1 to 16 cards.

A row has a prompt and an answer of fixed lengths and a number of clients, each of which sends its next
request when the last one ends. "agg" rows compute prompts and tokens on the same cards, "disagg" rows apart.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from published_rows.fitting import is_fitted
from published_rows.models import CostedModel, costed
from quire.engine.step_law import StepLaw
from quire.program.features import Rows
from quire.roofline.folded import dot
from quire.roofline.law import law_at_the_roof
from quire.roofline.machines import find
from quire.roofline.shares import Span, TypicalShares

MACHINE = "H100 SXM"
Terms = list[tuple[float, float]]  # (memory, arithmetic) seconds of each stage at the roof


@dataclass
class H100Row:
    """One row. `cards` and `batch` are those of one worker that decodes; a batch may wait for memory."""

    name: str
    model: CostedModel
    engine: str
    parallel: str
    shared: bool  # prompts are computed on the cards that decode
    cards: int
    clients: float
    prompt: int
    output: int
    ttft_s: float
    tpot_s: float

    @property
    def e2e_s(self) -> float:
        return self.ttft_s + self.tpot_s * (self.output - 1)

    @property
    def fitted(self) -> bool:
        """True if constants are fitted on this row."""
        key = (self.name, self.engine, self.parallel, self.prompt, self.output, self.clients)
        return is_fitted("|".join(map(str, key)))

    @property
    def batch(self) -> int:
        """The sequences that are computed together: as many as the memory of the cards holds."""
        machine, model = find(MACHINE), self.model
        free = self.cards * machine.memory_bytes - model.weight_bytes
        held = int(free / model.kv_token_bytes / (self.prompt + self.output))
        return max(1, min(round(self.clients), held))

    @cached_property
    def terms(self) -> tuple[Terms, Terms]:
        """The stages of a decode step, and those of one prompt."""
        law = law_at_the_roof(self.model.folded, find(MACHINE).ceilings(self.cards), {})
        context = self.prompt + self.output // 2
        decode = _terms(law, ((context - 1, 1),) * self.batch, self.batch)
        return decode, _terms(law, ((0, self.prompt),), 1)

    def tpot(self, shares: TypicalShares) -> Span:
        """Predict the time per output token as `quire.roofline.serving` does, with the prompts of others."""
        step, prompt = self._steps(shares)
        others = (self.batch - 1) / max(self.output - 1, 1) if self.shared else 0.0
        return step.plus(prompt, others)

    def e2e(self, shares: TypicalShares) -> Span:
        """Predict the time of a request, with its wait for memory."""
        step, prompt = self._steps(shares)
        alone = prompt.plus(step, 0.5).plus(self.tpot(shares), self.output - 1)
        return alone.times(max(1.0, self.clients / self.batch))

    def ttft(self, shares: TypicalShares) -> Span:
        """Predict the time to the first token if prompts arrive evenly, none waiting for memory."""
        step, prompt = self._steps(shares)
        return prompt.plus(step, 0.5)

    def wave(self, shares: TypicalShares) -> Span:
        """Predict the time to the first token of the last of all clients, if they begin at once."""
        step, prompt = self._steps(shares)
        waiting = max(0.0, self.clients / self.batch - 1)
        return prompt.times(self.batch).plus(step).plus(self.e2e(shares), waiting * self.batch / self.clients)

    def _steps(self, shares: TypicalShares) -> tuple[Span, Span]:
        """Return the times of a decode step and of a prompt."""
        decode, prompt = (Span(_bound(terms, 1, 1), _bound(terms, *_of(shares))) for terms in self.terms)
        overhead = shares.overhead_s(self.cards, self.model.layers)
        step = decode.plus(Span(0.0, overhead + self.batch * shares.row_s))
        return step, prompt.plus(Span(0.0, overhead + shares.row_s))


def _of(shares: TypicalShares) -> tuple[float, float]:
    return min(shares.memory, 1.0), min(shares.arithmetic, 1.0)


def _bound(terms: Terms, memory: float, arithmetic: float) -> float:
    return sum([max(read / memory, computed / arithmetic) for read, computed in terms])


def _terms(law: StepLaw, rows: Rows, num_logits: int) -> Terms:
    found = law.values(rows, num_logits)
    return [(dot(stage.memory, found), dot(stage.arithmetic, found)) for stage in law.roof]


def read_rows(data: Path) -> list[H100Row]:
    """Return all rows of `silicon_sample_h100.csv`."""
    with (data / "perf" / "silicon_sample_h100.csv").open() as file:
        return [_row(raw, data / "configs") for raw in csv.DictReader(file)]


def _row(raw: dict[str, str], configs: Path) -> H100Row:
    fp8 = bool(raw["gemm_quant_mode"])
    model = costed(raw["model_path"], 8 if fp8 else 16, configs, "fp8" if fp8 else "bf16")
    shared = raw["mode"] == "agg"
    prefix = "" if shared else "decode_"
    data_parallel = int(raw[f"{prefix}attention_dp_size"] or 1)
    cards = int(raw[f"{prefix}tp_size"]) * data_parallel
    workers = 1 if shared else int(raw["decode_num_workers"] or 1)
    found = re.search(r"concurrency=(\d+)", raw["silicon_data_source"])
    if shared:
        clients = float(raw["batch_size"]) * data_parallel
    else:
        clients = int(found[1]) / workers if found else float(raw["decode_batch_size"])
    return H100Row(
        raw["model_path"],
        model,
        f"{raw['backend']} {raw['backend_version']}",
        f"{raw['mode']} {cards} cards, {workers} workers",
        shared,
        cards,
        max(clients, 1.0),
        int(raw["isl"]),
        int(raw["osl"]),
        float(raw["silicon_ttft_ms"]) / 1e3,
        float(raw["silicon_tpot_ms"]) / 1e3,
    )
