"""Why a deployment on Ray fails: nothing listens at its address, or what Serve says of its parts."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from quire.errors import ConfigError

REACH_S = 5.0  # in which a cluster's address accepts a connection

_OURS = re.compile(r"^quire\.errors\.(?:ConfigError|EngineDead): (.+)(?:\nhint: (.+))?", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):\n"
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:: .+)?$", re.MULTILINE)  # the line after a traceback's frames


def why_failed(words: Mapping[str, str], error: Exception) -> ConfigError:
    """Return what an engine or a front said when it could not start: `words` has tracebacks by deployment."""
    for text in words.values():
        if (found := _OURS.search(text)) is not None:
            return ConfigError(found[1], found[2])
    hint = "'serve status' tells more"
    for part, text in words.items():
        _, traceback, rest = text.rpartition(_TRACEBACK)
        if traceback and (found := _RAISED.search(rest)) is not None:
            return ConfigError(f"the deployment {part!r} could not start: {found[0]}", hint)
    last = str(error).rstrip().rpartition("\n")[2]  # of a traceback; the cause
    if "Failed to bind to address" in last:
        return ConfigError(f"cannot listen: {last}", "give another --port, or end what listens there")
    return ConfigError(f"the application was not deployed: {last}", hint)


def check_reachable(address: str) -> None:
    """Raise ConfigError unless something listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return  # "auto", or an address of another kind
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        words = f"there is no Ray cluster at {address}: {error}"
        raise ConfigError(words, "'ray start --head' prints its address, with port 6379 by default") from None
