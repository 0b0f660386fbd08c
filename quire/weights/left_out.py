"""The sentence about parts of a checkpoint that are not computed."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable
from fnmatch import translate

from quire.program.program import LeftOut
from quire.weights.tensors import Tensors


def left_out_in_words(parts: Iterable[LeftOut], tensors: Tensors | None, used: Container[str] = ()) -> str:
    """Return a sentence, as "text only: the vision tower (417 million parameters) is left out", or "".

    Tensors that are `used` do not count. Without tensors it names the parts that config.json states.
    """
    if tensors is None:
        told = {part: part.part for part in parts if part.stated}
    else:
        sizes = {part: _num_parameters(part, tensors, used) for part in parts}
        told = {part: f"{part.part} ({in_words(size)} parameters)" for part, size in sizes.items() if size}
    if not told:
        return ""
    text_only = "text only: " if any(part.text_only for part in told) else ""
    left_out = f"{text_only}{' and '.join(told.values())} {'is' if len(told) == 1 else 'are'} left out"
    return "; ".join([left_out, *(part.use for part in told if part.use)])


def _num_parameters(part: LeftOut, tensors: Tensors, used: Container[str]) -> int:
    belongs = re.compile("|".join(map(translate, part.patterns)))
    names = [name for name in tensors if name not in used and belongs.match(name)]
    return sum(math.prod(tensors[name].shape) for name in names)


def in_words(parameters: int) -> str:
    """Return a number in three digits and a word: "417 million"."""
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if parameters >= 0.9995 * size:  # what three digits round to it
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)
