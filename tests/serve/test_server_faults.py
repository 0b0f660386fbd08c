"""A server whose engine dies, whose clients do not read, or leave whenever they like."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from requests_over_http import LONG, SHORT, Background, address, idle, wait_for, written
from server import Server, running

SLOW = ("--device", "reference", "--speculative", "off")


def test_an_engine_that_is_killed() -> None:
    """Its streams go on in the next one, to the same text, and what waited runs; new requests are refused."""
    with running(*SLOW, "--max-num-seqs", "1") as server, server.client() as client:
        body = LONG | {"max_tokens": 60, "seed": 5}
        expected = client.post("/v1/completions", json=body | {"stream": False}).json()
        stream = Background(server, body)
        assert stream.first.wait(30)
        waiting = Background(server, SHORT, stream=False)
        wait_for(lambda: server.load()["num_requests_waiting"] == 1, 60, "it waits")
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_for(lambda: client.get("/health/ready").status_code == 503, 60, "not ready")
        refused = client.post("/v1/completions", json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        lines = stream.end(30)
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        text = "".join(one["text"] for chunk in chunks for one in chunk["choices"])
        assert text == expected["choices"][0]["text"]
        assert {chunk["system_fingerprint"] for chunk in chunks} == {expected["system_fingerprint"]}
        waiting.end(20)
        assert waiting.status == 200
        counts = client.get("/metrics").text
        for why, count in {"error": 0.0, "abort": 0.0, "length": 3.0}.items():
            labels = f'engine="0",finished_reason="{why}",model_name="demo"'
            assert f"vllm:request_success_total{{{labels}}} {count}" in counts
        assert "error=" not in server.log
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        wait_for(lambda: idle(server), 1, "all is free")


def test_an_engine_that_is_given_up() -> None:
    """The server ends, with a status that says so, and whoever watches it can start another."""
    once = "import quire.server.remote as r; RestartPolicy = r.RestartPolicy"
    with running(before=f"{once}; r.RestartPolicy = lambda: RestartPolicy(max_deaths=1)") as server:
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.process.wait(5) == 1
        assert "the engine cannot be restarted" in server.log


def test_an_engine_that_stands_still() -> None:
    """No step ends: not ready, and ready again when one does; the open stream goes on."""
    with running(*SLOW) as server, server.client() as client:
        stream = Background(server, LONG | {"max_tokens": 200})
        assert stream.first.wait(30)
        os.kill(server.engine_pid, signal.SIGSTOP)
        wait_for(lambda: client.get("/health/ready").status_code == 503, 60, "not ready")
        assert "no step" in client.get("/health/ready").json()["reason"]
        assert client.get("/health/live").status_code == 200
        assert client.post("/v1/completions", json=SHORT).status_code == 503
        os.kill(server.engine_pid, signal.SIGCONT)
        wait_for(lambda: client.get("/health/ready").status_code == 200, 60, "ready again")
        assert stream.end()[-1] == "[DONE]"


def test_clients_leave_whenever_they_like(server: Server) -> None:
    """Hundreds of requests of every kind, left at any moment: nothing is left of them."""
    rng = random.Random(7)
    bodies = [
        LONG,
        LONG | {"stream": True},
        LONG | {"n": 3, "temperature": 1.0},
        LONG | {"prompt": ["a", "b c", "d"], "stream": True, "max_tokens": 40},
        LONG | {"prompt": "word " * 200, "logprobs": 5, "stream": True},
        LONG | {"stop": ["the", "a"], "n": 2, "stream": True, "temperature": 1.0},
    ]

    def ask(body: dict[str, object], stay_s: float) -> None:
        with socket.create_connection(address(server)) as connection:
            raw = written(body)
            cut = len(raw) if stay_s < 0.1 else len(raw) - 3  # some leave before all is said
            connection.sendall(raw[:cut])
            time.sleep(stay_s)

    with ThreadPoolExecutor(24) as pool:
        asked = [(rng.choice(bodies) | {"seed": n}, rng.random() ** 3 * 0.12) for n in range(400)]
        list(pool.map(lambda one: ask(*one), asked))
    wait_for(lambda: idle(server), 10.0, "blocks are free")  # all of them together would take a minute
    with server.client() as client:
        assert client.post("/v1/completions", json=SHORT).status_code == 200


def test_a_client_that_does_not_read_holds_nobody_up(server: Server) -> None:
    """Its answer, of megabytes, waits; those of others do not, and the server does not grow by it."""
    size = _resident_bytes(server)
    many = LONG | {"logprobs": 5, "n": 8, "stream": True, "temperature": 1.0}
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(address(server))
        silent.sendall(written(many))
        with server.client() as client:
            begin = time.monotonic()
            for _ in range(20):
                assert client.post("/v1/completions", json=SHORT).status_code == 200
            assert time.monotonic() - begin < 10
        assert server.load()["server_load"] == 1
        assert _resident_bytes(server) - size < 64 << 20
    wait_for(lambda: idle(server), 1.0, "blocks are free")


def _resident_bytes(server: Server) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_prompt_tokens_that_wait_are_bounded() -> None:
    """By their number; one request that is larger than the bound is taken when nothing waits."""
    with running(*SLOW, "--max-num-seqs", "1", "--max-queued-tokens", "100") as server:
        first = Background(server, LONG | {"max_tokens": 150})
        assert first.first.wait(30)
        large = Background(server, SHORT | {"prompt": [5] * 200})
        wait_for(lambda: server.load()["num_tokens_queued"] == 200, 60, "it waits")
        with server.client() as client:
            reply = client.post("/v1/completions", json=SHORT)
            assert reply.status_code == 503
            assert "tokens" in reply.json()["error"]["message"]
            assert 'vllm:admission_rejections_total{engine="0",model_name="demo",reason="tokens"} 1.0' in (
                client.get("/metrics").text
            )
        assert [one.end()[-1] for one in (first, large)] == ["[DONE]"] * 2


@pytest.mark.parametrize("tenants_apart", [False, True])
def test_cached_beginnings_of_another_key(tmp_path: Path, tenants_apart: bool) -> None:
    """They are not found by another key where that was asked for."""
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    flags = ("--api-key-file", str(keys), *(("--cache-per-key",) if tenants_apart else ()))
    with running(*flags) as server, server.client() as client:

        def cached(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            reply = client.post("/v1/completions", json=SHORT | {"prompt": "word " * 100}, headers=headers)
            number: int = reply.json()["timings"]["cached_tokens"]
            return number

        assert cached("first") == 0
        found = cached("second")
        assert (found == 0) is tenants_apart
        assert cached("first") > 0


TELL_WHAT_IS_LEFT = """
import gc, signal
from quire.outputs import RequestOutput
from quire.server.prompt_run import PromptRun
from quire.server.request import ServerRequest
from quire.text.answer import AnswerParser
kinds = ServerRequest, PromptRun, RequestOutput, AnswerParser
gc.disable()
signal.signal(signal.SIGUSR1, lambda *_: print("left:", sum(map(kinds.count, map(type, gc.get_objects())))))
"""


def test_nothing_of_an_answer_is_kept() -> None:
    """Nor for timers: what piles up till then breaks up the heap, and the server would grow for hours."""
    turns = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "seed": 1}
    asked: list[tuple[str, dict[str, object], int]] = [
        ("/v1/chat/completions", turns, 200),
        ("/v1/chat/completions", turns | {"stream": True}, 200),
        ("/v1/chat/completions", turns | {"temperature": 9}, 400),
        ("/v1/completions", SHORT | {"echo": True, "logprobs": 1}, 200),
        ("/v1/messages", turns | {"stream": True}, 200),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 8}, 200),
    ]
    with running(before=TELL_WHAT_IS_LEFT, PYTHONUNBUFFERED="1") as server:
        with server.client() as client:
            for path, body, status in asked:
                assert client.post(path, json=body).status_code == status
        left = Background(server, LONG)
        assert left.first.wait(30)
        left.leave()
        wait_for(lambda: idle(server), 60, "all is free")
        server.process.send_signal(signal.SIGUSR1)
        wait_for(lambda: "left:" in server.log, 60, "it tells")
        assert "left: 0" in server.log
