"""The work of encoding an image, counted in tokens of a prompt: a unit of no machine."""

from __future__ import annotations

from quire.images.vision import Vision
from quire.program.program import Load, Program

_CHUNK = 256  # tokens, of which a token is a typical one


class EncodingWork:
    """Tells how many tokens of a prompt take as many operations in `program` as an image in its tower."""

    def __init__(self, vision: Vision, program: Program) -> None:
        self._vision = vision
        self._token = _operations(program, _CHUNK, 0) / _CHUNK

    def of(self, num_tokens: int) -> int:
        """Return the work of an image of so many tokens, at least 1."""
        patches, tokens = self._vision.patching.most
        operations = _operations(self._vision.program, num_tokens * patches // tokens, num_tokens)
        return max(1, round(operations / self._token))


def _operations(program: Program, num_tokens: int, num_logits: int) -> float:
    load = Load(((0, num_tokens),), num_logits)
    return sum(op.flops(load) for op in program)
