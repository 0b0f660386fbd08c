"""Who may ask: keys for everything but health, names of hosts, origins of pages."""

from __future__ import annotations

import hmac
import itertools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from guarded import Guarded, error_of, make_metrics, parse, serve
from starlette.applications import Starlette

from quire.config import EngineConfig, ServerConfig
from quire.server.app import make_app
from quire.server.auth import OPEN_PATHS
from quire.server.service import ServiceState

KEY, OTHER = "sk-one-0123456789abcdef", "sk-two-fedcba9876543210"
JSON = {"Content-Type": "application/json"}
PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def locked() -> Iterator[Guarded]:
    with serve((KEY, OTHER), allowed_origins=(PAGE,)) as running:
        yield running


@pytest.fixture(scope="module")
def unlocked() -> Iterator[Guarded]:
    with serve(allowed_hosts=("models.internal",)) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [bearer(KEY), bearer(OTHER), {"x-api-key": KEY}, {"AUTHORIZATION": f"bearer  {KEY} "}],
)
def test_a_key_opens(locked: Guarded, headers: dict[str, str]) -> None:
    assert locked.ask("GET", "/size", headers)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("wrong"),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        bearer(KEY.upper()),
        bearer(f"{KEY} {KEY}"),
        bearer(f"{KEY},{OTHER}"),
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer\t{KEY}"},
        {"Authorization": f"Bearer{KEY}"},
        {"x-api-key": f"Bearer {KEY}"},
        {"x-api-key": ""},
        {"x-api-key": "\xff\xfe"},
        {"Cookie": f"x-api-key={KEY}"},
        {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Prefix": "/health", "X-Original-URL": "/health"},
    ],
)
@pytest.mark.parametrize("path", ["/size", "/v1/models/a", "/nothing", "/"])
def test_nothing_else_opens(locked: Guarded, path: str, headers: dict[str, str]) -> None:
    answer = locked.ask("GET", path, headers)
    assert error_of(answer) == (401, "invalid_api_key")
    assert answer[1]["www-authenticate"] == "Bearer"
    assert KEY.encode() not in answer[2]


def test_every_route_of_the_server_is_closed() -> None:
    """Whatever is added to it, too: only the paths named and the files of the page are open without a key."""
    config = {"config": ServerConfig(), "engine_config": EngineConfig()}
    serving = SimpleNamespace(metrics=make_metrics(), replicas=None, **config)
    guards = make_app(cast(ServiceState, serving), (KEY,))
    app: Any = guards
    while not isinstance(app, Starlette):
        app = app._app
    asked = [(route.path, method) for route in app.routes for method in (*route.methods, "OPTIONS", "PATCH")]
    assert {"/v1/chat/completions", "/metrics", "/openapi.json"} <= {path for path, _ in asked}
    with serve(wrapped=guards) as running:
        answered = {
            (path, method)
            for path, method in asked
            for headers in ({}, bearer("wrong"), {"x-api-key": "wrong"})
            if running.ask(method, path, JSON | headers)[0] != 401
        }
    assert answered == {(path, method) for path in (*OPEN_PATHS, "/") for method in ("GET", "HEAD")}


def test_forwarding_headers_are_not_believed(unlocked: Guarded) -> None:
    forged = {"X-Forwarded-For": "10.1.2.3", "X-Forwarded-Proto": "https", "Forwarded": "for=10.1.2.3"}
    assert json.loads(unlocked.ask("GET", "/size", forged)[2])["client"] == "127.0.0.1"


def test_a_key_in_the_query_does_not_open(locked: Guarded) -> None:
    assert locked.ask("GET", f"/size?api_key={KEY}&x-api-key={KEY}")[0] == 401


@pytest.mark.parametrize(
    "path",
    [
        *("//size", "/%73ize", "/size/", "/./size", "/health/../size", "/health/%2e%2e/size", "/healthy"),
        *(
            "/health/",
            "//health",
            "/Health",
            "/health%00",
            "/health;/size",
            "/ping/../size",
            "/health%2f..%2fsize",
        ),
        *("http://127.0.0.1/size", "http://127.0.0.1/health/../size", "*"),
    ],
)
def test_tricks_with_paths(locked: Guarded, path: str) -> None:
    assert locked.ask("GET", path)[0] in (400, 401, 404)
    assert "size" not in locked.seen[-1:] or locked.ask("GET", path)[0] == 401


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "BREW"])
def test_no_method_goes_round_the_key(locked: Guarded, method: str) -> None:
    assert locked.ask(method, "/size", JSON)[0] == 401


def test_health_is_open_to_those_who_read(locked: Guarded) -> None:
    assert [locked.ask(method, "/health", JSON)[0] for method in ("GET", "HEAD", "POST")] == [200, 200, 401]


def test_without_keys_all_is_open(unlocked: Guarded) -> None:
    status, _, body = unlocked.ask("GET", "/size", bearer("anything"))
    assert (status, json.loads(body)["tenant"]) == (200, "")


def test_a_key_is_a_tenant(locked: Guarded) -> None:
    keys = [bearer(KEY), bearer(OTHER), {"x-api-key": KEY}]
    tenants = [json.loads(locked.ask("GET", "/size", headers)[2])["tenant"] for headers in keys]
    assert tenants[0] == tenants[2] != tenants[1]
    assert all(len(tenant) == 16 and tenant not in KEY + OTHER for tenant in tenants)
    with serve((KEY,)) as another:
        assert json.loads(another.ask("GET", "/size", bearer(KEY))[2])["tenant"] != tenants[0]


def test_keys_are_compared_in_constant_time(locked: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is compared, by digests of one length, whichever fits."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def noted(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    for key in (KEY, OTHER, "x"):
        locked.ask("GET", "/size", bearer(key))
    assert len(compared) == 6
    assert {len(digest) for digest in itertools.chain(*compared)} == {32}


def test_keys_are_not_logged(locked: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        for key in (KEY, "sk-mistyped"):
            locked.ask("GET", f"/fail/unforeseen?key={key}", bearer(key))
    lines = caplog.text + "".join(str(vars(record)) for record in caplog.records)
    assert "unforeseen" in lines
    assert KEY not in lines
    assert "sk-mistyped" not in lines


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]", "[::1]:8000", "models.internal:80"]
)
def test_own_names(unlocked: Guarded, host: str) -> None:
    assert unlocked.ask("GET", "/health", {"Host": host})[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "a/health?x=",
            "",
            "::1",
        ),
        *("localhost:80:80", "localhost@evil.example", "localhost ", "localhost:x", "evil.example#localhost"),
    ],
)
def test_other_names(unlocked: Guarded, host: str) -> None:
    """A page whose name was made to mean 127.0.0.1 still sends its own."""
    status = unlocked.ask("GET", "/health", {"Host": host})[0]
    assert status == 421 or (host.endswith(" ") and status == 200)  # the parser strips spaces


def test_a_request_without_a_name(unlocked: Guarded) -> None:
    """As health checks of load balancers are; no browser sends one."""
    assert parse(unlocked.send(b"GET /health HTTP/1.0\r\n\r\n"))[0] == 200
    assert parse(unlocked.send(b"GET /health HTTP/1.1\r\n\r\n"))[0] == 400
    assert parse(unlocked.send(b"GET /size HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n"))[0] == 400


@pytest.mark.parametrize(("hosts", "status"), [((), 200), (("models.internal",), 421)])
def test_a_server_for_a_network(hosts: tuple[str, ...], status: int) -> None:
    with serve(host="0.0.0.0", allowed_hosts=hosts) as running:
        assert running.ask("GET", "/health", {"Host": "any.example"})[0] == status
        assert running.ask("GET", "/health", {"Host": "models.internal"})[0] == 200
        assert running.ask("GET", "/health", {"Host": "127.0.0.1"})[0] == 200
        assert running.ask("GET", "/health", {"Host": "a/health?x="})[0] == 421


def preflight(server: Guarded, origin: str) -> tuple[int, dict[str, str], bytes]:
    wishes = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-a"}
    return server.ask("OPTIONS", "/size", {"Origin": origin} | wishes)


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:3000"])
def test_pages_are_refused_by_default(unlocked: Guarded, origin: str) -> None:
    answers = [preflight(unlocked, origin), unlocked.ask("GET", "/size", {"Origin": origin})]
    assert [answer[0] for answer in answers] == [405, 200]
    assert not any(name.startswith("access-control") for answer in answers for name in answer[1])


def test_pages_of_an_allowed_origin(locked: Guarded) -> None:
    status, headers, _ = preflight(locked, PAGE)
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert "authorization" in headers["access-control-allow-headers"]
    assert "POST" in headers["access-control-allow-methods"]
    status, headers, _ = locked.ask("POST", "/size", {"Origin": PAGE} | JSON | bearer(KEY), b"{}")
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert "x-request-id" in headers["access-control-expose-headers"]


@pytest.mark.parametrize("origin", [PAGE + ".evil.example", "http://chat.example", "null", PAGE + "/"])
def test_pages_of_other_origins(locked: Guarded, origin: str) -> None:
    status, headers, _ = preflight(locked, origin)
    assert (status, headers.get("access-control-allow-origin")) == (400, None)
    headers = locked.ask("GET", "/size", {"Origin": origin} | bearer(KEY))[1]
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("headers", [{"Origin": PAGE}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}])
@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_pages_have_no_effect_without_a_body(unlocked: Guarded, method: str, headers: dict[str, str]) -> None:
    """A page may send an empty POST to any origin; a preflight comes before JSON alone."""
    before = len(unlocked.seen)
    answer = unlocked.ask(method, "/size", headers)
    assert error_of(answer) == (415, "unsupported_media_type")
    assert len(unlocked.seen) == before
    assert unlocked.ask(method, "/size", headers | JSON)[0] == 200
    assert unlocked.ask(method, "/size")[0] == 200
