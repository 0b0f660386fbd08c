"""The identity of an engine: what must be equal for its plans and bits to be equal."""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import quire
from quire.description import Description
from quire.recording.incident import GroupShape, Header
from quire.recording.journal import JournaledScheduler

NUM_DIGITS = 16


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


def build_digest() -> str:
    """Return a digest of the package's source and of its native library."""
    folder, found = Path(quire.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(repr(str(path.relative_to(folder))).encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    core = find_spec("quire.backends.native._core")
    if core is not None and core.origin is not None:
        found.update(hashlib.sha256(Path(core.origin).read_bytes()).digest())
    return found.hexdigest()[:NUM_DIGITS]


def checkpoint_digest(description: Description) -> str:
    """Return a digest of the configuration, and of the names, shapes and formats of all tensors."""
    found = hashlib.sha256(json.dumps(description.source.config(), sort_keys=True).encode())
    tensors = description.weights.need_tensors()
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(repr((name, tensor.shape, str(tensor.storage), tensor.nbytes)).encode())
    return found.hexdigest()[:NUM_DIGITS]
