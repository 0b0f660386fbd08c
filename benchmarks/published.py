"""Compare the ranges of `quire plan` with published measurements, and refit the constants.

    python benchmarks/published.py [--data ../shared/data] [--refit]

Constants are fitted on half of the rows, chosen by a hash of what was measured; the other half tests them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from published_rows import cpus, h100, own, vllm_runs
from published_rows.fitting import loss, search

from quire.roofline.shares import TYPICAL, Span, TypicalShares

START = (0.8, 0.55, 20e-6, 20e-6, 10e-6, 40e-6, 20e-6)  # the constants of TypicalShares in order


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--refit", action="store_true", help="fit the constants anew and print them")
    args = parser.parse_args()
    rows = h100.read_rows(args.data)
    shares = _refitted(rows) if args.refit else TYPICAL["gpu"]
    held = [(row.fitted, row.tpot(shares).holds(row.tpot_s)) for row in rows]
    _print("H100, time per output token", held)
    groups = defaultdict(list)
    for row, pair in zip(rows, held, strict=True):
        groups[f"  {row.name.split('/')[1]}, {row.engine.split()[0]}, {row.parallel}"].append(pair)
    for name, pairs in sorted(groups.items()):
        _print(name, pairs)
    total = [(row.fitted, row.e2e(shares).holds(row.e2e_s)) for row in rows]
    _print("H100, time of a request", total)
    for engine in ("vllm", "sglang", "trtllm"):
        times = [row.ttft_s / row.ttft(shares).typical for row in rows if row.engine.startswith(engine)]
        print(f"H100, {engine}: first token {median(times):.1f} times as late as without waiting")
    shared = [row for row in rows if row.shared]
    inside = [row.ttft(shares).low <= row.ttft_s <= row.wave(shares).high for row in shared]
    print(f"H100, first token between no wait and a wave: {sum(inside)}/{len(shared)}")
    measured = cpus.read_rows(args.data)
    calibrated = cpus.calibrate(measured) if args.refit else cpus.CALIBRATED
    if args.refit:
        for name, rates in calibrated.items():
            print(f"{name}: {rates}")
    _print(
        "CPUs, time per token", [(row.fitted, row.span(calibrated).holds(row.token_s)) for row in measured]
    )
    ours = [span.holds(measured_s) for span, measured_s in own.rows(Path(__file__).parents[1] / "docs")]
    print(f"docs/performance.md: {sum(ours)}/{len(ours)}")
    for run in vllm_runs.RUNS:
        for what, span, value in vllm_runs.compare(args.data, run):
            _print_one(f"{run.folder}, {what}", span, value)


def _refitted(rows: list[h100.H100Row]) -> TypicalShares:
    fitted = [row for row in rows if row.fitted]

    def evaluate(constants: tuple[float, ...]) -> float:
        shares = TypicalShares(*constants)
        penalty = max(0.0, constants[0] - 0.95) + max(0.0, constants[1] - 0.95)
        return loss([(row.tpot_s, row.tpot(shares).typical) for row in fitted]) + penalty

    found = TypicalShares(*search(evaluate, START))
    print(f"refitted: {found}")
    return found


def _print(name: str, held: Iterable[tuple[bool, bool]]) -> None:
    told = []
    for half, fitted in (("fitted", True), ("tested", False)):
        kept = [inside for is_fitted, inside in held if is_fitted is fitted]
        told.append(f"{half} {sum(kept)}/{len(kept)}" + (f" = {sum(kept) / len(kept):.1%}" if kept else ""))
    print(f"{name}: {', '.join(told)}")


def _print_one(name: str, span: Span, value: float) -> None:
    verdict = "held" if span.holds(value) else "NOT held"
    print(
        f"{name}: {span.low:.4g} to {span.high:.4g} (roof {span.roof:.4g}), measured {value:.4g}: {verdict}"
    )


if __name__ == "__main__":
    main()
