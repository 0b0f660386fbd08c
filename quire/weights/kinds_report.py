"""The storage kinds of a model's weights in words: which has which, and how it is computed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from quire.program.program import WeightSpec
from quire.quantize.coded import CodedStorage
from quire.quantize.coded_product import span_of
from quire.quantize.kinds import Storage
from quire.quantize.mixed import MixedStorage
from quire.weights.plan import WeightPlan

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXACT = ("e4m3", "e5m2")  # tables of floats: what is rounded from them was not rounded to integers before


@dataclass(slots=True)
class KindReport:
    """The weights that are of one kind in the checkpoint (`stored`) and of one when loaded (`kept`)."""

    stored: Storage
    kept: Storage
    specs: list[WeightSpec] = field(default_factory=list)
    layers: dict[str, list[int]] = field(default_factory=dict)  # by matrix, of those in several kinds

    @property
    def stored_bytes(self) -> int:
        return sum(self.stored.nbytes(spec.shape) for spec in self.specs)

    @property
    def kept_bytes(self) -> int:
        return sum(self.kept.nbytes(spec.shape) for spec in self.specs)

    @property
    def rounded_twice(self) -> bool:
        """True if integers or 4-bit floats that a format had rounded to were rounded again."""
        return self._rounded_again and not self._from_floats

    @property
    def _rounded_again(self) -> bool:
        return self.stored != self.kept and not self.stored.is_float and not self.kept.is_float

    @property
    def _from_floats(self) -> bool:
        return isinstance(self.stored, CodedStorage) and self.stored.table in _EXACT

    @property
    def computed(self) -> str:
        """The way these weights are multiplied, "" for floats."""
        if self._rounded_again:
            how = "rounded from 8-bit floats" if self._from_floats else "rounded twice"
            return f"{self.kept.kind}, {how}"
        if not self.stored.is_float and self.kept.is_float:
            return f"unpacked to {self.kept}"
        if not isinstance(self.kept, CodedStorage):
            return ""
        if self.kept.by_row:
            return "activations rounded to int8 by row"
        if self.kept.integers:
            return f"activations rounded to int8 by {span_of(self.kept.bits)} inputs"
        if self.kept.table in _EXACT:
            return "activations as beside bf16 weights"
        return "activations not rounded"

    def roles(self) -> str:
        """List what the weights are: matrices without their layers, all others as norms and biases.

        Of a matrix that has other kinds in other layers, the layers are listed.
        """
        small = any(map(_is_small, self.specs))
        return ", ".join([*map(self._role, self.layers), *["norms and biases"] * small])

    def _role(self, role: str) -> str:
        layers = self.layers[role]
        return f"{role} of {'layer' if len(layers) == 1 else 'layers'} {_ranges(layers)}" if layers else role


def report(plan: WeightPlan) -> list[KindReport]:
    """Return the kinds of a plan's weights, the largest first."""
    found: dict[tuple[Storage, Storage], KindReport] = {}
    for spec, stored, kept in _matrices(plan):
        kind = found.setdefault((stored, kept), KindReport(stored, kept))
        kind.specs.append(spec)
        if not _is_small(spec):
            role, layer = _role_and_layer(spec.name)
            layers = kind.layers.setdefault(role, [])
            if layer is not None and layer not in layers:
                layers.append(layer)
    number = Counter(role for kind in found.values() for role in kind.layers)
    for kind in found.values():
        kind.layers = {role: own if number[role] > 1 else [] for role, own in kind.layers.items()}
    return sorted(found.values(), key=lambda kind: -kind.stored_bytes)


def _matrices(plan: WeightPlan) -> Iterator[tuple[WeightSpec, Storage, Storage]]:
    """Yield each weight with its kinds, or each expert of one whose experts are of different kinds."""
    for name, spec in plan.specs.items():
        stored, kept = plan.stored[name], plan.storage[name]
        if not isinstance(stored, MixedStorage):
            yield spec, stored, kept
            continue
        one = replace(spec, shape=spec.shape[1:])
        own = kept.kinds if isinstance(kept, MixedStorage) else [kept] * len(stored.kinds)
        yield from ((one, *kinds) for kinds in zip(stored.kinds, own, strict=True))


def bits_per_weight(kinds: Iterable[KindReport]) -> tuple[float, float]:
    """Return the mean bits of a weight in the checkpoint and as it is kept; scales count."""
    kinds = list(kinds)
    size = max(1, sum(spec.size for kind in kinds for spec in kind.specs))
    return 8 * sum(k.stored_bytes for k in kinds) / size, 8 * sum(k.kept_bytes for k in kinds) / size


def in_a_line(plan: WeightPlan) -> str:
    """Say what a quantized checkpoint holds and how it is computed, in a line."""
    how = "; ".join(dict.fromkeys(kind.computed for kind in report(plan) if not kind.stored.is_float))
    return f"{plan.summary}: {how}" if how else plan.summary


def _is_small(spec: WeightSpec) -> bool:
    return len(spec.shape) == 1 or spec.name.endswith("bias")


def _role_and_layer(name: str) -> tuple[str, int | None]:
    """Return the name of a weight without its layer and ".weight", and the layer if it has one."""
    found = _LAYER.search(name)
    role = name[found.end() :] if found else name.removeprefix("model.")
    return role.removesuffix(".weight"), int(found[1]) if found else None


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers in short: "0-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
