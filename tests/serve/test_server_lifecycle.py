"""How a server starts, is overloaded, loses clients, and ends."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from requests_over_http import LONG, SHORT, Background, address, idle, wait_for, written
from server import Server, running

# Some 100 tokens a second: long enough to do something meanwhile
SLOW = ("--device", "reference", "--speculative", "off")


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """A server that computes slowly, two requests at a time, and lets three wait."""
    with running(*SLOW, "--max-num-seqs", "2", "--max-queued-requests", "3") as server:
        yield server


def test_a_client_that_leaves_a_stream_frees_its_blocks(slow: Server) -> None:
    one = Background(slow, LONG)
    assert one.first.wait(30)
    assert slow.load()["num_requests_running"] == 1
    one.leave()
    wait_for(lambda: idle(slow), 1.0, "blocks are free")


def test_a_client_that_leaves_while_it_waits_for_a_whole_answer(slow: Server) -> None:
    with socket.create_connection(address(slow)) as connection:
        connection.sendall(written(LONG))
        wait_for(lambda: slow.load()["num_requests_running"] == 1, 60, "it runs")
    wait_for(lambda: idle(slow), 1.0, "blocks are free")


def test_clients_that_leave_the_queue(slow: Server) -> None:
    """Two run, three wait; when all leave, nothing is left of any."""
    connections = [socket.create_connection(address(slow)) for _ in range(5)]
    for state, count, some in (("running", 2, connections[:2]), ("waiting", 3, connections[2:])):
        for connection in some:
            connection.sendall(written(LONG))
        wait_for(lambda: slow.load()[f"num_requests_{state}"] == count, 10, state)  # noqa: B023  waited for at once
    for connection in reversed(connections):
        connection.close()
    wait_for(lambda: idle(slow), 1.0, "blocks are free")


def test_a_full_queue_is_told_at_once(slow: Server) -> None:
    """Two run and three wait: the others hear within milliseconds when to come back; those go on."""
    running_ones = [Background(slow, LONG | {"max_tokens": 500}) for _ in range(2)]
    assert all(one.first.wait(30) for one in running_ones)
    waiting = [Background(slow, SHORT) for _ in range(3)]
    wait_for(lambda: slow.load()["num_requests_queued"] == 3, 60, "three wait")
    times = []
    with slow.client() as client:
        for _ in range(20):
            begin = time.monotonic()
            reply = client.post("/v1/completions", json=SHORT)
            times.append(time.monotonic() - begin)
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "server_overloaded"
            assert int(reply.headers["retry-after"]) >= 1
        # Nothing of it was read; and it is counted like others of its path.
        broken = client.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
        assert (broken.status_code, broken.json()["error"]["type"]) == (503, "overloaded_error")
        assert 'path="/v1/messages",status="5xx"} 1.0' in client.get("/metrics").text
        assert client.post("/v1/responses/one/cancel", json={}).status_code == 404
        assert client.get("/health/ready").status_code == 200  # full is not unwell
    assert sorted(times)[len(times) // 2] < 0.02
    assert [one.end()[-1] for one in (*running_ones, *waiting)] == ["[DONE]"] * 5
    wait_for(lambda: idle(slow), 1.0, "blocks are free")


def test_a_wrong_request_is_refused_before_it_waits(client: httpx.Client) -> None:
    """What can never run is a 400 and no stream, whatever it asked for."""
    wrongs: list[dict[str, object]] = [
        {"prompt": [0] * 5000},
        {"prompt": [4096]},
        {"prompt": []},
        {"prompt": "a", "seed": 1 << 70},
    ]
    for wrong in wrongs:
        reply = client.post("/v1/completions", json=SHORT | wrong | {"stream": True})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_several_prompts_and_choices_together(client: httpx.Client) -> None:
    """They come in order and are what each gives alone; times and counts are there."""
    prompts = ["Once upon a time", "The fox", "A small"]
    together = client.post("/v1/completions", json=SHORT | {"prompt": prompts, "n": 2}).json()
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    texts = [choice["text"] for choice in together["choices"]]
    for number, prompt in enumerate(prompts):
        alone = client.post("/v1/completions", json=SHORT | {"prompt": prompt, "n": 2}).json()
        assert [choice["text"] for choice in alone["choices"]] == texts[2 * number : 2 * number + 2]
    timings = together["timings"]
    assert timings["completion_tokens"] == 6 * 8
    assert timings["computed_tokens"] + timings["cached_tokens"] == timings["prompt_tokens"]
    assert 0 <= timings["queue_ms"] <= timings["ttft_ms"] <= timings["total_ms"]
    assert 0 < timings["mean_itl_ms"] <= timings["max_itl_ms"] or timings["decode_ms"] == 0


def test_requests_without_a_seed_differ(client: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, "temperature": 2.0}
    texts = {client.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3


def test_a_stop_string_ends_a_choice_in_the_engine(client: httpx.Client) -> None:
    whole = client.post("/v1/completions", json=SHORT | {"max_tokens": 200}).json()
    text: str = whole["choices"][0]["text"]
    stop = text[20:26]
    body = SHORT | {"max_tokens": 200, "stop": stop}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        text[: text.index(stop)],
        "stop",
        stop,
    )


# The end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_open_requests_end_well(number: int) -> None:
    """After a signal, what runs goes on to its end; what is new is sent away; then all is gone."""
    with running(*SLOW, "--max-num-seqs", "8") as server:
        body = LONG | {"max_tokens": 150}
        open_ones = [Background(server, body | {"seed": seed}) for seed in range(4)]
        whole = Background(server, body, stream=False)
        assert all(one.first.wait(30) for one in open_ones)
        with server.client() as client:
            assert client.get("/health/ready").status_code == 200
            engine = server.engine_pid
            server.process.send_signal(number)
            wait_for(lambda: client.get("/health/ready").status_code == 503, 0.5, "not ready")
            assert client.get("/health/live").status_code == 200
            time.sleep(0.2)
            refused = client.post("/v1/completions", json=SHORT)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
        for one in open_ones:
            lines = one.end()
            assert lines[-1] == "[DONE]"
            assert not any('"error"' in line for line in lines)
        whole.end()
        assert whole.status == 200
        assert server.process.wait(5) == 0
        assert not Path(f"/proc/{engine}").exists()


def test_a_second_signal_ends_streams_with_an_error() -> None:
    with running(*SLOW) as server:
        one = Background(server, LONG)
        assert one.first.wait(30)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        lines = one.end(5)
        assert '"error"' in lines[-2]
        assert lines[-1] == "[DONE]"
        assert server.process.wait(5) == 1
        assert time.monotonic() - begin < 5


def test_patience_has_an_end() -> None:
    """A whole answer that is not there in time is a 503."""
    with running(*SLOW, "--drain-timeout-s", "1") as server:
        one = Background(server, LONG, stream=False)
        wait_for(lambda: server.load()["num_requests_running"] == 1, 30, "it runs")
        server.process.send_signal(signal.SIGTERM)
        one.end(10)
        assert one.status == 503
        assert server.process.wait(5) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading(number: int) -> None:
    server = Server()
    try:
        wait_for(lambda: _handles(server.process.pid, number), 30, "it handles the signal")
        server.process.send_signal(number)
        assert server.process.wait(10) == 128 + number
        assert "Traceback" not in server.log
    finally:
        server.stop()


def _handles(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for SIGTERM, which Python has not by itself."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def test_nothing_is_left_when_the_server_is_killed() -> None:
    with running() as server:
        engine = server.engine_pid
        server.process.kill()
        wait_for(lambda: not _alive(engine), 60, "the engine ends")


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


# The start


def _fail(*flags: str, **environment: str) -> str:
    """Start with flags that cannot work: what is said, in at most three lines."""
    run = subprocess.run(
        [sys.executable, "-m", "quire", "serve", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "QUIRE_OFFLINE": "1", **environment},
    )
    assert run.returncode in (1, 2)
    assert run.stdout == ""
    assert len(run.stderr.splitlines()) <= 3, run.stderr
    return run.stderr


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = _fail("demo", "--port", str(port))
    assert f"port {port}" in said
    assert "hint: --port " in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("no-such-model",), "no such folder"),
        (("demo", "demo"), "2 models with 1 names"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--port", "70000"), "70,000 is out of range"),
        (("--api-key-file", "/nothing"), "--api-key-file"),
        (("--ssl-certfile", "/nothing"), "--ssl-certfile"),
        (("--ssl-keyfile", "key.pem"), "--ssl-keyfile without --ssl-certfile"),
        (("--tool-call-parser", "hermse"), "hermes"),
        (("--max-queued-request", "3"), "did you mean '--max-queued-requests'?"),
        (("--max-model-len", "100000"), "--max-model-len"),
    ],
)
def test_what_cannot_be_served(flags: tuple[str, ...], words: str) -> None:
    assert words in _fail(*flags)


def test_the_only_tcp_socket() -> None:
    with running() as server:
        pids = [server.process.pid, server.engine_pid]
        listening = set()
        for pid in pids:
            inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
            for table in ("tcp", "tcp6", "udp", "udp6"):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    words = line.split()
                    if f"socket:[{words[9]}]" in inodes and (words[3] == "0A" or table.startswith("udp")):
                        listening.add((table, words[1]))
        port = int(server.url.rsplit(":", 1)[1])
        assert listening == {("tcp", f"0100007F:{port:04X}")}


def test_names_keys_and_the_first_lines() -> None:
    given = ("one", "two/three", "claude-*")
    flags = [word for name in given for word in ("--served-model-name", name)]
    with running(*flags, QUIRE_API_KEY="sesame") as server:
        assert "sesame" not in server.log
        assert f"curl {server.url}/v1/chat/completions" in server.log
        assert "$QUIRE_API_KEY" in server.log
        assert " kernels" in server.log
        with server.client() as client:
            assert client.get("/v1/models").status_code == 401
            assert client.get("/health").status_code == 200
            client.headers["Authorization"] = "Bearer sesame"
            assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["one", "two/three"]
            assert client.get("/v1/models/two/three").json()["id"] == "two/three"
            assert client.get("/v1/models/claude-x").json()["id"] == "claude-x"
            body = {"model": "claude-y", "prompt": "Hi", "max_tokens": 1}
            assert client.post("/v1/completions", json=body).json()["model"] == "claude-y"
            assert client.post("/v1/completions", json=body | {"model": "gpt"}).status_code == 404
            assert client.get("/openapi.json").json()["security"] == [{"key": []}]
            assert "sesame" not in client.get("/server_info").text


def test_https(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate")
    with running("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)) as server:
        assert server.url.startswith("https://")
        with server.client(verify=ssl.create_default_context(cafile=str(certificate))) as client:
            assert client.get("/health").status_code == 200
            reply = client.post("/v1/completions", json=SHORT)
            assert reply.json()["choices"][0]["finish_reason"] == "length"


def test_many_clients_at_once(server: Server) -> None:
    """Each gets what it would get alone."""

    def ask(seed: int) -> str:
        with server.client() as client:
            reply = client.post("/v1/completions", json=SHORT | {"seed": seed, "temperature": 1.0})
            text: str = reply.json()["choices"][0]["text"]
            return text

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(32)))
    assert together[::8] == [ask(seed) for seed in range(0, 32, 8)]
