"""Adapters that the server has loaded and unloaded, in the engine's process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from quire.adapters import Adapters
from quire.errors import ConfigError, RequestError
from quire.server.engine_messages import AdapterChanged, ChangeAdapter

_NICE = 10  # threads that compute steps go first


class AdapterTraffic:
    """Loads and unloads adapters in threads of their own, so that no step waits for them."""

    def __init__(self, adapters: Adapters | None, send: Callable[[AdapterChanged], None]) -> None:
        self._adapters = adapters
        self._send = send

    def change(self, asked: ChangeAdapter) -> None:
        """Begin a change; its answer is sent when it is done."""
        threading.Thread(target=self._change, args=(asked,), name="quire-adapter", daemon=True).start()

    def _change(self, asked: ChangeAdapter) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        error = None
        try:
            if self._adapters is None:
                raise RequestError("no adapters can be loaded", "start the server with --adapter-dir")
            if asked.path is None:
                self._adapters.unload(asked.name)
            else:
                self._adapters.load(asked.name, asked.path)
        except (ConfigError, RequestError) as failure:
            error = failure.message, failure.hint, getattr(failure, "param", None)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}", None, None
        loaded = () if self._adapters is None else self._adapters.loaded
        self._send(AdapterChanged(asked.number, loaded, error))
