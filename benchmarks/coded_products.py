"""Products with the weights of each kind of checkpoint: tokens a second, and how far they are from the roof.

    python benchmarks/coded_products.py
    python benchmarks/coded_products.py --kinds BitNet int4 --rows 1
    python benchmarks/coded_products.py --before ../before/.venv/bin/python --rounds 7

The native core alone: matrices of 8,192 outputs and 2,048 inputs, --megabytes of them in memory, each met by
so many rows. Tokens a second are of a model with a billion such weights. The roof is the longer one of
reading the weights and of multiplying 8-bit integers, at the rates that the probe finds in the same process;
times do not depend on numbers. Every round is a process, which takes the least time of --calls; medians of
rounds count. With --before the rounds of that version's Python alternate with those of this one, and ratios
are those of a pair. QUIRE_ISA chooses an instruction set.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from quire.backends.native import _core
from quire.backends.native.device import usable_cores
from quire.environment import instruction_set

ISA = instruction_set() or _core.isas()[0]
OUTPUTS, INPUTS = 8192, 2048
# The core's names: bits, inputs of a group, what codes mean, forms of scales and minimums, zero points.
KINDS = {
    "int4": "int4",
    "int8": "int8",
    "BitNet": "coded 2 256 offset bf16 none none",
    "Q2_K": "coded 2 16 unsigned f16_i8 f16_i8 none",
    "Q3_K": "coded 3 16 offset f16_i8 none none",
    "Q4_0": "coded 4 32 offset f16 none none",
    "Q4_K": "coded 4 32 unsigned f16_u6 f16_u6 none",
    "Q5_K": "coded 5 32 unsigned f16_u6 f16_u6 none",
    "Q6_K": "coded 6 16 offset f16_i8 none none",
    "Q8_0": "coded 8 32 offset f16 none none",
    "AWQ 4/128": "coded 4 128 unsigned f16 none zeros",
    "AWQ 4/64": "coded 4 64 unsigned f16 none zeros",
    "GPTQ 2/128": "coded 2 128 offset f16 none none",
    "GPTQ 2/64": "coded 2 64 offset f16 none none",
    "GPTQ 3/128": "coded 3 128 offset f16 none none",
    "GPTQ 3/64": "coded 3 64 offset f16 none none",
    "GPTQ 4/128": "coded 4 128 offset f16 none none",
    "GPTQ 4/64": "coded 4 64 offset f16 none none",
    "GPTQ 8/128": "coded 8 128 offset f16 none none",
    **{f"MLX {bits}/32": f"coded {bits} 32 unsigned bf16 bf16 none" for bits in (2, 3, 4, 6)},
    **{f"MLX {bits}/64": f"coded {bits} 64 unsigned bf16 bf16 none" for bits in (2, 3, 4, 5, 6, 8)},
    **{f"MLX {bits}/128": f"coded {bits} 128 unsigned bf16 bf16 none" for bits in (3, 5, 6)},
    "MXFP4": "coded 4 32 fp4 e8m0 none none",
    "NVFP4": "coded 4 16 fp4 f32_e4m3 none none",
    "NF4": "coded 4 64 floats f32 none none",
    "FP8": "coded 8 128 e4m3 bf16 none none",
    "W8A8": "coded 8 256 rows bf16 none none",
}


def program(pool: _core.Native, format: str, memory: np.ndarray) -> tuple[_core.Native, int, int]:
    """Record products with as many matrices as fit; return them, the place of results, and their number."""
    native = _core.Native(ISA, pool)
    x, out = native.buffer("T", INPUTS), native.buffer("T", OUTPUTS)
    size = _core.packed_bytes(format, 1, OUTPUTS, INPUTS)
    if (count := len(memory) // size) == 0:
        raise SystemExit(f"--megabytes must hold a matrix: {size / 1e6:.0f}")
    for index in range(count):
        part = memory[index * size : (index + 1) * size]
        matrix = _core.Matrix.mapped(format, 1, OUTPUTS, INPUTS, part)
        native.pack("T", x, INPUTS, matrix)
        native.products("T")
        native.linear(out, matrix, None)
    return native, out, count


def seconds(native: _core.Native, out: int, rows: int) -> float:
    ids, offsets, one = np.zeros(rows, np.int64), np.array([0, rows]), np.zeros(1, np.int64)
    begin = time.perf_counter()
    native.run(ids, ids, offsets, [], one, one, one[:0], [], [], out, 1, [], None)
    return time.perf_counter() - begin


def measure(given: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Return tokens a second and the share of the roof, of each kind and number of rows."""
    pool = _core.Native(ISA, given.threads)
    whole = np.full((given.megabytes << 20) + _core.ALIGNMENT, 0x38, np.uint8)  # a usual scale in each form
    memory = whole[-whole.ctypes.data % _core.ALIGNMENT :]
    read = _core.read_bandwidth(given.threads, ISA, 256 << 20, 0.5)
    peak = _core.peak_operations(given.threads, ISA, "int8", 0.3)
    found = {}
    for kind in given.kinds:
        native, out, count = program(pool, KINDS[kind], memory)
        weights = count * OUTPUTS * INPUTS
        nbytes = count * _core.packed_bytes(KINDS[kind], 1, OUTPUTS, INPUTS)
        found[kind] = []
        for rows in given.rows:
            least = min(seconds(native, out, rows) for _ in range(given.calls + 1))
            roof = max(nbytes / read, 2 * rows * weights / peak)
            found[kind].append((rows * weights / least / 1e9, roof / least))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS], metavar="KIND")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--before", metavar="PYTHON", help="the Python of another version's environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--once", action="store_true", help="measure in this process and print JSON")
    given = parser.parse_args()
    if given.once:
        print(json.dumps(measure(given)))
        return
    pythons = [given.before, sys.executable] if given.before else [sys.executable]
    found: list[list[Any]] = [[] for _ in pythons]
    for number in range(given.rounds):
        for index in range(len(pythons)) if number % 2 else reversed(range(len(pythons))):
            command = [pythons[index], *sys.argv, "--once"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            found[index].append(json.loads(done.stdout))
    print(f"{ISA}, {given.threads} threads, tokens a second of 1 B weights")
    print(f"{'':12}" + "".join(f"{f'rows: {rows}':>30}" for rows in given.rows))
    for kind in given.kinds:
        cases = [[[r[kind][case] for r in rounds] for rounds in found] for case in range(len(given.rows))]
        cells = [cell(case) for case in cases]
        print(f"{kind:12}" + "".join(f"{text:>30}" for text in cells))


def cell(found: list[list[tuple[float, float]]]) -> str:
    """Describe the rounds of one case, of the version before, if any, and of this one."""
    rates = [statistics.median(rate for rate, _ in rounds) for rounds in found]
    share = statistics.median(share for _, share in found[-1])
    if len(found) == 1:
        return f"{rates[0]:.1f} ({share:.0%})"
    ratio = statistics.median(after[0] / before[0] for before, after in zip(*found, strict=True))
    return f"{rates[0]:.1f} to {rates[1]:.1f}: {ratio:.2f} ({share:.0%})"


if __name__ == "__main__":
    main()
