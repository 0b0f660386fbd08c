"""Laws and costs of steps by Python, for the page's own arithmetic to be compared with: run where quire is.

Writes JSON: all kinds of features, and programs that have all of them. A program has a law in the form of
GET /steps/law, the coefficients of its costs, and cases of random rows: with the values of the features, the
predicted seconds, those at the ceilings, and the exact cost.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from typing import Any, get_args

from test_folded import nbytes, random_rows, stateful
from tiny import tiny

from quire.engine.step_law import Stage, StepLaw
from quire.program import Program
from quire.program.features import Kind
from quire.roofline.folded import FoldedCost, fold
from quire.simulation.law_file import KnownLaw, as_json

NUM_CASES = 40


def law_of(folded: FoldedCost, rng: random.Random) -> StepLaw:
    """Return a law of any coefficients: what it predicts has no meaning, only its arithmetic has."""

    def row() -> tuple[float, ...]:
        return tuple(rng.uniform(0, 1e-6) for _ in folded.features)

    stages = tuple(Stage(row(), row(), name, "memory", "bf16") for name in ("products", "attention"))
    return StepLaw(folded.features, stages, row(), (Stage(row(), row()), Stage(row(), row())), 1e-4, 1.2)


def told(name: str, program: Program) -> dict[str, Any]:
    """Return what Python says of a program's steps."""
    rng = random.Random(name)
    folded = fold(program, nbytes, kv_itemsize=2, tile_rows=8)
    law, total = law_of(folded, rng), folded.total
    cases = []
    for _ in range(NUM_CASES):
        rows, num_logits = random_rows(rng), rng.randrange(50)
        found = law.values(rows, num_logits)
        cases.append(
            {
                "rows": rows,
                "num_logits": num_logits,
                "values": found,
                "seconds": law.seconds(found),
                "roof": law.roof_s(found),
                "cost": asdict(total.cost(found)),
            }
        )
    cost = {key: getattr(total, key) for key in cases[0]["cost"]}
    return {"name": name, "law": as_json(KnownLaw(law))["law"], "cost": cost, "cases": cases}


def main() -> None:
    """To standard output."""
    programs = {
        name: tiny(name).program
        for name in ("llama", "gemma3", "mixtral", "gpt_oss", "llama4", "deepseek_v32")
    }
    programs["stateful"] = stateful()
    json.dump({"kinds": get_args(Kind), "programs": [told(*item) for item in programs.items()]}, sys.stdout)


if __name__ == "__main__":
    main()
