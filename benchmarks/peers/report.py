"""The results: as a table in the terminal, as Markdown for the documentation, as JSON with every round."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from peers.process import Worker
from peers.roof import Case, Peaks

LEGEND = "medians; * is the fastest; others: cores that other processes kept busy meanwhile"


@dataclass
class Row:
    """One case of one model in one kind: what every engine reached in every round, and the roof."""

    model: str
    kind: str
    case: Case
    samples: dict[str, list[float]] = field(default_factory=dict)  # by engine
    peaks: list[Peaks] = field(default_factory=list)
    roof: float | None = None
    wall_s: float = 0.0
    others_s: float = 0.0  # processor time of other processes within it

    def add(self, engine: str, value: float, worker: Worker) -> None:
        """One more measure, which the worker has just made."""
        self.samples.setdefault(engine, []).append(value)
        self.wall_s += worker.wall_s
        self.others_s += worker.others_s

    @property
    def medians(self) -> dict[str, float]:
        return {engine: median(values) for engine, values in self.samples.items() if values}

    @property
    def ratio(self) -> float | None:
        """Return the speed of Quire relative to the fastest other engine."""
        mine, others = self.medians.get("quire"), [m for e, m in self.medians.items() if e != "quire"]
        if mine is None or not others:
            return None
        return mine / max(others) if self.case.prompt else min(others) / mine

    @property
    def others(self) -> float:
        """Cores that other processes kept busy while engines were measured. Figures are clean at 0."""
        return max(0.0, self.others_s / self.wall_s) if self.wall_s else 0.0

    @property
    def roof_share(self) -> float | None:
        mine = self.medians.get("quire")
        return mine / self.roof if mine is not None and self.roof else None

    def cells(self, engines: Sequence[str]) -> list[str]:
        """The row as text. The fastest of each row has a star."""
        best = (max if self.case.prompt else min)(self.medians.values(), default=None)
        cells = [f"{self.model} {self.kind}", f"{self.case.title}, {self.case.unit}"]
        for engine in engines:
            value = self.medians.get(engine)
            cells.append("" if value is None else _number(value) + ("*" if value == best else ""))
        cells.append("" if self.ratio is None else f"{self.ratio:.2f}")
        cells.append("" if self.roof is None else _number(self.roof))
        cells.append("" if self.roof_share is None else f"{self.roof_share:.0%}")
        return [*cells, f"{self.others:.1f}"]


@dataclass
class Report:
    """All rows, in the order measured, and what is needed to read them."""

    engines: tuple[str, ...]
    threads: int
    rounds: int
    kv_cache: str  # of Quire
    rows: list[Row] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # a line for everything that was left out

    @property
    def headings(self) -> list[str]:
        return ["model", "measure", *self.engines, "quire/best", "roof", "quire/roof", "others"]

    def table(self) -> Table:
        table = Table(title=self.summary, caption=LEGEND, title_justify="left")
        for index, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if index < 2 else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row.cells(self.engines))
        return table

    def markdown(self) -> str:
        lines = [f"{self.summary}; {LEGEND}.", ""]
        lines += [_line(self.headings), _line(["---"] * 2 + ["---:"] * (len(self.headings) - 2))]
        lines += [_line(row.cells(self.engines)) for row in self.rows]
        lines += ["", *(f"- {engine} {version}" for engine, version in self.versions.items())]
        return "\n".join([*lines, *(f"- left out: {what}" for what in self.missing), ""])

    def json(self) -> str:
        rows = [
            {
                "model": row.model,
                "kind": row.kind,
                "case": asdict(row.case),
                "unit": row.case.unit,
                "samples": row.samples,
                "medians": row.medians,
                "quire_over_best": row.ratio,
                "roof": row.roof,
                "quire_over_roof": row.roof_share,
                "others": row.others,
                "peaks": [asdict(peaks) for peaks in row.peaks],
            }
            for row in self.rows
        ]
        head = {
            "machine": processor(),
            "threads": self.threads,
            "rounds": self.rounds,
            "kv_cache": self.kv_cache,
        }
        rest = {"versions": self.versions, "missing": self.missing, "rows": rows}
        return json.dumps(head | rest, indent=1) + "\n"

    @property
    def summary(self) -> str:
        cache = "" if self.kv_cache == "auto" else f", Quire's KV cache in {self.kv_cache}"
        return f"{processor()}, {self.threads} threads, {self.rounds} interleaved rounds{cache}"

    def write(self, console: Console, json_file: Path | None, markdown_file: Path | None) -> None:
        """Print the table and write the files that were asked for."""
        console.print(self.table())
        if json_file:
            json_file.write_text(self.json(), "utf-8")
        if markdown_file:
            markdown_file.write_text(self.markdown(), "utf-8")


def processor() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
