"""The endpoint of experiments: each runs in a short-lived process of its own, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from quire.errors import Overloaded, QuireError
from quire.experiments.parameters import PARAMETERS, FleetParameters
from quire.experiments.served_engine import FleetTask, ServedEngine
from quire.server.auth import is_loopback
from quire.server.errors import ErrorBody, HTTPRefusal, NotFound
from quire.server.event_stream import EventStream, encode
from quire.server.request import read
from quire.server.service import ServiceState
from quire.server.steps import law_of

MAX_S = 60.0  # of one experiment
LOOK_S = 0.1  # how often the load of the server is looked at meanwhile
RETRY_S = 10
LOWEST_PRIORITY = 19  # as `nice` has it
MAX_LINE_BYTES = 1 << 20
FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})  # a proxy was between
_LOG = logging.getLogger(__name__)


class Lines(EventStream):
    """A stream of one JSON object per line, which ends with "done" or with an error."""

    media_type = "application/x-ndjson"

    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(lines, lambda error: encode(ErrorBody.of(error)) + b"\n", end=b"", keep_alive=b"")


def may_start(scope: Scope, service: ServiceState) -> bool:
    """Return True if this viewer may start experiments: one with a key or, without keys, on this machine."""
    if service.keyed:
        return bool(scope["state"].get("tenant"))
    client = scope.get("client")
    forwarded = any(name in FORWARDED for name, _ in scope["headers"])
    return client is not None and is_loopback(client[0]) and not forwarded


async def experiment(request: Request) -> Response:
    """Stream the lines of an experiment: {"progress": ...}, what it finds, and {"done": ...} at the end."""
    name = request.path_params["name"]
    service: ServiceState = request.app.state.service
    if name not in PARAMETERS:
        raise NotFound(f"there is no experiment {name[:100]!r}", f"there are {', '.join(PARAMETERS)}")
    if not may_start(request.scope, service):
        hint = "open the page on the machine of the server, or start the server with an API key"
        raise HTTPRefusal(403, "this viewer may not start experiments", hint)
    asked, *_ = await read(request, PARAMETERS[name], queued=False)
    return Lines(lines(service, name, _task(service, asked)))


def _task(service: ServiceState, asked: Struct) -> Struct:
    """Add the engine of this server to what a client asks for, where an experiment needs it."""
    if not isinstance(asked, FleetParameters):
        return asked
    law = law_of(service)
    if law is None:
        raise NotFound(
            "no law of the time of steps is known", "it needs the ceilings of this machine: quire probe"
        )
    limits = service.engine.status.facts.limits
    served = ServedEngine.of(msgspec.structs.asdict(law), limits, service.engine_config)
    return FleetTask(**msgspec.structs.asdict(asked), served=served)


async def lines(service: ServiceState, name: str, task: Struct) -> AsyncGenerator[bytes, None]:
    """Start the process of an experiment, yield the lines that it prints, and end it in any case."""
    num_steps = service.engine.status.steps
    _check_load(service, num_steps)
    if service.is_experimenting:
        raise Overloaded("another experiment is running", "start this one when it is done", RETRY_S)
    service.is_experimenting = True
    process = None
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "quire.experiments", name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C in the terminal is for the server alone
        )
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST_PRIORITY)
        assert process.stdin is not None
        process.stdin.write(encode(task))
        process.stdin.close()
        async for line in _printed(service, process, num_steps):
            yield line
    finally:
        service.is_experimenting = False
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


def _check_load(service: ServiceState, num_steps: int) -> None:
    """Raise Overloaded if the server has work, or had some since it had computed `num_steps`.

    Requests go first, and beside them times would not be comparable.
    """
    if service.draining:
        raise Overloaded("the server is shutting down", "ask again", RETRY_S)
    status = service.engine.status
    if status.has_work or status.steps > num_steps or service.num_queued_requests:
        raise Overloaded(
            "the server is busy: experiments run only while no request does", "try again later", RETRY_S
        )


async def _printed(
    service: ServiceState, process: asyncio.subprocess.Process, num_steps: int
) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a process up to the last one. Raises QuireError if it fails, or takes too long."""
    assert process.stdout is not None
    end_s = time.monotonic() + MAX_S
    while True:
        try:
            async with asyncio.timeout(LOOK_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = None
        _check_load(service, num_steps)
        if time.monotonic() > end_s:
            raise QuireError(f"the experiment was stopped after {MAX_S:g} s", "ask for less")
        if line is None:
            continue
        if not line.endswith(b"\n"):
            raise await _failure(process)
        found: dict[str, Any] = msgspec.json.decode(line)
        if "error" in found:
            raise QuireError(found["error"])
        yield line
        if "done" in found:
            return


async def _failure(process: asyncio.subprocess.Process) -> QuireError:
    """Return the error for a process that ended before it was done."""
    assert process.stderr is not None
    said = await process.stderr.read()
    status = await process.wait()
    _LOG.warning("an experiment failed: %s", said.decode(errors="replace")[-2000:])
    return QuireError(
        f"the experiment's process ended with status {status}", "the server's log has the details"
    )


ROUTES = [Route("/page/experiments/{name}", experiment, methods=["POST"], include_in_schema=False)]
