"""The identity of an engine: what must be equal for its plans and bits to be equal."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import quire
from quire.build_digest import NUM_DIGITS, build_digest
from quire.recording.incident import GroupShape, Header
from quire.recording.journal import JournaledScheduler
from quire.weights.plan import integer_sources

if TYPE_CHECKING:
    from quire.description import Description

NUM_SAMPLES = 256  # numbers of the beginning, the middle and the end of each tensor


def header_of(description: Description, scheduler: JournaledScheduler) -> Header:
    """Return the header of the recordings of an engine."""
    return Header(
        quire=quire.__version__,
        build=build_digest(),
        arithmetic=description.fingerprint,
        checkpoint=checkpoint_digest(description),
        contents=scheduler.records_contents,
        config=description.config,
        groups=tuple(map(GroupShape.of, scheduler.groups)),
        arguments=scheduler.arguments,
        vocab_size=description.model.config.vocab_size,
    )


def checkpoint_digest(description: Description) -> str:
    """Return a digest of the configuration, and of the names, shapes and formats of all tensors."""
    found = hashlib.sha256(json.dumps(description.source.config(), sort_keys=True).encode())
    tensors, integers = description.weights.need_tensors(), integer_sources(description.weights.specs)
    for name in sorted(tensors):
        tensor = tensors[name]
        format = "integers" if name in integers else str(tensor.storage)
        found.update(repr((name, tensor.shape, format, tensor.nbytes)).encode())
    return found.hexdigest()[:NUM_DIGITS]


def link_fingerprint(description: Description, layout: str) -> bytes:
    """Return a digest of what determines the content of a block, beside its tokens and their salt.

    That is the build, the instruction set, number formats, the layout of blocks, and the checkpoint: names
    and shapes of its tensors and samples of each, as paths and times differ between hosts.
    """
    found = hashlib.sha256()
    for part in (build_digest(), description.fingerprint, checkpoint_digest(description), layout):
        found.update(hashlib.sha256(part.encode()).digest())
    tensors, integers = description.weights.need_tensors(), integer_sources(description.weights.specs)
    for name in sorted(tensors):
        numbers = tensors.integers(name) if name in integers else tensors.pull(name).floats()
        numbers = numbers.reshape(-1)
        for begin in (0, numbers.size // 2, max(0, numbers.size - NUM_SAMPLES)):
            found.update(numbers[begin : begin + NUM_SAMPLES].tobytes())
    tensors.close()
    return found.digest()
