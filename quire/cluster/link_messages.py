"""Messages on a link between a decode engine's server, which calls, and that of a prefill engine."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from quire.errors import RequestError
from quire.transfer.parcels import AnyParcel
from quire.types import NewRequest, Output


class LinkMessage(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Base class of all messages."""


class Alive(LinkMessage):
    """The side that sends it runs. Both send it, and no other answer is expected."""


class Prefill(LinkMessage):
    """Compute a prompt and its first token. The replies are Prefilled, then Blocks; or Refused."""

    request: NewRequest
    shared: bool  # send blocks in shared memory

    def checked(self) -> NewRequest:
        """Return the request with its parameters checked: decoding does not check ranges."""
        return replace(self.request, params=self.request.params.clone())


class Abandon(LinkMessage):
    """Nobody waits for a prompt any more."""

    request_id: str


class Prefilled(LinkMessage):
    """The outputs of a request, with the first token of each sequence, and the engine's fingerprint.

    Times in them are of the engine's clock, on which the request arrived at `arrival_s`.
    """

    request_id: str
    outputs: list[Output]
    arrival_s: float
    fingerprint: str


class Blocks(LinkMessage):
    """Blocks of a prompt that was computed; None after the last of them."""

    request_id: str
    parcel: AnyParcel | None


class Refused(LinkMessage):
    """A prompt was not computed. `by_request`: it never will be; otherwise another engine may."""

    request_id: str
    message: str
    by_request: bool = False
    hint: str | None = None
    param: str | None = None
    code: str | None = None

    def error(self) -> RequestError:
        return RequestError(self.message, self.hint, self.param, self.code)


ToPrefill = Prefill | Abandon
FromPrefill = Prefilled | Blocks | Refused
