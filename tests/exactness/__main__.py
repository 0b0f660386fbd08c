"""Run rounds until so many requests were compared: `python tests/exactness [options]`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent / folder) for folder in ("", "pure", "model", "native")]

from exactness.rounds import Round, Tally  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="exactness", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="compare at least so many")
    parser.add_argument("--seed", type=int, default=0, help="of the rounds")
    parser.add_argument("--only", type=int, help="run this round alone")
    options = parser.parse_args()
    tally, number, problems, began_s = Tally(), options.only or 0, [], time.monotonic()
    while tally.requests < (1 if options.only is not None else options.requests):
        one = Round(f"{options.seed}:{number}")
        for problem in found_in(one, tally):
            problems.append(problem)
            print(f"round {number}, {one.kind}, {one.ways}: {problem}", flush=True)
        number += 1
        if number % 100 == 0:
            print(
                f"{number} rounds, {tally.requests} requests, {time.monotonic() - began_s:.0f} s",
                file=sys.stderr,
            )
    print(report(tally, number, len(problems)))
    sys.exit(bool(problems))


def found_in(one: Round, tally: Tally) -> list[str]:
    """Return the differences of a round, or the error that ended it."""
    try:
        one.run_plain(tally)
        return one.run_drafted(tally)
    except Exception:
        return [traceback.format_exc()]


def report(tally: Tally, num_rounds: int, num_problems: int) -> str:
    """Return the counts as Markdown."""
    lines = [
        f"{tally.requests:,} requests in {num_rounds:,} rounds, {tally.tokens:,} tokens each way: "
        f"{num_problems} differences.",
        "",
        *("| source | drafted | accepted | refused |", "|---|---|---|---|"),
    ]
    for source, drafted in sorted(tally.drafted.items()):
        accepted = tally.accepted[source]
        lines.append(f"| {source} | {drafted:,} | {accepted:,} | {drafted - accepted:,} |")
    counts = [*sorted(tally.kinds.items()), *sorted(tally.events.items())]
    lines += ["", ", ".join(f"{name} {count:,}" for name, count in counts)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
