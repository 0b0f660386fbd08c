"""Log lines: one for a request, with nothing in it that a client could forge or should not find there."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from guarded import Guarded, ended, error_of, serve

from quire.errors import RequestError
from quire.server.errors import UNEXPECTED
from quire.server.logs import LineFormatter

HOSTILE = 'a\r\n2026-01-01 forged\x1b[2J\x00\x7f\u202egpj.exe\u2028\u200b\ud800\U000e0041 b="c" \x9b31m'
SETUP = """
import logging
from quire.server import logs
logging.basicConfig(format="by another: %(message)s")
logs.setup("{form}")
logs.setup("{form}")
logging.getLogger("quire.server.http").info("request", extra={{"fields": {{"path": "/a b", "status": 200}}}})
logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
logging.getLogger("uvicorn.error").error("Address\\nin use")
logging.getLogger("uvicorn.error").info("Started server process")
logging.getLogger("another.library").warning("beware")
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Guarded]:
    with serve() as running:
        yield running


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "quire")


def record(message: str, error: BaseException | None = None, **fields: Any) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("quire.test", logging.INFO, __file__, 1, message, (), info)
    made.fields = fields
    return made


def test_a_request_has_one_line(server: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    _, headers, _ = server.ask("GET", "/v1/models/org/name?secret=1", {"X-Request-Id": "my.id_1-2"})
    (fields,) = ended(caplog)
    assert headers["x-request-id"] == fields["request_id"] == "my.id_1-2"
    assert 0 < fields.pop("ms") < 1000
    assert fields == {
        "method": "GET",
        "path": "/v1/models/{model}",
        "status": 200,
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "request_id": "my.id_1-2",
    }


@pytest.mark.parametrize("given", [None, "", "a" * 129, "a b", "a\x1b[2J", "\xfcber", "a\tb", "<script>"])
def test_other_ids_are_made(server: Guarded, caplog: pytest.LogCaptureFixture, given: str | None) -> None:
    _, headers, _ = server.ask("GET", "/talk", {} if given is None else {"X-Request-Id": given})
    assert re.fullmatch(r"req-[0-9a-f]{24}", headers.get("x-request-id", "")) or not headers
    assert "req-" in server.ask("GET", "/talk")[1]["x-request-id"]


def test_errors_have_ids_too(server: Guarded) -> None:
    for path in ("/nothing", "/fail/request", "/fail/unforeseen"):
        assert server.ask("GET", path, {"X-Request-Id": "mine"})[1]["x-request-id"] == "mine"
    assert server.ask("POST", "/size", {"X-Request-Id": "mine"})[1]["x-request-id"] == "mine"
    assert server.ask("POST", "/v1/messages", {"X-Request-Id": "mine"})[1]["request-id"] == "mine"


def test_an_unknown_path_is_shown_but_not_its_query(
    server: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    assert server.ask("GET", "/no%0d%0athing%1b[2J?key=secret")[0] == 404
    (fields,) = ended(caplog)
    assert fields["path"] == "unmatched"
    assert fields["raw_path"] == "/no\r\nthing\x1b[2J"
    line = LineFormatter(as_json=False).format(record("request", **fields))
    assert r'raw_path="/no\r\nthing\u001b[2J"' in line


def test_an_unforeseen_error_is_logged_once_and_not_told(
    server: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    answer = server.ask("GET", "/fail/surprise", {"X-Request-Id": "mine"})
    assert error_of(answer) == (500, "internal_error")
    assert json.loads(answer[2])["error"]["message"] == UNEXPECTED
    assert ended(caplog)[0]["status"] == 500
    (error,) = [one for one in caplog.records if one.exc_info]
    assert error.fields == {"request_id": "mine"}
    line = LineFormatter(as_json=False).format(error)
    assert line.count("KeyError: '/usr/lib/python3/surprise'") == 1
    assert all(row.startswith("    ") for row in line.split("\n")[1:])


def test_an_expected_error_is_no_news(server: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    assert error_of(server.ask("GET", "/fail/request")) == (400, "invalid_request")
    assert error_of(server.ask("GET", "/fail/full")) == (503, "server_overloaded")
    assert not [one for one in caplog.records if one.levelno > logging.INFO]


def test_an_answer_that_breaks_off_does_not_look_complete(
    server: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    answer = server.send(b"GET /broken HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"first" in answer
    assert not answer.endswith(b"0\r\n\r\n")
    assert len([one for one in caplog.records if one.exc_info]) == 1


def test_an_application_without_handlers_is_served_too(caplog: pytest.LogCaptureFixture) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            raise KeyError("inside") if scope["path"] == "/bad" else RequestError("outside")

    with serve(app=application) as running:
        answers = [running.ask("GET", path) for path in ("/bad", "/")]
    assert [error_of(answer) for answer in answers] == [(500, "internal_error"), (400, "invalid_request")]
    assert b"inside" not in answers[0][2]
    assert len([one for one in caplog.records if one.exc_info]) == 1


def test_a_client_that_goes_is_no_error(server: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    with server.connect() as client:
        client.sendall(b"POST /size HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        client.sendall(b"Content-Length: 5\r\n\r\nab")
        time.sleep(0.05)
    assert ended(caplog)[0]["status"] == 499
    assert not [one for one in caplog.records if one.levelno > logging.INFO]


def test_prompts_are_logged_only_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with serve() as running:
        running.ask("GET", "/talk")
    assert "secret" not in str(ended(caplog))
    caplog.clear()
    with serve(log_prompts=True) as running:
        running.ask("GET", "/talk")
    (fields,) = ended(caplog)
    assert fields["prompt"] == "the secret of the user"
    assert fields["answer"] == "the secret of the model"


def test_probes_are_quiet(server: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "quire")
    server.ask("GET", "/health")
    server.ask("GET", "/talk")
    assert [fields["path"] for fields in ended(caplog)] == ["/talk"]


def test_text_is_one_line_that_hides_nothing() -> None:
    line = LineFormatter(as_json=False).format(record(f"said {HOSTILE}", user=HOSTILE, n=1, empty=""))
    assert line.isprintable()
    assert r"\u000d\u000a2026-01-01" in line
    assert r"\u001b[2J\u0000\u007f\u202egpj.exe\u2028\u200b\ud800\ue0041" in line
    assert line.endswith('" n=1 empty=""')


def test_a_quoted_value_ends_where_it_should() -> None:
    line = LineFormatter(as_json=False).format(record("x", user='a" status="200'))
    assert line.endswith(r'user="a\" status=\"200"')


def test_json_is_one_line_of_ascii() -> None:
    line = LineFormatter(as_json=True).format(record(f"said {HOSTILE}", user=HOSTILE, status=200))
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["user"] == HOSTILE
    assert json.loads(line)["status"] == 200


def test_a_traceback_cannot_forge_a_line() -> None:
    try:
        raise ValueError("x\n2026-01-01T00:00:00 INFO forged\x1b[2J")
    except ValueError as error:
        made = record("failed", error)
    lines = LineFormatter(as_json=False).format(made).split("\n")
    assert all(line.startswith("    ") and line.isprintable() for line in lines[1:])
    assert "forged" in lines[-1]
    line = LineFormatter(as_json=True).format(made)
    assert line.isprintable()
    assert "ValueError" in json.loads(line)["traceback"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_all_loggers_write_in_the_form_asked_for(form: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SETUP.format(form=form)], capture_output=True, text=True, timeout=30
    )
    lines = run.stderr.splitlines()
    assert len(lines) == 3, run.stderr
    if form == "json":
        assert [json.loads(line)["logger"] for line in lines] == [
            "quire.server.http",
            "uvicorn.error",
            "another.library",
        ]
    else:
        assert re.fullmatch(r'\S+ INFO quire.server.http request path="/a b" status=200', lines[0])
        assert lines[1].endswith(r"ERROR uvicorn.error Address\u000ain use")
