"""Run one kit, or all of them: `python tests/endurance [faults | replicas | schemas | soak] [options]`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
KITS = ("faults", "schemas", "soak")  # run without a name
NAMED = ("replicas", *KITS)


def main() -> None:
    name, *options = sys.argv[1:] or [""]
    if not name:
        sys.exit(max(subprocess.call([sys.executable, str(HERE), kit]) for kit in KITS))
    if name not in NAMED:
        sys.exit(f"{name!r} is none of the kits: {', '.join(NAMED)}")
    sys.path[:1] = [str(HERE.parent), str(HERE.parents[1] / "benchmarks")]
    sys.argv = [name, *options]
    importlib.import_module(f"endurance.{name}").main()


if __name__ == "__main__":
    main()
