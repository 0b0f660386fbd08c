"""Tensors of several places as those of one model: its own, and those of modules in folders of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from quire.quantize.kinds import StoredWeight
from quire.weights.renamed import RenamedTensors
from quire.weights.source import ModelSource
from quire.weights.tensors import Tensor, Tensors


def with_modules(tensors: Tensors, source: ModelSource, folders: Iterable[str]) -> Tensors:
    """Return a model's tensors with those of modules, whose names then begin with their folder."""
    modules = []
    for folder in folders:
        own = source.module_tensors(folder)
        modules.append(RenamedTensors(own, {f"{folder}.{name}": name for name in own}))
    return JoinedTensors(tensors, modules) if modules else tensors


class JoinedTensors(Tensors):
    """The tensors of a model and of its modules; each name belongs to the last that has it."""

    def __init__(self, model: Tensors, modules: Iterable[Tensors]) -> None:
        self._parts = (model, *modules)
        self._part_of = {name: part for part in self._parts for name in part}

    @property
    def where(self) -> str:
        return self._parts[0].where

    @property
    def summary(self) -> str:
        return self._parts[0].summary

    @property
    def notes(self) -> tuple[str, ...]:
        return self._parts[0].notes

    def pull(self, name: str) -> StoredWeight:
        return self._part_of[name].pull(name)

    def prefetch(self, name: str) -> None:
        self._part_of[name].prefetch(name)

    def release(self, name: str) -> None:
        self._part_of[name].release(name)

    def name_in_files(self, name: str) -> str:
        return self._part_of[name].name_in_files(name)

    def identity(self) -> bytes:
        return hashlib.blake2b(b"".join(part.identity() for part in self._parts), digest_size=20).digest()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def __getitem__(self, name: str) -> Tensor:
        return self._part_of[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._part_of)

    def __len__(self) -> int:
        return len(self._part_of)
