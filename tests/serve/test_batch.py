"""`quire batch`: the server's answers without a server, in full and once each, whatever ends a run."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from pseudo_terminal import Terminal

from quire.cli import batch_run
from quire.cli.batch_output import OutputLine, StreamOutput
from quire.cli.batch_run import Tally, answer_all
from quire.cli.main import main
from quire.errors import EngineDead
from quire.server.local import LocalServer, Reply

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SEEDED = {"seed": 7, "temperature": 0.9}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 12, "logprobs": True},
    COMPLETIONS: {"prompt": ["Once", "upon"], "max_tokens": 9, "logprobs": 2, "n": 2},
    RESPONSES: {"input": "What is 3 + 4?", "max_output_tokens": 9},
}


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["batch", *argv])
    return int(ended.value.code or 0)


def write(path: Path, *requests: tuple[str, dict[str, Any]]) -> str:
    """Write a batch whose requests are numbered from 0."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of an output, all of them complete, none of them twice."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def same(answer: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one request have in common: all but their names and times."""
    names = ("id", "created", "created_at", "completed_at", "timings")
    kept = {name: value for name, value in answer.items() if name not in names}
    for item in kept.get("output", ()):
        item.pop("id")
    return kept


def test_answers_are_those_of_the_server(client: httpx.Client, tmp_path: Path) -> None:
    """Bit for bit, log-probabilities included; and so are errors and warnings."""
    bodies = [(url, {**body, **SEEDED}) for url, body in BODIES.items()]
    bodies += [(CHAT, {**BODIES[CHAT], **SEEDED, "unheard_of": 1}), (CHAT, {"messages": 7})]
    bodies += [
        (COMPLETIONS, {"prompt": "a", "model": "other"}),
        (RESPONSES, {"input": "a", "temperature": 3}),
    ]
    output = tmp_path / "out.jsonl"
    assert call(write(tmp_path / "in.jsonl", *bodies), "-o", str(output)) == 1
    found = by_id(output)
    for number, (url, body) in enumerate(bodies):
        expected = client.post(url, json=body)
        line = found[str(number)]
        assert line["id"].startswith("batch_req_")
        assert line["response"]["request_id"]
        assert line["response"]["status_code"] == expected.status_code
        assert same(line["response"]["body"]) == same(expected.json())
        if expected.status_code == 200:
            assert line["error"] is None
        else:
            assert line["error"] == {**expected.json()["error"], "line": number + 1}
    assert found["3"]["response"]["body"]["warnings"]


def test_bad_lines_fail_alone_and_errors_are_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = {"prompt": "Once", "max_tokens": 2}
    flags = (write(source, (COMPLETIONS, good), (COMPLETIONS, {"stream": True})), "-o", str(output))
    with source.open("a") as file:
        file.write("\nnope\n")
    assert call(*flags) == 1
    err = capsys.readouterr().err
    for words in ("1 request answered · 3 errors", "3 of 4 requests failed", "line 2: body.stream is true"):
        assert words in err
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    failed = {line["error"]["line"]: line for line in lines if line["error"]}
    codes = {2: "stream_not_supported", 3: "empty_line", 4: "invalid_json_line"}
    assert {number: line["error"]["code"] for number, line in failed.items()} == codes
    assert all(line["response"] is None for line in failed.values())
    first = next(line for line in lines if line["custom_id"] == "0")
    write(source, (COMPLETIONS, good), (COMPLETIONS, good))
    assert call(*flags) == 0
    assert "1 request answered already, 3 errors to retry" in capsys.readouterr().err
    assert set(by_id(output)) == {"0", "1"}
    assert by_id(output)["0"] == first
    write(source, (COMPLETIONS, good))
    assert call(*flags) == 0  # all is there
    assert "also has 1 answer to requests that are not in INPUT" in capsys.readouterr().err
    assert call(*flags, "--overwrite") == 0
    assert by_id(output)["0"]["id"] != first["id"]
    assert len(by_id(output)) == 1


class Batch:
    """`quire batch` in a process of its own, slowed down so that a signal meets it at work."""

    def __init__(self, source: str, output: Path, **streams: Any) -> None:
        self.output = output
        command = [sys.executable, "-m", "quire", "batch", source, "-o", str(output)]
        command += ["--num-threads", "1", "--max-num-seqs", "2"]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, env={**os.environ, "QUIRE_OFFLINE": "1"}, **streams
        )

    def wait_for(self, num_lines: int) -> None:
        end_s = time.monotonic() + 60
        while not self.output.exists() or self.output.read_bytes().count(b"\n") < num_lines:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < end_s
            time.sleep(0.005)

    def end(self, number: int = 0) -> tuple[int, str]:
        """Send a signal, if any, and return the exit status and what was said."""
        if number:
            self.process.send_signal(number)
        said = self.process.communicate(timeout=60)[1].decode()
        assert "Traceback" not in said
        return self.process.returncode, said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_what_was_ended_goes_on(tmp_path: Path, number: int) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True}
    requests = [(COMPLETIONS, {**body, "seed": n}) for n in range(60)]
    batch = Batch(write(source, *requests), output)
    batch.wait_for(3)
    status, said = batch.end(number)
    if number != signal.SIGKILL:
        assert status == 128 + number
        assert "hint: run the same command again to resume" in said
        assert output.read_bytes().endswith(b"\n")
    before = output.read_bytes().splitlines(keepends=True)
    assert 3 <= len(before) < 60
    if number == signal.SIGKILL:
        output.write_bytes(b"".join(before)[:-20])  # as if it had met a write
        before = before[:-1]
    status, said = Batch(source.as_posix(), output).end()
    assert status == 0
    assert f"{len(before)} requests answered already" in said
    assert output.read_bytes().startswith(b"".join(before))
    found = by_id(output)
    assert set(found) == {str(n) for n in range(60)}
    assert all(line["response"]["body"]["usage"]["completion_tokens"] == 60 for line in found.values())


def test_a_pipe_in_and_a_pipe_out(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", (COMPLETIONS, {"prompt": "Once", "max_tokens": 2}))
    command = [sys.executable, "-m", "quire", "batch", "-", "-o", "-", "--num-threads", "1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        run.stdin.write(Path(source).read_bytes())
        run.stdin.flush()
        line = json.loads(run.stdout.readline())  # comes while the pipe is open
        assert line["custom_id"] == "0"
        run.send_signal(signal.SIGINT)  # which waits in vain for the pipe, and no more after this
        assert run.wait(60) == 130


def test_a_bar_in_a_terminal(tmp_path: Path) -> None:
    body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True}
    source = write(tmp_path / "in.jsonl", *((COMPLETIONS, body) for _ in range(60)))
    flags = ("-o", str(tmp_path / "out.jsonl"), "--num-threads", "1", "--max-num-seqs", "2")
    terminal = Terminal([sys.executable, "-m", "quire", "batch", source, *flags])
    terminal.read_until("/60")
    assert " 0 errors · " in terminal.read_until(" tokens/s")
    terminal.type("\x03")
    assert terminal.process.wait(60) == 130
    assert "hint: run the same command again to resume" in terminal.rest()


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ([], 2, "INPUT is missing"),
        (["in.jsonl"], 2, "OUTPUT is missing"),
        (["in.jsonl", "other", "-o", "out"], 2, "unexpected 'other'"),
        (["-i", "in.jsonl", "no-such-file", "-o", "out"], 1, "no-such-file: cannot be read"),
        (["no-such-file", "-o", "out"], 1, "no-such-file: cannot be read: No such file"),
        (["in.jsonl", "-o", "in.jsonl"], 1, "in.jsonl is also the input"),
        (["in.jsonl", "-o", "out", "--model", "demos"], 1, "did you mean 'demo'?"),
        (["-i", "empty", "-o", "out"], 1, "empty holds no requests"),
    ],
)
def test_wrong_words(
    argv: list[str],
    status: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text("{}\n")
    (tmp_path / "empty").touch()
    assert call(*argv) == status
    assert words in capsys.readouterr().err


class Scripted(LocalServer):
    """A server that answers each request with the next of these statuses; it dies with status 0."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.most = self._running = 0
        self._dead = False

    def check_alive(self) -> None:
        if self._dead:
            raise EngineDead("the engine died")

    async def post(self, path: str, body: bytes) -> Reply:
        self._running += 1
        self.most = max(self.most, self._running)
        await asyncio.sleep(0)
        self._running -= 1
        status = self.statuses.pop(0) if self.statuses else 200
        self._dead = status == 0
        error = b'{"error":\n{"message":"no","code":"engine_dead"}}'
        return Reply(status or 503, {"retry-after": "0"}, b"{}" if status == 200 else error)


def answered(
    server: LocalServer, num_requests: int, max_in_flight: int = 4
) -> tuple[Tally, list[OutputLine]]:
    line = {"method": "POST", "url": COMPLETIONS, "body": {}}
    lines = (json.dumps({**line, "custom_id": str(n)}).encode() for n in range(num_requests))
    written, tally = io.BytesIO(), Tally(num_requests)
    file = io.BytesIO(b"\n".join(lines))
    asyncio.run(answer_all(server, file, StreamOutput(written, "out"), tally, max_in_flight))
    return tally, [msgspec.json.decode(raw, type=OutputLine) for raw in written.getvalue().splitlines()]


def test_requests_in_flight_are_bounded() -> None:
    server = Scripted()
    tally, lines = answered(server, 50)
    assert (server.most, tally.answered, len(lines)) == (4, 50, 50)


def test_a_restart_of_the_engine_is_waited_for() -> None:
    tally, _ = answered(Scripted(*[503] * 100, 200), 1)
    assert (tally.answered, tally.failed) == (1, 0)
    tally, lines = answered(Scripted(503, 500), 1)
    assert (tally.answered, tally.failed, tally.first_error) == (0, 1, "line 1: no")
    assert lines[0].error == {"message": "no", "code": "engine_dead", "line": 1}


def test_an_engine_that_is_given_up_ends_the_batch() -> None:
    with pytest.raises(EngineDead):
        answered(Scripted(200, 0), 50)


def test_progress_in_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(batch_run, "NOTE_S", 0.0)
    answered(Scripted(200, 400), 2)
    assert "1 of 2 requests · 0 errors ·" in capsys.readouterr().err
    tally = Tally(2000, begin_s=time.monotonic() - 100, answered=9, failed=1, tokens=500)
    assert (
        tally.progress() == "10 of 2,000 requests · 1 error · 0.1 requests/s · 5 tokens/s · 5 h 32 min left"
    )
