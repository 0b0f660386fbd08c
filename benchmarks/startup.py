"""Start-up times: `import quire`, and from starting `quire run` to the first word of an answer.

    python benchmarks/startup.py [--rounds 9] [--model FILE]

Every sample is a new process, with files in the page cache and modules compiled, as an installed package has
them: the first round makes both, and the packed cache, and is not counted. Prints medians in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

IMPORT = [sys.executable, "-c", "import quire"]
PYTHON = [sys.executable, "-c", "pass"]


def seconds_to_output(command: list[str], env: dict[str, str]) -> float:
    """From start of the process to its first byte of output, or to its end when it prints nothing."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as process:
        if process.stdout is not None:
            process.stdout.read(1)
        waited = time.perf_counter() - start
        process.wait()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return waited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", default="demo", help="what `quire run` loads (default: demo)")
    options = parser.parse_args()
    answer = [sys.executable, "-m", "quire", "run", options.model, "hi", "--max-tokens", "1"]
    cases = {"python": PYTHON, "import quire": IMPORT, "quire run MODEL hi, first token": answer}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as compiled:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for index in range(options.rounds + 1):  # interleaved, so that a busy moment falls on all of them
            for name, command in cases.items():
                taken = seconds_to_output(command, env)
                if index:
                    samples[name].append(taken)
    for name, times in samples.items():
        print(f"{name:32} {statistics.median(times) * 1000:7.0f} ms   worst {max(times) * 1000:7.0f} ms")


if __name__ == "__main__":
    main()
