"""The time that the costs of a step take to compute: by asking every op, folded, and as features only.

    python benchmarks/costs.py CONFIG.json      of any model; weights are not read

For 256 rows and for one; "windows" are features with two sliding windows besides the full context, and
"law" is a prediction from features that are known. The best of several runs.
"""

from __future__ import annotations

import json
import random
import sys
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path

from quire.models import read_model
from quire.program.features import Feature, Kind, values
from quire.program.passes import fuse
from quire.program.program import Load, Program, WeightSpec
from quire.roofline.folded import fold
from quire.roofline.law import law_at_the_roof
from quire.roofline.probe import Ceilings

KINDS: tuple[Kind, ...] = ("positions", "pairs")
CEILINGS = Ceilings("any CPU", "any", 1, {"f32": 1e12}, {1: {"memory": 1e11}}, 0.0)


def best_us(task: Callable[[], object], repeat: int = 200) -> float:
    return min(timeit.repeat(task, number=1, repeat=repeat)) * 1e6


def nbytes(spec: WeightSpec) -> int:
    return 2 * spec.size


def whole(program: Program, rows: tuple[tuple[int, int], ...]) -> object:
    """Ask every op; a Load keeps its features, so it is a new one each time."""
    return program.cost(Load(rows, len(rows)), nbytes)


def main() -> None:
    program = fuse(read_model(json.loads(Path(sys.argv[1]).read_text())).program)
    folded, rng = fold(program, nbytes, tile_rows=8), random.Random(0)
    law = law_at_the_roof(folded, CEILINGS)
    windows = (*folded.features, *(Feature(kind, window) for window in (128, 1024) for kind in KINDS))
    print(f"{len(program.ops)} ops fold in {best_us(partial(fold, program, nbytes), 5) / 1e3:.1f} ms")
    print(f"{'us':28}{'program':>9}{'folded':>9}{'features':>9}{'windows':>9}{'law':>9}")
    starts = [rng.randrange(5000) for _ in range(256)]
    for name, rows in {
        "256 rows that decode": tuple([(start, 1) for start in starts]),
        "of which 6 are prompts": tuple([(start, 1 if n < 250 else 64) for n, start in enumerate(starts)]),
        "256 rows of 2 to 8 tokens": tuple([(start, rng.randrange(2, 9)) for start in starts]),
        "1 row": ((starts[0], 1),),
    }.items():
        taken = (
            best_us(partial(whole, program, rows), 5),
            best_us(partial(folded.cost, rows, len(rows))),
            best_us(partial(values, folded.features, rows, len(rows))),
            best_us(partial(values, windows, rows, len(rows))),
            best_us(partial(law.seconds, law.values(rows, len(rows)))),
        )
        print(f"{name:28}" + "".join(f"{one:9.1f}" for one in taken))


if __name__ == "__main__":
    main()
