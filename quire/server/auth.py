"""Access control: API keys, the names accepted in the Host header, and the origins of pages."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable

from starlette.types import Scope

from quire.server.errors import HTTPRefusal

# Paths that need no key, for GET and HEAD: load balancers probe them.
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/v1/health"})
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(rb"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::\d{1,5})?")


class ApiKeys:
    """Check that a request has one of the keys, as `Authorization: Bearer` or `x-api-key`, if there are keys.

    Every path needs a key except OPEN_PATHS and `open_paths`, so paths added later are protected, too. Sets
    scope["state"]["tenant"], which identifies the key to whoever has the `secret`, and is not reversible.
    Without one, a secret of this process is taken.
    """

    def __init__(
        self, keys: Iterable[str], open_paths: Iterable[str] = (), secret: bytes | None = None
    ) -> None:
        self._open_paths = OPEN_PATHS.union(open_paths)
        self._secret = secret or secrets.token_bytes(32)
        self._digests = [self._digest(key.encode()) for key in keys]

    def __call__(self, scope: Scope) -> HTTPRefusal | None:
        tenant = self._tenant(scope) if self._digests else ""
        if tenant is None and not (scope["method"] in ("GET", "HEAD") and scope["path"] in self._open_paths):
            hint = "send Authorization: Bearer KEY, or x-api-key: KEY"
            return HTTPRefusal(
                401, "a valid API key is required", hint, headers={"WWW-Authenticate": "Bearer"}
            )
        scope["state"]["tenant"] = tenant or ""
        return None

    def _tenant(self, scope: Scope) -> str | None:
        """Return the tenant of the request's key, or None. Takes equally long for any wrong key."""
        found = None
        for credential in _credentials(scope):
            digest = self._digest(credential)
            for known in self._digests:
                if hmac.compare_digest(digest, known):
                    found = digest[:8].hex()
        return found

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


def _credentials(scope: Scope) -> Iterable[bytes]:
    for name, value in scope["headers"]:
        scheme, _, credential = value.partition(b" ")
        if name == b"x-api-key":
            yield value
        elif name == b"authorization" and scheme.lower() == b"bearer":
            yield credential.strip()


class AllowedHosts:
    """Refuse requests whose Host header is not one of the server's names.

    A web page can resolve a name of its own to 127.0.0.1 (DNS rebinding) and so reach a server that listens
    on this machine only. A server that listens to a network knows its names only from `allowed`; without any,
    it accepts every well-formed name. A request without the header, as health checks by HTTP/1.0 are, comes
    from no browser.
    """

    # Starlette's TrustedHostMiddleware does not fit: it answers 400 in plain text instead of 421 in the shape
    # of the interface, and accepts several Host headers if the first is allowed.

    def __init__(self, bind: str, allowed: Iterable[str]) -> None:
        names = [name.lower() for name in allowed]
        if is_loopback(bind):
            names += [*LOCAL_NAMES, bind.lower()]
        elif names:
            names += LOCAL_NAMES
        self._names = frozenset(name.encode() for name in names)

    def __call__(self, scope: Scope) -> HTTPRefusal | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if not hosts:
            return None
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is not None and (not self._names or match[1].lower() in self._names):
            return None
        return HTTPRefusal(421, "the Host header is not one of this server's names", "see --allowed-hosts")


class OwnPage:
    """Refuse requests for the page's data that come from other pages.

    Another page cannot read the answer, but it could open streams of events, start experiments, and have
    traces made, with each picture that it says is one; a link to a trace may be followed. Browsers
    say where a request comes from in Sec-Fetch-Site and Origin, which no script can set; other clients send
    neither. Behind a proxy that changes the Host header, an old browser's Origin is not the Host: the proxy's
    is then one of `allowed`.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def __call__(self, scope: Scope) -> HTTPRefusal | None:
        headers = dict(scope["headers"])
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        is_trace = scope["path"] == "/trace" and headers.get(b"sec-fetch-dest") != b"document"
        if not (is_trace or scope["path"].startswith("/page/")) or origin in self._allowed:
            return None
        own = origin is None or origin.partition(b"://")[2].lower() == headers.get(b"host", b"").lower()
        if own if site is None else site in (b"same-origin", b"none"):
            return None
        return HTTPRefusal(403, "the request comes from another page", "see --allowed-origins")


def is_loopback(bind: str) -> bool:
    """Return True if a server that listens at `bind` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"
