"""The adapters of several engines, which are to have the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from quire.errors import EngineDead, QuireError
from quire.server.adapter_changes import paths_of

if TYPE_CHECKING:
    from quire.server.remote import RemoteEngine


async def change_all(engines: Sequence[RemoteEngine], name: str, path: str | None) -> None:
    """Load an adapter in all of these engines or, without a path, unload it: see ChangesAdapters.

    Nothing is changed while one of them is restarted. If one cannot load the adapter, none keeps it; if one
    dies before it unloads it, the others do, and unloading it again is for that one alone.
    """
    if any(engine.status.state != "ready" for engine in engines):
        raise EngineDead("a replica is restarting", "send the request again in a moment")
    if path is None:
        await _unload_all(engines, name)
        return
    changed: list[RemoteEngine] = []
    try:
        for engine in engines:
            await engine.change_adapter(name, path)
            changed.append(engine)
    except QuireError:
        for engine in changed:
            with suppress(QuireError):
                await engine.change_adapter(name, None)
        raise


async def _unload_all(engines: Sequence[RemoteEngine], name: str) -> None:
    having = [engine for engine in engines if name in paths_of(engine.status.facts.adapters)]
    errors: list[QuireError] = []
    for engine in having or engines:
        try:
            await engine.change_adapter(name, None)
        except QuireError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def adapters_of(engines: Sequence[RemoteEngine]) -> dict[str, str] | None:
    """Return the folders by name of the adapters that these engines have, None without engines."""
    return paths_of(engines[0].status.facts.adapters) if engines else None


async def catch_up(
    engine: RemoteEngine, given: Mapping[str, str] | None, now: Mapping[str, str] | None
) -> None:
    """Change what others changed since an engine was given the adapters that it should start with."""
    if given is None or now is None:
        return
    for name in given:
        if now.get(name) != given[name]:
            await engine.change_adapter(name, None)
    for name, path in now.items():
        if given.get(name) != path:
            await engine.change_adapter(name, path)
