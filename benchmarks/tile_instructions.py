"""Count the instructions that a tile of a product executes for a group of 32 inputs.

    sudo make arm
    python benchmarks/tile_instructions.py $(find /var/cache/quire-arm/root/build -name product.cpp.o)

The loop of a tile is the shortest one in its function that has a product of bytes. `--objdump` names the
program that reads code of this architecture (Debian: binutils-aarch64-linux-gnu).
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter
from pathlib import Path

INT8, INT4 = 3, 4  # numbers of Format in csrc/kernels/kernels.h
PRODUCTS = frozenset({"usmmla", "smmla", "usdot", "sdot", "smlal", "smull", "smlal2", "smull2"})
LINE = re.compile(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)")
JUMP = re.compile(r"(?:b|b\.\w+|cbn?z|tbn?z)$")

Instruction = tuple[int, str, str]  # address, name, operands


def instructions(code: str, function: str) -> list[Instruction]:
    """Return those of the function whose name contains `function`."""
    for part in code.split("\n\n"):
        head, _, body = part.strip().partition("\n")
        if head.endswith(">:") and function in head:
            found = (LINE.match(line) for line in body.splitlines())
            return [(int(m[1], 16), m[2], m[3]) for m in found if m]
    raise SystemExit(f"no function {function}")


def tile_loop(code: list[Instruction]) -> list[Instruction]:
    """Return the shortest loop with a product of bytes."""
    loops = []
    for address, name, operands in code:
        target = re.search(r"([0-9a-f]+) <", operands)
        if JUMP.match(name) and target and int(target[1], 16) <= address:
            body = [one for one in code if int(target[1], 16) <= one[0] <= address]
            if any(one[1] in PRODUCTS for one in body):
                loops.append(body)
    return min(loops, key=len)


def main() -> None:
    """Print the counts for one row and eight."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("objects", nargs="+", type=Path, help="objects of csrc/kernels/product.cpp")
    parser.add_argument("--objdump", default="aarch64-linux-gnu-objdump")
    given = parser.parse_args()
    for path in given.objects:
        command = [given.objdump, "--disassemble", "--demangle", "--no-show-raw-insn", str(path)]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(path)
        for format, bits in ((INT4, 4), (INT8, 8)):
            for rows in (1, 8):
                loop = tile_loop(instructions(code, f"panel_tile<{rows}, (quire::Format){format}>"))
                counts = Counter(name for _, name, _ in loop)
                print(f"  int{bits}, rows: {rows}: {len(loop)} instructions,", end=" ")
                print(", ".join(f"{count} {name}" for name, count in counts.most_common()))


if __name__ == "__main__":
    main()
