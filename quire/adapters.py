"""The adapters of an engine: loaded by name from one folder, while it computes."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.backends.backend import Backend
from quire.config import EngineConfig
from quire.engine.status import AdapterFacts
from quire.environment import user_path
from quire.errors import ConfigError, RequestError, quoted
from quire.program.passes import module_of
from quire.program.program import Program
from quire.weights.adapters import found_in, read_adapter

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by name; one that is not loaded is loaded from `lora_path`, in the folder of adapters.

    The fields are vLLM's. `lora_int_id` has no effect: an adapter is identified by its name and its content.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


class Adapters:
    """Adapters of one backend. Any thread may load and unload them; requests that run keep what they have.

    An adapter is identified by its name and a digest of its content: an adapter that is loaded again with
    other content never uses what was cached of the old one.
    """

    def __init__(self, folder: Path, backend: Backend, program: Program, max_rank: int, limit: int) -> None:
        self._folder = folder
        self._backend = backend
        self._weights = [spec for spec in program.weights().values() if module_of(spec) is not None]
        self._max_rank = max_rank
        self._limit = limit
        self._loading = threading.Lock()  # one at a time
        self._changing = threading.Lock()  # of what follows: held for moments, so no step waits
        self._loaded: dict[str, AdapterFacts] = {}  # by name
        self._usable: frozenset[str] = frozenset()
        self._unloaded: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        backend: Backend,
        program: Program,
        chosen: Mapping[str, str] | None = None,
    ) -> Adapters | None:
        """Load all adapters of the configured folder, if there is one. Raises ConfigError for any bad one.

        With `chosen`, folders by name, those are loaded instead, but for bad ones, which are logged.
        """
        if config.adapter_dir is None:
            return None
        folder = user_path(config.adapter_dir)
        adapters = cls(folder, backend, program, config.max_lora_rank, config.max_adapters)
        for name in found_in(folder) if chosen is None else ():
            adapters.load(name, name)
        for name, path in (chosen or {}).items():
            try:
                adapters.load(name, path)
            except ConfigError as error:
                _LOG.error("the adapter %s is not loaded again: %s", name, error.message)
        return adapters

    @property
    def loaded(self) -> tuple[AdapterFacts, ...]:
        return tuple(self._loaded.values())

    def load(self, name: str, path: str) -> AdapterFacts:
        """Load an adapter from a folder in the folder of adapters, relative to it or absolute.

        Raises ConfigError if it cannot be loaded, or if the name is taken.
        """
        with self._loading:
            return self._load(name, path)

    def _load(self, name: str, path: str) -> AdapterFacts:
        if not _NAME.fullmatch(name):
            hint = "use letters, digits and ._:/@+-, at most 128"
            raise ConfigError(f"{quoted(name)} is no name for an adapter", hint)
        if name in self._loaded:
            raise ConfigError(f"the adapter {name!r} is already loaded", "unload it first")
        if len(self._loaded) >= self._limit:
            problem = f"{self._limit} adapters are loaded already"
            raise ConfigError(problem, "unload one, or raise max_adapters")
        read = read_adapter(self._place(path), self._folder, self._weights, self._max_rank)
        facts = AdapterFacts(f"{name}@{read.digest}", name, path, read.rank, read.nbytes, read.modules)
        with self._changing:
            kept = facts.adapter in self._unloaded
            self._unloaded -= {facts.adapter}
        if not kept:
            self._backend.add_adapter(facts.adapter, read.parts)
        with self._changing:
            self._loaded = {**self._loaded, name: facts}
            self._usable |= {facts.adapter}
        return facts

    def asked(self, request: Any) -> str:
        """Return what requests have as `adapter` for a LoRARequest or the name of a loaded adapter.

        One that is not loaded is loaded. Raises RequestError or ConfigError.
        """
        if isinstance(request, str):
            return self.find(request).adapter
        if not isinstance(request, LoRARequest):
            problem = f"lora_request is a {type(request).__name__}"
            raise RequestError(problem, "give LoRARequest(name, 1, path) or a name", "lora_request")
        if request.lora_path and request.lora_name not in self._loaded:
            with self._loading:
                if request.lora_name not in self._loaded:  # another thread may have loaded it meanwhile
                    return self._load(request.lora_name, request.lora_path).adapter
        return self.find(request.lora_name).adapter

    def _place(self, path: str) -> Path:
        """Return the folder of an adapter. Raises ConfigError if it is not in the folder of adapters."""
        hint = "an adapter is loaded from a folder in it only"
        place, inside = self._folder / path, self._folder.resolve()
        try:
            found = place.resolve()
            is_folder = found.is_dir()
        except (OSError, RuntimeError, ValueError):  # links in a circle, or no path at all
            raise ConfigError(f"{quoted(path)} is no path", hint) from None
        if found == inside or not found.is_relative_to(inside):
            raise ConfigError(f"{quoted(path)} is not in the folder of adapters (adapter_dir)", hint)
        if not is_folder:
            raise ConfigError(f"{quoted(path)} is no folder in the folder of adapters (adapter_dir)", hint)
        return place

    def unload(self, name: str) -> AdapterFacts:
        """Refuse an adapter to new requests; its memory is freed after a step whose requests lack it."""
        with self._changing:
            facts = self.find(name)
            self._loaded = {other: own for other, own in self._loaded.items() if other != name}
            self._usable -= {facts.adapter}
            self._unloaded |= {facts.adapter}
            return facts

    def find(self, name: str) -> AdapterFacts:
        """Return a loaded adapter. Raises RequestError if there is none of this name."""
        if name not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise RequestError(f"the adapter {quoted(name)} is not loaded", f"loaded: {known}", "lora_name")
        return self._loaded[name]

    # See quire.engine.adapter_table

    def __contains__(self, adapter: object) -> bool:
        return adapter in self._usable

    @property
    def has_unloaded(self) -> bool:
        return bool(self._unloaded)

    def free(self, used: Container[str]) -> None:
        with self._changing:
            for adapter in self._unloaded:
                if adapter not in used:
                    self._backend.drop_adapter(adapter)
                    self._unloaded -= {adapter}
