"""The load generator's client against a server of a few lines, which errs on purpose."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from quire.bench.driver import Progress, drive
from quire.bench.http_client import Client
from quire.bench.openai_api import CHAT, COMPLETIONS, Api, Unusable, ask, begin, find_model, learn
from quire.bench.workload import Request

Answer = Callable[[str, bytes, asyncio.StreamWriter], Awaitable[None]]


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def whole(status: str, body: bytes, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKENS = [event(choices=[{"index": 0, "text": word}]) for word in ("a", " b", " c")]
USAGE = event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 4})
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Peer:
    """Serves whatever `answer` writes. Counts connections; those open now, and those at all."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.num_connections = self.num_open = self.most_at_once = self._now = 0
        self.bodies: list[bytes] = []

    async def __aenter__(self) -> Peer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(line.split(": ", 1) for line in head.decode().strip().split("\r\n")[1:])
                body = await reader.readexactly(int(fields.get("Content-Length", 0)))
                self.bodies.append(body)
                self._now += 1
                self.most_at_once = max(self.most_at_once, self._now)
                try:
                    await self.answer(head.decode().split()[1], body, writer)
                    await writer.drain()
                finally:
                    self._now -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_open -= 1
            writer.close()


async def stream(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    """A whole answer, in pieces that cut events and chunks."""
    data = HEAD + b"".join(chunk(one) for one in (*TOKENS, USAGE, DONE)) + b"0\r\n\r\n"
    for start in range(0, len(data), 33):
        writer.write(data[start : start + 33])
        await writer.drain()
        await asyncio.sleep(0)


def says(*data: bytes, closes: bool = False) -> Answer:
    async def answer(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(data))
        if closes:
            writer.close()

    return answer


async def asked(answer: Answer, num_times: int = 1, api: Api | None = None):
    """The last of several answers, one after the other."""
    async with Peer(answer) as peer:
        client = Client(peer.url, timeout_s=10)
        for _ in range(num_times):
            timeline = await ask(client, api or Api(COMPLETIONS, "m"), Request("hi", 4))
        client.close()
        return timeline, peer


def test_a_stream_is_followed_and_its_connection_used_again():
    timeline, peer = asyncio.run(asked(stream, 3))
    assert timeline.error == ""
    assert len(timeline.chunk_s) == 3
    assert (timeline.num_prompt_tokens, timeline.num_output_tokens) == (5, 4)
    assert timeline.sent_s <= timeline.chunk_s[0] <= timeline.chunk_s[-1] <= timeline.end_s
    assert peer.num_connections == 1
    sent = json.loads(peer.bodies[0])
    assert sent["stream_options"] == {"include_usage": True}
    assert (sent["prompt"], sent["max_tokens"]) == ("hi", 4)


def test_a_connection_that_was_closed_while_idle_is_replaced():
    timeline, peer = asyncio.run(asked(says(whole("200 OK", b"{}"), closes=True), 2, Api(CHAT, "m", False)))
    assert timeline.error == ""
    assert peer.num_connections == 2


@pytest.mark.parametrize(
    ("data", "closes", "error"),
    [
        ([HEAD, chunk(TOKENS[0])], True, "connection lost"),
        ([HEAD, chunk(TOKENS[0]), b"0\r\n\r\n"], False, "stream without an end"),
        ([HEAD, chunk(USAGE), chunk(DONE), b"0\r\n\r\n"], False, "no tokens came"),
        ([HEAD, chunk(TOKENS[0]), chunk(event(error={"code": "engine_dead"}))], False, "stream: engine_dead"),
        ([whole("500 No", b"oops")], False, "HTTP 500 without an explanation"),
        ([b"SSH-2.0\r\n\r\n"], False, "the reply begins with 'SSH-2.0'"),
    ],
)
def test_failures_have_names(data, closes, error):
    timeline, _ = asyncio.run(asked(says(*data, closes=closes)))
    assert timeline.error == error
    assert timeline.end_s >= timeline.sent_s
    assert not timeline.is_rejected


def test_an_error_in_a_whole_answer_is_a_failure():
    body = json.dumps({"error": {"message": "no", "code": "engine_dead"}}).encode()
    timeline, _ = asyncio.run(asked(says(whole("200 OK", body)), api=Api(COMPLETIONS, "m", False)))
    assert timeline.error == "reply: engine_dead"


def test_a_refusal_is_told_from_a_failure():
    body = json.dumps({"error": {"message": "full", "code": "server_overloaded"}}).encode()
    timeline, _ = asyncio.run(asked(says(whole("503 Full", body, "Retry-After: 3\r\n"))))
    assert timeline.error == "HTTP 503 server_overloaded"
    assert timeline.is_rejected
    assert timeline.retry_after == "3"


def test_hanging_up_closes_the_connection():
    async def endless(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        while True:
            writer.write(chunk(TOKENS[0]))
            await writer.drain()
            await asyncio.sleep(0.001)

    async def hang_up() -> None:
        async with Peer(endless) as peer:
            client, seen = Client(peer.url), []
            reply = await client.post("/x", b"{}", lambda data, at_s: seen.append(data) or len(seen) == 2)
            assert reply.hung_up
            assert len(seen) == 2
            while peer.num_open:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(hang_up(), 10))


def test_nobody_listens():
    async def refused():
        client = Client("http://127.0.0.1:1")
        timeline = await ask(client, Api(COMPLETIONS, "m"), Request("hi", 1))
        with pytest.raises(Unusable, match="no server answers: connection refused"):
            await find_model(client, None)
        return timeline

    assert asyncio.run(refused()).error == "connection refused"


def test_a_host_that_cannot_be_one():
    with pytest.raises(Unusable, match="no server answers: UnicodeError"):
        asyncio.run(asyncio.wait_for(find_model(Client("http://a..b:1"), None), 10))


async def silent(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    """A stream without an event, until the client has gone."""
    writer.write(HEAD)
    while not writer.transport.is_closing():
        writer.write(chunk(b": nothing\n\n"))
        await asyncio.sleep(0.001)


def test_what_takes_too_long_ends_and_closes_its_connection():
    async def both():
        async with Peer(silent) as peer:
            client = Client(peer.url, timeout_s=0.1)
            first = asyncio.create_task(ask(client, Api(COMPLETIONS, "m"), Request("hi", 4)))
            await asyncio.sleep(0.05)
            second = await ask(client, Api(COMPLETIONS, "m"), Request("hi", 4))
            while peer.num_open:
                await asyncio.sleep(0.001)
            return await first, second

    for timeline in asyncio.run(asyncio.wait_for(both(), 10)):
        assert timeline.error == "timed out"
        assert 0.09 < timeline.end_s - timeline.sent_s < 1


def test_a_task_that_is_cancelled_hangs_up():
    async def leave() -> None:
        async with Peer(silent) as peer:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(Client(peer.url).post("/x", b"{}"), 0.05)
            while peer.num_open:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(leave(), 10))


async def driven(requests, **how):
    async with Peer(stream) as peer:
        client = Client(peer.url)

        def send(request, planned_s, done):
            begin(client, Api(COMPLETIONS, "m"), request, done, planned_s)

        return await drive(requests, send, Progress(None, None), **how), peer


def test_a_closed_loop_keeps_its_number_and_injects_beside_it():
    requests = (Request(str(index), 4) for index in range(40))
    extra = [Request("extra", 4, at_s=0.0)]
    run, peer = asyncio.run(driven(requests, is_open=False, max_concurrency=3, injected=extra))
    assert len(run.timelines) == 40
    assert len(run.injected) == 1
    assert 1 < peer.most_at_once <= 4
    assert not any(one.error for one in run.timelines)


def test_an_open_loop_sends_each_at_its_moment_and_none_after_the_end():
    requests = [Request("hi", 4, at_s=at_s) for at_s in (0.0, 0.05, 1.0)]
    run, _ = asyncio.run(driven(requests, is_open=True, until_s=0.5))
    assert [one.planned_s for one in run.timelines] == [run.begin_s, run.begin_s + 0.05]
    assert all(one.sent_s >= one.planned_s for one in run.timelines)


def test_an_open_loop_that_is_full_is_late():
    run, peer = asyncio.run(driven([Request("hi", 4)] * 20, is_open=True, max_concurrency=2))
    assert len(run.timelines) == 20
    assert peer.most_at_once == 2


def test_requests_that_cannot_be_made_end_the_run():
    def requests():
        yield Request("hi", 4)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        asyncio.run(driven(requests(), is_open=False, max_concurrency=1))
    assert asyncio.run(driven([], is_open=True))[0].timelines == []


def learned(tokenized: bytes, tokens_per_word: int):
    """What is learned from a server with this answer of /tokenize, and a usage that counts words."""

    async def count(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/tokenize":
            writer.write(tokenized)
            return
        num_words = len(json.loads(body)["prompt"].split())
        usage = {"prompt_tokens": 7 + tokens_per_word * num_words, "completion_tokens": 1}
        told = event(choices=[], usage=usage)
        writer.write(HEAD + b"".join(map(chunk, (TOKENS[0], told, DONE))) + b"0\r\n\r\n")

    async def words():
        async with Peer(count) as peer:
            return await learn(Client(peer.url), Api(COMPLETIONS, "m"))

    return asyncio.run(words())


@pytest.mark.parametrize("tokenized", [whole("404 No", b"{}"), whole("200 OK", b'{"tokens": []}')])
def test_lengths_of_texts_are_learned_from_usage(tokenized):
    found = learned(tokenized, 2)
    assert (found.token_ids, found.tokens_per_word, found.base_tokens) == ((), 2.0, 7.0)


def test_a_usage_that_does_not_count_prompts_is_refused():
    with pytest.raises(Unusable, match="counts 7 tokens in 16 words, and 7 in 144"):
        learned(whole("404 No", b"{}"), 0)
