"""Start, drain and end the server: a socket, an engine, an application."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.types import ASGIApp

from quire.config import EngineConfig, ServerConfig
from quire.engine.client import EngineClient
from quire.environment import api_keys
from quire.errors import ConfigError, Overloaded
from quire.recording.recorder import Recorder
from quire.server import malloc_arenas
from quire.server.app import make_app
from quire.server.connection import MAX_HEAD_BYTES, Protocol
from quire.server.engine_process import GC_THRESHOLD
from quire.server.local import LocalServer
from quire.server.metrics import Metrics
from quire.server.open_frontend import find_output_format, open_frontend
from quire.server.page.feed import Feed
from quire.server.remote import RemoteEngine
from quire.server.served import Served
from quire.server.service import DRAIN_RETRY_S, ServiceState, served_names
from quire.server.telemetry import Spans

if TYPE_CHECKING:
    from quire.cluster.link_counts import LinkCounts
    from quire.cluster.replicas import Replicas

IN_TRANSIT_S = 0.1  # for requests that were sent before a signal
INTERRUPT_DRAIN_S = 5  # for open requests after Ctrl-C
END_S = 2.0  # for error events to requests that the drain ends, and for connections to close
UNBOUNDED = 1 << 62  # requests or tokens, where the caller bounds them
TICK_S = 0.1  # between two calls of uvicorn's on_tick
KEEP_ALIVE_S = 75  # more than clients keep an idle connection, so that they close it and not we
OPEN_FILES = 1 << 16
_LOG = logging.getLogger(__name__)

Ready = Callable[[ServiceState, str], None]
Opened = tuple[Served, ASGIApp, Callable[[str], None]]  # the last is called with the URL
Context = contextlib.AbstractAsyncContextManager[Opened]
MakeSeveral = Callable[[ServerConfig, EngineConfig, bool], "Replicas"]  # the last: measure the ceilings
InRole = Callable[
    [ServerConfig, RemoteEngine],
    contextlib.AbstractAsyncContextManager[tuple[EngineClient, Mapping[str, "LinkCounts"]]],
]


async def serve(
    config: ServerConfig,
    engine_config: EngineConfig,
    ready: Ready,
    several: MakeSeveral | None = None,
    in_role: InRole | None = None,
) -> int:
    """Serve a model until a signal, by one engine or by several. Return 0 when every open request could end.

    One engine may have a role beside others: then `in_role` gives the client for this server's requests.
    `ready` is called with the URL once requests are accepted. Raises ConfigError when the model or the
    server's configuration is wrong.
    """

    @contextlib.asynccontextmanager
    async def opened(keys: tuple[str, ...]) -> AsyncIterator[Opened]:
        async with loaded(config, engine_config, bool(keys), several, in_role, measure=True) as service:
            yield service, make_app(service, keys), lambda url: ready(service, url)

    return await serve_opened(config, opened)


async def serve_opened(config: ServerConfig, opened: Callable[[tuple[str, ...]], Context]) -> int:
    """Serve what `opened` yields until a signal, as `serve` does. It is called with the API keys."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    caught: list[int] = []

    def stop_loading(number: int) -> None:
        caught.append(number)
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop_loading, number)
    keys = api_keys(config.api_key_file)
    _check_certificate(config)
    find_output_format(config, {})
    listener = bind(config.host, config.port)
    try:
        async with opened(keys) as (served, app, ready):
            gc.collect()
            gc.freeze()  # collections, which all streams wait for, need not visit loaded objects
            gc.set_threshold(GC_THRESHOLD)
            return await _Server(served, app, ready).run(listener)
    except asyncio.CancelledError:
        if not caught:
            raise
        return 128 + caught[0]
    finally:
        listener.close()


@contextlib.asynccontextmanager
async def local_server(config: ServerConfig, engine_config: EngineConfig) -> AsyncIterator[LocalServer]:
    """Load a model and yield its endpoints, without a socket and with a queue that is never full.

    Raises ConfigError for a model that cannot be served.
    """
    config = replace(config, max_queued_requests=UNBOUNDED, max_queued_tokens=UNBOUNDED, page=False)
    async with loaded(config, engine_config, keyed=False) as service:
        yield LocalServer(make_app(service, ()), config.host, service.engine.status)


@contextlib.asynccontextmanager
async def loaded(
    config: ServerConfig,
    engine_config: EngineConfig,
    keyed: bool,
    several: MakeSeveral | None = None,
    in_role: InRole | None = None,
    measure: bool = False,
    available_bytes: int | None = None,
    num_sharing: int = 1,
) -> AsyncIterator[ServiceState]:
    """Start the engine's process, or those of several, yield what the endpoints need, and end both.

    `available_bytes` and `num_sharing` are those of RemoteEngine.
    """
    malloc_arenas.share()
    recorder = _recorder(config)
    replicas = None if several is None else several(config, engine_config, measure)
    engine = replicas or RemoteEngine(
        engine_config,
        measure=measure,
        recorder=recorder,
        available_bytes=available_bytes,
        num_sharing=num_sharing,
    )
    async with contextlib.AsyncExitStack() as ended:
        ended.push_async_callback(engine.close)
        await engine.start()
        client: EngineClient = engine
        links: Mapping[str, LinkCounts] = {}
        if in_role is not None and isinstance(engine, RemoteEngine):
            client, links = await ended.enter_async_context(in_role(config, engine))
        service = await asyncio.to_thread(make_service, config, engine_config, client, keyed)
        ended.push_async_callback(asyncio.to_thread, service.close)  # it may wait for a collector of spans
        service.recorder = recorder
        if links:
            service.metrics.watch_links(links)
        if replicas is not None:
            service.take_several(replicas)
        yield service


def _recorder(config: ServerConfig) -> Recorder | None:
    """Return the recorder that the configuration asks for. Raises ConfigError for its folder."""
    if config.record is None:
        return None
    return Recorder(
        config.record,
        contents=config.record_contents,
        max_bytes=config.record_max_bytes,
        max_age_s=config.record_max_age,
    )


def make_service(
    config: ServerConfig, engine_config: EngineConfig, engine: EngineClient, keyed: bool
) -> ServiceState:
    """Return the state of a service for an engine that is ready, wherever it runs."""
    facts = engine.status.facts
    frontend, output_format = open_frontend(
        config,
        engine_config,
        max_model_len=facts.limits.max_model_len,
        longest_context=facts.longest_context,
        sees=facts.model is not None and facts.model.sees,
    )
    names = served_names(config, engine_config.model)
    metrics = Metrics(names[0], engine_config, lambda: engine.statuses)
    service = ServiceState(config, engine_config, frontend, engine, metrics, names, keyed, output_format)
    if config.page:
        service.feed = Feed(service)
    engine.on_record = service.take_report
    if (endpoint := config.otlp_traces_endpoint) is not None:
        service.spans = Spans(endpoint, names[0])
    return service


def bind(host: str, port: int) -> socket.socket:
    """Return the listening socket. Raises ConfigError with a hint when it cannot be bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host[:200]!r} is no address of this machine: {error}") from None
    # asyncio turns off Nagle's delay, which costs 40 ms an answer, only for sockets with this protocol
    # number.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        hint = "give another host or port"
        if error.errno == errno.EADDRINUSE:
            hint = f"--port {_free_port(family, host)} is free, and --port 0 takes one that is"
        raise ConfigError(f"cannot listen at {host}, port {port}: {error.strerror}", hint) from None
    listener.setblocking(False)
    return listener


def _free_port(family: int, host: str) -> int:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _check_certificate(config: ServerConfig) -> None:
    """Raise ConfigError now rather than after the model is loaded."""
    if config.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile, password=""
        )
    except (OSError, ValueError) as error:
        hint = "both are PEM files; a key with a password is not taken"
        raise ConfigError(f"ssl_certfile, ssl_keyfile: {error}", hint) from None


class _Server(uvicorn.Server):
    """uvicorn with a drain of our own in place of its signal handlers."""

    def __init__(self, served: Served, app: ASGIApp, ready: Callable[[str], None]) -> None:
        config = http_config(app, served.config)
        config.lifespan, config.timeout_graceful_shutdown = "off", int(END_S)
        super().__init__(config)
        self._served = served
        self._ready = ready
        self._drain: asyncio.Task[None] | None = None
        self._forced = asyncio.Event()
        self._harmed = False  # an open request was ended

    async def run(self, listener: socket.socket) -> int:  # type: ignore[override]
        loop = asyncio.get_running_loop()
        drain_s = self._served.config.drain_timeout_s
        loop.add_signal_handler(signal.SIGTERM, self._begin_drain, drain_s)
        loop.add_signal_handler(signal.SIGINT, self._begin_drain, min(drain_s, INTERRUPT_DRAIN_S))
        await self.serve([listener])
        return int(self._harmed)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            shown = f"[{host}]" if ":" in host else host
            self._ready(f"{scheme}://{shown}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the feeds, whose viewers would stay, and then as uvicorn does."""
        self._served.end_feeds()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Return True to exit: also when the engine is given up, so that a supervisor can start anew."""
        if self._served.is_over:
            _LOG.critical("the engine cannot be restarted: the server ends")
            self._harmed = True
            return True
        if counter % int(malloc_arenas.PERIOD_S / TICK_S) == 1:
            asyncio.get_running_loop().run_in_executor(None, malloc_arenas.trim)
        return await super().on_tick(counter)

    def _begin_drain(self, patience_s: float) -> None:
        """Begin at the first signal; the second one ends the wait."""
        if self._drain is not None:
            self._forced.set()
        else:
            self._served.draining = True
            self._drain = asyncio.create_task(self._drain_then_exit(patience_s))

    async def _drain_then_exit(self, patience_s: float) -> None:
        """Refuse new requests with an answer, rather than a closed socket, until open ones have ended.

        Requests that were sent before the signal are served: they may still be in a socket's buffer.
        """
        await asyncio.sleep(IN_TRANSIT_S)
        self._served.refusing = True
        _LOG.info("draining: %d open requests have %g s to end", len(self._served.requests), patience_s)
        await self._until_idle(patience_s, self._forced)
        for request in list(self._served.requests):
            self._harmed = True
            request.end(Overloaded("the server is shutting down", "ask again", DRAIN_RETRY_S))
        await self._until_idle(END_S)
        self.should_exit = True

    async def _until_idle(self, patience_s: float, forced: asyncio.Event | None = None) -> None:
        """Wait until no request is open, at most so long."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while self._served.requests and asyncio.get_running_loop().time() < deadline:
            if forced is not None and forced.is_set():
                return
            await asyncio.sleep(0.02)


def http_config(app: ASGIApp, config: ServerConfig, http: type[Protocol] = Protocol) -> uvicorn.Config:
    """Return uvicorn's configuration for an application, and raise the limit of open files."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return uvicorn.Config(
        app,
        config.host,
        config.port,
        http=cast(Any, http),  # never one that happens to be installed: the limits are in this one
        ws="none",
        loop="asyncio",
        interface="asgi3",
        proxy_headers=False,  # anyone can send them
        server_header=False,
        access_log=False,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
