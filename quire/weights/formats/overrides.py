"""Settings of single modules that differ from those of the checkpoint: GPTQModel's and AutoRound's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.weights.formats.names import compiled
from quire.weights.formats.settings import Settings

_LEAVE_OUT, _CHANGE = "-:", "+:"
_PATTERN = re.compile(r"[*+?\[(|\\]")


class Overrides:
    """The settings of modules by name.

    GPTQModel's `dynamic` maps regular expressions to changes, with "-:" before those of modules that are left
    out; AutoRound's `extra_config` maps names, or regular expressions, to changes. The first match counts,
    and an exact name before all patterns.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._exact: dict[str, Mapping[str, Any]] = {}
        self._patterns: list[tuple[re.Pattern[str], Mapping[str, Any] | None]] = []
        for field in ("dynamic", "extra_config"):
            found = settings.inner(field)
            for name, changes in found.values.items() if found else ():
                if not isinstance(changes, Mapping):
                    raise settings.fault(f"{field}.{name}", changes)
                if field == "extra_config" and not _PATTERN.search(name):
                    self._exact[name] = changes
                else:
                    pattern = compiled(name.removeprefix(_LEAVE_OUT).removeprefix(_CHANGE))
                    self._patterns.append((pattern, None if name.startswith(_LEAVE_OUT) else changes))

    def of(self, module: str) -> Settings | None:
        """Return the settings of a module; None if it is left out."""
        changes: Mapping[str, Any] | None = self._exact.get(module)
        if changes is None:
            matching = (own for pattern, own in self._patterns if pattern.match(module))
            changes = next(matching, {})
        if changes is None:
            return None
        return Settings({**self._settings.values, **changes}, self._settings.where)
