"""The host of several models: it loads and unloads them, and lets requests in and out of each."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

from quire.config import ServerConfig
from quire.errors import ConfigError, Overloaded, QuireError, RequestError
from quire.server.errors import HTTPRefusal, NotFound
from quire.server.hosted.policy import Standing, State, decide, nbytes
from quire.server.request import ServerRequest
from quire.server.service import LATEST, QueueFull, ServiceState, is_served, patterns_of, served_names

if TYPE_CHECKING:
    from quire.server.hosted.budget import Allotment, ModelSpec
    from quire.server.ollama.models import Shown

RETRY_S = 5  # when a model could not be loaded in time
_LOG = logging.getLogger(__name__)

Loaded = tuple[ServiceState, ASGIApp]
Open = Callable[["ModelSpec", "Allotment"], AbstractAsyncContextManager[Loaded]]


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits until its model is loaded. `admitted` gets None, or the error it ends with."""

    arrival_s: float
    admitted: asyncio.Future[None]

    def end(self, error: Exception) -> None:
        """Report this error to the client."""
        if not self.admitted.done():
            self.admitted.set_exception(error)


@dataclass(slots=True, eq=False)
class HostedModel:
    """One model of the server: its settings, its state and, while it is loaded, its service and routes.

    Times are of time.monotonic.
    """

    spec: ModelSpec
    budget: Allotment
    idle_unload_s: float
    state: State = "unloaded"
    service: ServiceState | None = None
    app: ASGIApp | None = None
    num_users: int = 0  # requests in its routes
    is_closed: bool = False  # takes no new requests, as another waits for its memory
    waiters: list[Waiter] = field(default_factory=list)
    used_s: float = 0.0
    loaded_s: float = 0.0
    load_s: float = 0.0  # how long the last load took
    num_loads: int = 0
    num_failures: int = 0
    shown: Shown | None = None  # its description, once that was asked for while it was not loaded
    unload: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which it is listed."""
        return served_names(self.spec.config, self.spec.engine_config.model)

    @property
    def patterns(self) -> tuple[str, ...]:
        return patterns_of(self.spec.config)

    @property
    def adapters(self) -> dict[str, str]:
        """The identities of its adapters by name; while it is not loaded, the names in its folder."""
        if self.service is not None:
            return {own.name: own.adapter for own in self.service.adapters.values()}
        with suppress(ConfigError):  # which loading it reports
            return {name: name for name in self.spec.adapter_names()}
        return {}

    @property
    def max_model_len(self) -> int:
        """The longest context, as planned until it is loaded."""
        service = self.service
        return self.budget.facts.max_model_len if service is None else service.frontend.max_model_len

    def standing(self) -> Standing:
        """Return what the policy knows of it."""
        return Standing(
            self.budget.need,
            self.state,
            self.num_users,
            min((one.arrival_s for one in self.waiters), default=None),
            self.used_s,
            self.loaded_s,
            self.load_s,
            self.idle_unload_s,
        )

    def enter(self) -> None:
        """Count a request that is let in."""
        self.num_users += 1
        self.used_s = time.monotonic()


class Host:
    """All models of a server, and the memory that they may use together.

    `open` returns the context in which a model is loaded. Use it from one event loop.
    """

    def __init__(
        self, config: ServerConfig, models: Sequence[HostedModel], limit_bytes: int, open: Open
    ) -> None:
        self.config = config
        self.models = {model.name: model for model in models}
        self.limit_bytes = limit_bytes
        self.draining = self.refusing = False
        self.created_s = int(time.time())
        self._open = open
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of models that are not unloaded
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    # For the HTTP server

    @property
    def requests(self) -> set[ServerRequest | Waiter]:
        """All open requests: those that wait for a model, and those in one."""
        found: set[ServerRequest | Waiter] = set()
        for model in self.models.values():
            found.update(model.waiters)
            if model.service is not None:
                found.update(model.service.requests)
        return found

    @property
    def is_over(self) -> bool:
        """Return False: a model whose engine is given up is unloaded, and its next request loads it again."""
        for model in self.models.values():
            if model.state == "loaded" and model.service and model.service.is_over:
                _LOG.error("model %s is unloaded: its engine cannot be restarted", model.name)
                self._unload(model)
        return False

    def end_feeds(self) -> None:
        """End the streams of those who watch engines."""
        for model in self.models.values():
            if model.service is not None:
                model.service.end_feeds()

    async def close(self) -> None:
        """Unload all models."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        for model in self.models.values():
            for waiter in model.waiters:
                waiter.end(Overloaded("the server is shutting down", "ask again", RETRY_S))
            if model.state == "loading":
                self._tasks[model.name].cancel()
            model.unload.set()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    # Models

    @property
    def used_bytes(self) -> int:
        """The memory of the models that are loaded, being loaded or being unloaded."""
        return nbytes(one.budget.need for one in self.models.values() if one.state != "unloaded")

    def find(self, name: str | None) -> HostedModel:
        """Return the model of a name, or of an adapter's; the first one without a name.

        Raises NotFound, and RequestError for an adapter that two models have.
        """
        models = list(self.models.values())
        if name is None:
            return models[0]
        for asked in dict.fromkeys((name, name.removesuffix(LATEST))):
            if found := [one for one in models if asked in one.names]:
                return found[0]
            if found := [one for one in models if asked in one.adapters]:
                return _only(found, asked)
            if found := [one for one in models if is_served(asked, one.names, one.patterns)]:
                return found[0]
        known = ", ".join(word for one in models for word in (*one.names, *one.patterns))
        raise NotFound(
            f"model {name[:200]!r} is not served here", f"served are {known}", "model", "model_not_found"
        )

    def names_beside(self, model: str) -> set[str]:
        """Return the names of all other models and of their adapters."""
        others = (one for name, one in self.models.items() if name != model)
        return {word for one in others for word in (*one.names, *one.adapters)}

    def last_used(self) -> HostedModel | None:
        """Return the loaded model that was used last."""
        loaded = [one for one in self.models.values() if one.state == "loaded"]
        return max(loaded, key=lambda one: one.used_s, default=None)

    async def enter(self, model: HostedModel, left: asyncio.Future[Any]) -> None:
        """Let a request in when the model is loaded; `leave` must follow. `left`: its client disconnected.

        Raises Overloaded when that takes too long or too many wait, HTTPRefusal when loading fails.
        """
        if model.state == "loaded" and not model.is_closed:
            return model.enter()
        if sum(len(one.waiters) for one in self.models.values()) >= self.config.max_queued_requests:
            raise QueueFull("the queue is full: too many requests wait for a model", "ask again", RETRY_S)
        waiter = Waiter(time.monotonic(), asyncio.get_running_loop().create_future())
        model.waiters.append(waiter)
        self.arrange()
        try:
            both = (waiter.admitted, left)
            await asyncio.wait(both, timeout=self.config.load_wait, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._forget(model, waiter)
            raise
        if waiter.admitted.done():
            return waiter.admitted.result()
        self._forget(model, waiter)
        raise self._late(model)

    def _forget(self, model: HostedModel, waiter: Waiter) -> None:
        """Take back a request that may have been let in meanwhile."""
        if waiter in model.waiters:
            model.waiters.remove(waiter)
            self.arrange()
        elif waiter.admitted.done() and waiter.admitted.exception() is None:
            self.leave(model)

    def _late(self, model: HostedModel) -> Overloaded:
        words = f"model {model.name!r} was not loaded within {self.config.load_wait:g} s"
        if model.state == "loading":
            return Overloaded(f"{words}: loading goes on", "ask again, or raise --load-wait", RETRY_S)
        busy = ", ".join(one.name for one in self.models.values() if one.num_users)
        hint = "ask again, or raise --max-loaded-memory"
        return Overloaded(f"{words}: it waits for the memory of models in use ({busy})", hint, RETRY_S)

    def leave(self, model: HostedModel, idle_unload_s: float | None = None) -> None:
        """Note the end of a request that was let in, which may say when to unload its model."""
        model.num_users -= 1
        model.used_s = time.monotonic()
        model.idle_unload_s = self.config.idle_unload if idle_unload_s is None else idle_unload_s
        if not model.num_users:
            self.arrange()

    # Loading and unloading

    def arrange(self) -> None:
        """Load, close and unload models as the policy decides."""
        if self._ended:
            return
        standings = {name: model.standing() for name, model in self.models.items()}
        decision = decide(standings, self.limit_bytes, time.monotonic())
        for name, model in self.models.items():
            model.is_closed = name in decision.closed
            if model.state == "loaded" and not model.is_closed and name not in decision.unload:
                self._admit(model)
        for name in decision.unload:
            self._unload(self.models[name])
        for name in decision.load:
            self._load(self.models[name])
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if decision.wake_s is not None and decision.wake_s < math.inf:
            delay_s = max(0.0, decision.wake_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.arrange)

    def _admit(self, model: HostedModel) -> None:
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.admitted.done():
                model.enter()
                waiter.admitted.set_result(None)

    def _load(self, model: HostedModel) -> None:
        model.state = "loading"
        model.unload.clear()
        task = asyncio.get_running_loop().create_task(self._live(model), name=f"model {model.name}")
        self._tasks[model.name] = task

    def _unload(self, model: HostedModel) -> None:
        if model.state == "loaded":
            model.state = "unloading"
            model.unload.set()

    async def _live(self, model: HostedModel) -> None:
        """Load a model, keep it until it is to be unloaded, and unload it."""
        begin_s, num_bytes = time.monotonic(), model.budget.need.total_bytes
        try:
            async with self._open(model.spec, model.budget) as (service, app):
                model.service, model.app = service, app
                model.loaded_s = model.used_s = time.monotonic()
                model.load_s = model.loaded_s - begin_s
                model.num_loads += 1
                model.state = "loaded"
                fields = {"model": model.name, "bytes": num_bytes, "seconds": round(model.load_s, 2)}
                _LOG.info("loaded", extra={"fields": fields})
                self._admit(model)
                self.arrange()
                await model.unload.wait()
                model.state = "unloading"
                service.end_feeds()
        except Exception as error:
            self._fail(model, error)
        finally:
            if model.state == "unloading":
                _LOG.info("unloaded", extra={"fields": {"model": model.name, "bytes": num_bytes}})
            model.state, model.service, model.app = "unloaded", None, None
            del self._tasks[model.name]
            self.arrange()

    def _fail(self, model: HostedModel, error: Exception) -> None:
        """Report a load that failed to the requests that waited for it, and to no others."""
        is_own = isinstance(error, QuireError)
        _LOG.error("model %s: %s", model.name, error, exc_info=None if is_own else error)
        if model.state != "loading":  # it failed while it was unloaded
            return
        model.num_failures += 1
        words = error.message if isinstance(error, QuireError) else "its log has the details"
        hint = error.hint if isinstance(error, QuireError) else None
        refusal = HTTPRefusal(
            503, f"model {model.name!r} could not be loaded: {words}", hint, code="model_load_failed"
        )
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            waiter.end(refusal)


def _only(models: Sequence[HostedModel], adapter: str) -> HostedModel:
    """Return the model that has an adapter of this name. Raises RequestError if several have one."""
    if len(models) > 1:
        having = ", ".join(one.name for one in models)
        problem = f"several models have an adapter {adapter[:200]!r}: {having}"
        raise RequestError(problem, "rename one of the folders, or unload one adapter", "model")
    return models[0]
