"""The files of the page: who gets them, how, and what the browser may do with them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from guarded import Guarded, error_of, make_metrics, serve
from server import Server

from quire.config import EngineConfig, ServerConfig
from quire.server.app import make_app
from quire.server.page.static import FOLDER, MEDIA_TYPES, StaticPage, accepts, contents, sent
from quire.server.service import ServiceState

KEY = "sk-one-0123456789abcdef"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8", "Accept-Encoding": "gzip, deflate, br"}
JSON = {"Content-Type": "application/json"}
TEXT = b"Quire is running"
CONTENTS = contents()


def application(page: bool = True, **config: object) -> SimpleNamespace:
    """What the endpoints of the page use of a service."""
    chosen = ServerConfig(page=page, **config)  # type: ignore[arg-type]
    state = {"refusing": False, "requests": set(), "num_uploading_bytes": 0, "check_queue": lambda **_: None}
    parts = {"metrics": make_metrics(), "replicas": None, "recorder": None}
    return SimpleNamespace(config=chosen, engine_config=EngineConfig(), **parts, **state)


@pytest.fixture(scope="module")
def locked() -> Iterator[Guarded]:
    """A server with a key, and nothing behind it that computes."""
    with serve(wrapped=make_app(cast(ServiceState, application()), (KEY,))) as running:
        yield running


def test_browsers_get_the_page_without_a_key(locked: Guarded) -> None:
    status, headers, body = locked.ask("GET", "/", {"Accept": BROWSER["Accept"]})
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert body == (FOLDER / "index.html").read_bytes()
    assert headers["vary"] == "Accept, Accept-Encoding"
    assert locked.ask("HEAD", "/", BROWSER)[0] == 200


@pytest.mark.parametrize("accept", [None, "*/*", "application/json", "text/html;q=0", "text/plain"])
def test_other_clients_hear_that_a_server_is_there(locked: Guarded, accept: str | None) -> None:
    status, headers, body = locked.ask("GET", "/", {} if accept is None else {"Accept": accept})
    assert (status, body) == (200, TEXT)
    assert headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("name", CONTENTS)
def test_every_file_is_served(locked: Guarded, name: str) -> None:
    content = CONTENTS[name]
    status, headers, body = locked.ask("GET", f"/page/{name}")
    assert (status, body) == (200, content)
    assert headers["content-type"] == MEDIA_TYPES[Path(name).suffix]
    assert headers["cache-control"] == "no-cache"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cross-origin-opener-policy"] == "same-origin-allow-popups"
    assert "unsafe" not in headers["content-security-policy"]
    assert "content-encoding" not in headers
    assert int(headers["content-length"]) == len(content)
    _, headers, packed = locked.ask("GET", f"/page/{name}", BROWSER)
    assert headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed) == content


def test_the_policy_allows_its_own_files_alone(locked: Guarded) -> None:
    policy = locked.ask("GET", "/", BROWSER)[1]["content-security-policy"]
    directives = dict(item.strip().split(" ", 1) for item in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert {directives[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert directives["img-src"] == "'self' data:"
    assert {directives[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert directives["require-trusted-types-for"] == "'script'"


def test_a_file_that_the_client_has_is_not_sent_again(locked: Guarded) -> None:
    path = "/page/vendor/preact.js"
    etag = locked.ask("GET", path)[1]["etag"]
    for known in (etag, f'"other", {etag}', "*", etag.removeprefix("W/")):
        status, headers, body = locked.ask("GET", path, {"If-None-Match": known})
        assert (status, body) == (304, b"")
        assert headers["etag"] == etag
        assert "content-security-policy" in headers
    assert locked.ask("GET", path, {"If-None-Match": '"other"'})[0] == 200
    assert locked.ask("GET", "/page/js/parts.js")[1]["etag"] != etag


@pytest.mark.parametrize(
    "path",
    [
        *("/page", "/page/", "/page/nothing.js", "/page/static.py", "/page/../static.py", "/page/js/"),
        *("/page//index.html", "/page/./index.html", "/page/vendor/../index.html", "/page/%2e%2e/static.py"),
        *("/page/..%2fstatic.py", "/page/%2fetc%2fpasswd", "/page/index.html%00", "/page/INDEX.HTML"),
        *("//page/index.html", "/page/index.html/", "/page/\\index.html", "/page/index.html;x"),
    ],
)
def test_there_is_nothing_else(locked: Guarded, path: str) -> None:
    assert error_of(locked.ask("GET", path, BROWSER)) == (401, "invalid_api_key")
    status, code = error_of(locked.ask("GET", path, BROWSER | {"x-api-key": KEY}))
    assert (status, code) == (404, "not_found")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_files_are_only_read(locked: Guarded, method: str) -> None:
    assert locked.ask(method, "/page/index.html", JSON)[0] == 401
    assert locked.ask(method, "/page/index.html", JSON | {"x-api-key": KEY})[0] == 405


def test_data_of_the_page_need_the_key(locked: Guarded) -> None:
    for path in ("/page/events", "/page/experiments/without-cache", "/steps", "/server_info", "/trace"):
        assert locked.ask("GET", path, BROWSER)[0] == 401


@pytest.mark.parametrize("path", ["/", "/page/index.html"])
def test_the_page_has_the_names_of_the_server_only(locked: Guarded, path: str) -> None:
    """A page whose name was made to mean this machine gets nothing."""
    assert locked.ask("GET", path, BROWSER | {"Host": "evil.example"})[0] == 421


def test_no_page() -> None:
    with serve(wrapped=make_app(cast(ServiceState, application(page=False)), ())) as running:
        assert running.ask("GET", "/", BROWSER)[2] == TEXT
        for path in ("/page/index.html", "/page/events"):
            status, headers, body = running.ask("GET", path, BROWSER)
            assert (status, headers["content-type"]) == (404, "application/json")
            assert json.loads(body)["error"]["code"] == "not_found"
    with serve(wrapped=make_app(cast(ServiceState, application(page=False)), (KEY,))) as running:
        assert [running.ask("GET", path, BROWSER)[0] for path in ("/", "/page/index.html")] == [401, 401]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 404),
        ({"Origin": "{own}"}, 404),
        ({"Origin": "{own}", "Sec-Fetch-Site": "same-origin"}, 404),
        ({"Sec-Fetch-Site": "none"}, 404),
        ({"Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"}, 404),
        ({"Origin": "https://public.example", "Sec-Fetch-Site": "same-origin"}, 404),  # by a proxy
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "http://127.0.0.1"}, 403),
        ({"Origin": "http://localhost:{port}"}, 403),
        ({"Origin": "{own}.evil.example"}, 403),
        ({"Origin": "http://evil.example/{own}"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "{own}", "Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_pages_start_nothing(headers: dict[str, str], status: int, method: str) -> None:
    allowing = application(allowed_origins=("https://chat.example",))
    with serve(wrapped=make_app(cast(ServiceState, allowing), ())) as running:
        own = {"own": f"http://127.0.0.1:{running.port}", "port": running.port}
        asked = {name: value.format(**own) for name, value in headers.items()}
        assert running.ask(method, "/page/nothing", JSON | asked)[0] in {
            status,
            405 if status == 404 else 403,
        }


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 404),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "empty"}, 404),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}, 404),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe"}, 403),
        ({"Origin": "https://evil.example"}, 403),
    ],
)
def test_other_pages_have_no_traces_made(headers: dict[str, str], status: int) -> None:
    with serve(wrapped=make_app(cast(ServiceState, application()), ())) as running:
        assert running.ask("GET", "/trace", headers)[0] == status


def test_files_are_read_when_the_server_starts(tmp_path: Path) -> None:
    (tmp_path / "js").mkdir()
    for name in ("index.html", "page.css", "js/main.js", "js/main.js~", "js/.main.js.swp"):
        (tmp_path / name).write_text("")
    page = StaticPage(tmp_path)
    assert page.paths == {"/", "/page/index.html", "/page/js/main.js", "/page/page.css"}


def test_style_sheets_are_sent_as_one() -> None:
    parts = [CONTENTS[name] for name in ("style.css", "chapters.css", "chat.css")]
    assert CONTENTS["page.css"] == b"".join(parts)
    assert all(parts)


def test_comments_and_indentation_are_for_readers(tmp_path: Path) -> None:
    source = """// A file.

/** Do it.
 * Now. */
export function f(a) {
  // Why.
  const url = "http://a // kept"; // not kept
  f(); // what's kept (
  return html`<p>
    two words
  </p>` + "/*" + a * 2 / 3; /* kept */
  /* kept */ g(); /*
  too */
  /* not
   ** kept **/
  if (a && b === c) {
    g({ a, b });
  }
  g([
    1,
    [2], // ])
  ]);
}
"""
    left = """export function f(a){const url = "http://a // kept";
f(); // what's kept (
return html`<p>
two words
</p>` + "/*" + a * 2 / 3; /* kept */
/* kept */ g(); /*
too */
if (a&&b===c){g({a, b});}
g([1,
[2]]);}
"""
    style = "/* A\n file. */\na:hover, .b :is(i, b) {\n  c: 1px 2px;\n    d: e;\n}\n"
    for name, given, content in (
        ("a.js", source, left),
        ("a.css", style, "a:hover,.b :is(i,b){c:1px 2px;d:e;}"),
        ("a.md", source, source),
        ("vendor/a.js", source, source),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(given)
        assert sent(tmp_path / name).decode() == content


def test_statements_of_the_script_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "js").mkdir()
    (tmp_path / "page.css").write_text("")
    (tmp_path / "js/a.js").write_text("export const b = 1;\n")
    (tmp_path / "js/main.js").write_text(
        'import { b } from "./a.js";\nf(b);\ng(); // it\'s kept;\nh();\ni();\n'
    )
    lines = contents(tmp_path)["js/main.js"].decode().splitlines()
    assert lines[-2:] == ["const {b} = m0;f(b);g(); // it's kept;", "h();i();return {};})();export {m0, m1};"]


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("gzip;q=1.0", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("x-gzip", False),
        ("*", False),
        ("", False),
        (";;,,q=0", False),
    ],
)
def test_what_a_client_accepts(header: str, accepted: bool) -> None:
    assert accepts(header, "gzip") == accepted


def test_the_server_serves_the_page_and_says_where(server: Server, client: httpx.Client) -> None:
    assert f"in a browser: {server.url}/\n" in server.log
    reply = client.get("/", headers={"Accept": "text/html"})
    assert reply.headers["content-type"].startswith("text/html")
    assert "/page/" not in client.get("/openapi.json").text  # no program tries the page's endless stream
