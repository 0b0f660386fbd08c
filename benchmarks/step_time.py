"""Where the time of a decode step goes: the device computes, or nothing does.

    python benchmarks/step_time.py                                   135M random weights, int4
    python benchmarks/step_time.py --steps-in-flight 1 2             both, in turns
    python benchmarks/step_time.py --against ../other/.venv/bin/python   and another installation of Quire

Every case runs in all variants before the next round begins; medians over steps, and over rounds. "idle" is
the time between two steps in which the device had work to come and computed nothing (Record.idle_s):
planning, taking tokens in, turning them into text. "tokens/s" counts whole steps; the ratio is to the last
variant, in the same round. Of --against tokens a second are enough, if it knows no idle time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import checkpoints

from quire import LLM, SamplingParams

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p + penalties": {
        "temperature": 0.8,
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "seed": 1,
    },
}
PROMPT, OUTPUT, WORDS = 32, 96, range(300, 1300)


def measure(llm: LLM, rows: int, params: dict[str, Any]) -> dict[str, float]:
    """Medians over the steps in which all rows generate, in seconds; and tokens a second."""
    prompts = [
        {"prompt_token_ids": [WORDS[(7 * i + j) % len(WORDS)] for j in range(PROMPT)]} for i in range(rows)
    ]
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **params), use_tqdm=False
    )
    metrics = [output.metrics for output in outputs]
    first, last = max(m.first_token_s for m in metrics), max(m.finished_s for m in metrics)
    found = {"tokens_s": rows * (OUTPUT - 1) / (last - first)}
    records = [r for r in list(llm.engine.records)[-OUTPUT + 8 :] if r.num_rows == rows == r.num_tokens]
    if records and hasattr(records[0], "idle_s"):
        found["device_s"] = statistics.median(r.device_s for r in records)
        found["idle_s"] = statistics.median(r.idle_s for r in records)
    return found


def serve(model: str, options: dict[str, Any]) -> None:
    """Measure what standard input asks for: a line of JSON in, a line of JSON out."""
    llm = LLM(model, **options)
    print("ready", flush=True)
    for line in sys.stdin:
        rows, params = json.loads(line)
        print(json.dumps(measure(llm, rows, params)), flush=True)


class Variant:
    """One way to run, in a process of its own."""

    def __init__(self, name: str, python: str, model: Path, options: dict[str, Any]) -> None:
        self.name = name
        command = [python, __file__, "--serve", str(model), json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{name} did not start")

    def measure(self, rows: int, params: dict[str, Any]) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([rows, params]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", default="s135", choices=sorted(checkpoints.SHAPES))
    parser.add_argument("--kind", default="int4", help="int4, int8 or bf16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps-in-flight", type=int, nargs="+", default=[1])
    parser.add_argument("--against", help="python of another installation of Quire")
    parser.add_argument("--rounds", type=int, default=5)
    checkpoints.add_work_option(parser)
    parser.add_argument("--serve", nargs=2, metavar=("MODEL", "OPTIONS"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve[0], json.loads(asked.serve[1]))
        return
    model = checkpoints.make(asked.model, asked.work)
    options: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": max(asked.rows)}
    if asked.kind != "bf16":
        options["quantization"] = asked.kind
    variants = [
        Variant(
            f"{n} in flight",
            sys.executable,
            model,
            {**options, "max_steps_in_flight": n, "speculative": "off"},
        )
        for n in asked.steps_in_flight
    ]
    if asked.against:
        variants.append(Variant("against", asked.against, model, options))
    print(
        f"{'rows':>4}  {'sampling':18} {'variant':12} {'tokens/s':>9} {'step':>9} {'idle':>9}   ratio",
        flush=True,
    )
    for rows in asked.rows:
        for name, params in PARAMS.items():
            rounds = [[v.measure(rows, params) for v in _turned(variants, i)] for i in range(asked.rounds)]
            rounds = [_turned(found, -i) for i, found in enumerate(rounds)]
            for index, variant in enumerate(variants):
                own = [found[index] for found in rounds]
                ratio = statistics.median(f[index]["tokens_s"] / f[-1]["tokens_s"] for f in rounds)
                print(_line(rows, name, variant.name, own, ratio), flush=True)


def _turned(things: list[Any], count: int) -> list[Any]:
    """The same list, beginning with another one."""
    count %= len(things)
    return things[count:] + things[:count]


def _line(rows: int, params: str, variant: str, found: list[dict[str, float]], ratio: float) -> str:
    tokens_s = statistics.median(f["tokens_s"] for f in found)
    idle = "-"
    if "idle_s" in found[0]:
        idle = f"{statistics.median(f['idle_s'] for f in found) * 1e6:.0f} us"
    step = f"{rows / tokens_s * 1e3:.2f} ms"
    return f"{rows:4d}  {params:18} {variant:12} {tokens_s:9,.0f} {step:>9} {idle:>9}   {ratio:.3f}"


if __name__ == "__main__":
    main()
