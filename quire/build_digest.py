"""The identity of the installed package."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

import quire

NUM_DIGITS = 16


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
