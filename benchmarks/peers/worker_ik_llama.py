"""ik_llama.cpp, a fork of llama.cpp with its own kernels for CPUs, by the functions of ik_llama/shim.cpp.

As its tools have it with -rtr 1 -fa 1: matrices are repacked for this processor while loading, so the file is
read and not mapped; attention is fused, which is their default.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_char_p, c_int, c_int8, c_void_p
from pathlib import Path

from batches import BATCH, BatchEngine, Row
from worker import serve

LIBRARY = Path(sys.prefix) / "build" / "libquire_ik_llama.so"
INTS = POINTER(c_int)
FUNCTIONS = {
    "ik_commit": (c_char_p, []),
    "ik_open": (c_void_p, [c_char_p, c_int]),
    "ik_begin": (c_int, [c_void_p, c_int, c_int, c_int]),
    "ik_clear": (None, [c_void_p]),
    "ik_decode": (c_int, [c_void_p, c_int, INTS, INTS, INTS, POINTER(c_int8), INTS]),
}


class IkLlama(BatchEngine):
    def load(self, path: Path, kind: str, threads: int) -> None:
        self.library = ctypes.CDLL(str(LIBRARY))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        self.model = self.library.ik_open(str(path).encode(), threads)
        if not self.model:
            raise RuntimeError("ik_llama.cpp refused the file; its log says why")

    def version(self) -> str:
        return self.library.ik_commit().decode()[:10]

    def make_context(self, streams: int, length: int) -> None:
        if self.library.ik_begin(self.model, streams, length, BATCH):
            raise RuntimeError("ik_llama.cpp could not make a context; its log says why")

    def clear(self) -> None:
        self.library.ik_clear(self.model)

    def compute(self, rows: list[Row]) -> list[int]:
        tokens, positions, sequences, wanted = zip(*rows, strict=True)
        integers = c_int * len(rows)
        likeliest = integers()
        status = self.library.ik_decode(
            self.model,
            len(rows),
            integers(*tokens),
            integers(*positions),
            integers(*sequences),
            (c_int8 * len(rows))(*wanted),
            likeliest,
        )
        if status:
            raise RuntimeError(f"llama_decode failed with {status}")
        return likeliest[: sum(wanted)]


if __name__ == "__main__":
    serve(IkLlama())
