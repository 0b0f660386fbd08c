"""How the callers of an engine see it: the same three verbs in this process and across processes."""

from __future__ import annotations

from typing import Protocol

from quire.engine.engine import Engine
from quire.types import NewRequest, Output


class EngineClient(Protocol):
    """Submit requests, abort them, and fetch what came of them."""

    def submit(self, request: NewRequest) -> None:
        """Send a request. Raises RequestError when it is refused, EngineDead when nobody is there."""

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Ask for the end of a request, or of one choice; its final outputs follow as usual."""

    def outputs(self) -> list[Output]:
        """The next outputs, in order. Empty when none came of this step, or nothing is open."""

    @property
    def has_work(self) -> bool:
        """True while a final output is due."""


class LocalClient:
    """The engine in this process: fetching outputs is what makes it compute."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def submit(self, request: NewRequest) -> None:
        self.engine.add(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self.engine.abort(request_id, choice)

    def outputs(self) -> list[Output]:
        return self.engine.step()

    @property
    def has_work(self) -> bool:
        return self.engine.has_work
