"""Start-up times: `import quire`, and from starting `quire run` to the first word of an answer.

    python benchmarks/startup.py [--rounds 9]

Every sample is a new process, with files in the page cache. Prints medians in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

IMPORT = [sys.executable, "-c", "import quire"]
PYTHON = [sys.executable, "-c", "pass"]
ANSWER = [sys.executable, "-m", "quire", "run", "demo", "hi", "--max-tokens", "1"]


def seconds_to_output(command: list[str]) -> float:
    """From start of the process to its first byte of output, or to its end when it prints nothing."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
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
    rounds = parser.parse_args().rounds
    cases = {"python": PYTHON, "import quire": IMPORT, "quire run demo hi, first token": ANSWER}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):  # interleaved, so that a busy moment falls on all of them
        for name, command in cases.items():
            samples[name].append(seconds_to_output(command))
    for name, times in samples.items():
        print(f"{name:32} {statistics.median(times) * 1000:7.0f} ms   worst {max(times) * 1000:7.0f} ms")


if __name__ == "__main__":
    main()
