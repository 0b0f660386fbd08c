"""The limit of the machine: the least time of a step, from its weights, its arithmetic and the measured roof.

Reading every weight once and doing every multiplication once at the measured peaks is the roof; nothing can
be faster. Activations and the KV cache of short contexts are left out, so it is a little too high.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peers.checkpoints import Shape

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
# Bits of a weight of the layers and of the head. int4 and int8 are Quire's, with an 8-bit scale for every 32;
# a GGUF file's are its own.
BITS = {
    "int4": (4.25, 4.25),
    "int8": (8.25, 8.25),
    "bf16": (16.0, 16.0),
    "w8a8": (8.0, 16.0),
    "q4_k_m": (4.8, 6.5625),
    "q8_0": (8.5, 8.5),
}
# Bytes of a cached number in Quire's formats, if not 2; int8 has a scale for 64 numbers, a head of l1b.
CACHE_BYTES = {"float32": 4, "int8": 1 + 4 / 64}


@dataclass(frozen=True)
class Case:
    """One measure. Without `num_new` it is a prefill; without a prompt it is the load.

    With `most_rounds` its prompt is long, and a measure too.
    """

    name: str
    title: str
    prompt: int = 0
    streams: int = 1
    num_new: int = 0
    models: tuple[str, ...] = ("l1b", "s135")
    most_rounds: int = 0

    @property
    def unit(self) -> str:
        return "tok/s" if self.prompt else "s"

    @property
    def parts(self) -> tuple[Case, ...]:
        """The measures that one request gives."""
        if not self.most_rounds:
            return (self,)
        return replace(self, title=f"prefill {self.prompt}", num_new=0), self

    def rate(self, first_s: float, rest_s: float) -> float:
        """Tokens a second, by the seconds until the first tokens and those of the others."""
        return self.streams * (self.num_new / rest_s if self.num_new else self.prompt / first_s)


@dataclass(frozen=True)
class Peaks:
    """Bytes read and multiply-adds done in a second, by the threads of the run."""

    read: float
    int8: float
    bf16: float


def measure(threads: int) -> Peaks | None:
    """The machine's peaks now, from `quire probe`; None if that cannot tell."""
    command = [sys.executable, "-m", "quire", "probe", "--json", "--num-threads", str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=ROOT)
        found = json.loads(done.stdout)
        rates = found["operations"]  # a multiply-add is two
        halves = rates["bf16"] or rates["f32"]  # without instructions for bf16 it is widened
        return Peaks(found["read_bytes"][str(threads)]["memory"], rates["int8"] / 2, halves / 2)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def median(samples: Sequence[Peaks]) -> Peaks | None:
    """Each peak's median."""
    if not samples:
        return None
    rows = [(s.read, s.int8, s.bf16) for s in samples]
    return Peaks(*(statistics.median(column) for column in zip(*rows, strict=True)))


def limit(case: Case, shape: Shape, kind: str, kv_cache: str, peaks: Peaks | None) -> float | None:
    """Tokens a second at the roof; None for a load and where no roof was measured."""
    if peaks is None or not case.prompt:
        return None
    macs_per_s = peaks.bf16 if kind == "bf16" else peaks.int8
    layer_bits, head_bits = BITS[kind]
    num_bytes = (shape.layer_weights * layer_bits + shape.head_weights * head_bits) / 8
    cached = CACHE_BYTES.get(kv_cache, 2) * shape.cached_numbers * case.prompt
    met = case.prompt if case.num_new else case.prompt / 2  # cached tokens that a token meets
    attention_s = shape.pair_macs * met / peaks.bf16  # it multiplies floats, whatever the weights are
    if case.num_new:
        read = num_bytes + case.streams * (cached + shape.state_bytes)
        weights_s = (shape.layer_weights + shape.head_weights) / macs_per_s
        return case.streams / max(read / peaks.read, case.streams * (weights_s + attention_s))
    weights_s = (case.prompt * shape.layer_weights + shape.head_weights) / macs_per_s
    return case.prompt / max(num_bytes / peaks.read, weights_s + case.prompt * attention_s)
