"""Connections of links, on the event loop: addresses, keys, and typed messages in sealed frames."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from quire.cluster.link_messages import Alive, LinkMessage
from quire.environment import user_path
from quire.errors import ConfigError, shortened
from quire.transfer.sealed_frames import MIN_KEY_BYTES, LinkRefused, SealedFrames

PROOF_S = 5.0  # for the other side to prove that it has the key
ALIVE_S = 2.0  # between two messages that say only that this side runs
MOST_SILENT = 10  # of these without a word from the other side: it is lost, as a host without power is
_ENCODER = msgspec.msgpack.Encoder()


class LinkAddress(NamedTuple):
    """The place of a link: a socket of this host, whose ends share memory, or a host and a port."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def of(cls, text: str) -> LinkAddress:
        """Read "unix:PATH" or "HOST:PORT". Raises ConfigError."""
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(path=text.removeprefix("unix:"))
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
            raise ConfigError(
                f"link {shortened(text)!r} is no address", "give HOST:PORT or, on one host, unix:PATH"
            )
        return cls(host=host.strip("[]"), port=int(port))

    @property
    def shared(self) -> bool:
        """True if both ends are processes of one host, which can share memory."""
        return bool(self.path)

    @property
    def is_loopback(self) -> bool:
        """True if nothing outside this host can reach it."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"{self.host}:{self.port}"


def read_key(path: str) -> bytes:
    """Return the shared key of a file. Raises ConfigError if it is short, or readable by others."""
    hint = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > link.key)"
    try:
        with user_path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"link_key_file {path!r} cannot be read: {error.strerror}", hint) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"link_key_file {path!r} can be read by others", f"chmod 600 {path}")
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"link_key_file {path!r} has {len(key)} bytes; at least {MIN_KEY_BYTES}", hint)
    return key


class LinkConnection(asyncio.Protocol):
    """One connection, of either side. `receive` is called with each message, `lost` once, at its end.

    Once `proven` is done, the other side has shown that it has the key, and messages may be sent. Both then
    say every ALIVE_S that they run, so that a side which is silent is noticed.
    """

    def __init__(
        self,
        key: bytes,
        decoder: msgspec.msgpack.Decoder[Any],
        *,
        calling: bool,
        receive: Callable[[LinkConnection, Any], None],
        lost: Callable[[LinkConnection, str], None],
    ) -> None:
        self._frames = SealedFrames(key, calling=calling)
        self._decoder = decoder
        self._receive, self._lost = receive, lost
        self._transport: asyncio.Transport | None = None
        self.proven: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._why = "the connection was closed"
        self._timer: asyncio.TimerHandle | None = None  # of the proof, then of the next Alive
        self._num_silent = 0  # Alive that were sent since anything came

    def send(self, message: LinkMessage) -> None:
        """Send without waiting. Raises ValueError if the message is too long for a frame."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(self._frames.seal(_ENCODER.encode(message)))

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the network has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def close(self, why: str = "the connection was closed") -> None:
        """End the connection at once."""
        self._why = why
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._frames.greeting())
        loop = asyncio.get_running_loop()
        words = "the other side did not prove that it has the key"
        self._timer = loop.call_later(PROOF_S, self.close, words)

    def data_received(self, data: bytes) -> None:
        """Pass on the messages that `data` completes; anything else ends the connection."""
        assert self._transport is not None
        self._num_silent = 0
        was_proven = self._frames.proven
        try:
            payloads, reply = self._frames.receive(data)
            found = [self._decoder.decode(payload) for payload in payloads]
        except (LinkRefused, msgspec.DecodeError, ValueError, RecursionError) as error:
            self.close(str(error))
            return
        if reply:
            self._transport.write(reply)
        if self._frames.proven and not was_proven:
            self._keep_alive()
            self.proven.set_result(None)
        for message in found:
            if not isinstance(message, Alive):
                self._receive(self, message)

    def _keep_alive(self) -> None:
        """Say now and then that this side runs, and end the connection when the other one does not.

        Messages are counted instead of seconds: this process may itself have been suspended.
        """
        if self._timer is not None:
            self._timer.cancel()
        if self._num_silent >= MOST_SILENT:
            self.close(f"nothing came for {MOST_SILENT * ALIVE_S:g} s")
            return
        self._num_silent += 1
        self.send(Alive())
        self._timer = asyncio.get_running_loop().call_later(ALIVE_S, self._keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._lost(self, str(exc) if exc is not None else self._why)


async def listen(address: LinkAddress, make: Callable[[], LinkConnection]) -> asyncio.Server:
    """Accept connections at an address. Raises ConfigError if it cannot be used."""
    loop = asyncio.get_running_loop()
    try:
        if not address.path:
            return await loop.create_server(make, address.host, address.port)
        path = Path(address.path)
        if path.is_socket():
            path.unlink()  # of a server that was killed
        mask = os.umask(0o177)
        try:
            return await loop.create_unix_server(make, address.path)
        finally:
            os.umask(mask)
    except OSError as error:
        raise ConfigError(f"cannot listen at link {address}: {error.strerror or error}") from error


async def connect(address: LinkAddress, make: Callable[[], LinkConnection]) -> LinkConnection:
    """Open a connection. Raises OSError."""
    loop = asyncio.get_running_loop()
    if address.path:
        return (await loop.create_unix_connection(make, address.path))[1]
    return (await loop.create_connection(make, address.host, address.port))[1]
