"""How streams are sent and cut into chunks, without a server."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from model_folders import tokenizer_of
from msgspec import UNSET
from openai_client import MAX_LINE_BYTES

from quire.errors import EngineDead, RequestError
from quire.outputs import CompletionOutput, Logprob
from quire.sampling_params import SamplingParams
from quire.server import event_stream as stream
from quire.server.event_stream import EventStream, pieces
from quire.server.logprob_json import ChatLogprobs, CompletionLogprobs, LogprobCursor, finite
from quire.server.openai.chunks import CompletionChunk, CompletionChunkChoice, event_of, token_details


def run(events: AsyncGenerator[bytes, None]) -> list[dict[str, Any]]:
    """What an EventStream sends of these events."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(dict(message))

    asyncio.run(EventStream(events)({"type": "http", "path": "/v1/x"}, receive, send))
    return sent


def bodies(sent: list[dict[str, Any]]) -> list[bytes]:
    return [message["body"] for message in sent if message["type"] == "http.response.body"]


def test_events_are_sent_as_they_come() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    sent = run(events())
    assert sent[0]["status"] == 200
    assert bodies(sent) == [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"]
    assert [message.get("more_body", False) for message in sent[1:]] == [True, True, False]


def test_an_error_before_the_first_event_is_a_status() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        raise RequestError("no", None, "prompt")
        yield b""

    sent = run(events())
    assert sent[0]["status"] == 400
    assert json.loads(bodies(sent)[0])["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("error", "kind"), [(EngineDead("it died"), "engine_dead"), (KeyError("x"), "internal_error")]
)
def test_an_error_within_a_stream_is_an_event(error: Exception, kind: str) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise error

    first, last = bodies(run(events()))
    assert first == b"data: 1\n\n"
    told, done, rest = last.split(b"\n\n")
    assert json.loads(told.removeprefix(b"data: "))["error"]["code"] == kind
    assert (done, rest) == (b"data: [DONE]", b"")


def test_a_late_error_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FIRST_S", 0.01)

    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.05)
        raise EngineDead("it died")
        yield b""

    sent = run(events())
    assert sent[0]["status"] == 200
    assert b'"error"' in bodies(sent)[0]


def test_silence_is_broken_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FIRST_S", 0.01)
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.05)

    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.18)
        yield b"data: 1\n\n"

    sent = bodies(run(events()))
    assert sent[0] == b": keep-alive\n\n"
    assert sent[-2:] == [b"data: 1\n\n", b"data: [DONE]\n\n"]


def test_the_events_end_with_the_client() -> None:
    closed = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def main() -> None:
        async def send(message: Any) -> None:
            pass

        async def receive() -> dict[str, Any]:
            raise AssertionError

        answer = EventStream(events())({"type": "http", "path": "/"}, receive, send)
        task = asyncio.create_task(answer)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert closed == [True]


def test_a_text_is_cut_into_pieces() -> None:
    for text in ("", "a", "x" * 4096, "é" * 10_000):
        found = list(pieces(text))
        assert "".join(found) == text
        assert all(len(stream.encode(piece)) < MAX_LINE_BYTES // 2 for piece in found)
    assert all(len(stream.encode(piece)) < MAX_LINE_BYTES // 2 for piece in pieces("\x00" * 10_000))


@pytest.mark.parametrize("kind", ["chat", "completions", "none"])
def test_no_chunk_is_long(demo_folder: Any, kind: str) -> None:
    """A slow reader gets much at once."""
    tokenizer = tokenizer_of(demo_folder)
    position = {token: Logprob(-1.0 / token, token, None) for token in range(1, 22)}
    output = CompletionOutput(0, token_ids=[21] * 5000, logprobs=[position] * 5000)
    shape: Any = None
    if kind == "chat":
        shape = ChatLogprobs(tokenizer, 20, False)
    elif kind == "completions":
        shape = CompletionLogprobs(tokenizer, SamplingParams(), 20, False)
    cursor = LogprobCursor(output, shape)
    chunk = CompletionChunk(id="x" * 40, created=1, model="demo", system_fingerprint="f")
    lines = [
        event_of(chunk, [CompletionChunkChoice(0, "\x00" * 4096, logprobs, token_ids=ids)])
        for logprobs, ids in token_details(cursor, True)
    ]
    assert len(lines) > 1
    assert max(map(len, lines)) < MAX_LINE_BYTES
    parsed = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]
    assert [i for choice in parsed for i in choice.get("token_ids", [])] == output.token_ids
    if shape is not None:
        name = "content" if kind == "chat" else "tokens"
        assert sum(len((choice["logprobs"] or {}).get(name, [])) for choice in parsed) == 5000
    assert token_details(cursor, True) == [(None, UNSET)]


def test_no_tokenizer_is_kept_for_the_tokens_that_were_named(demo_folder: Any) -> None:
    """Where several models are served, each load of one makes a tokenizer."""
    tokenizer = tokenizer_of(demo_folder)
    position = {21: Logprob(-0.5, 1, None)}
    shape = ChatLogprobs(tokenizer, 1, False)
    found = [json.loads(entry) for (entry,) in shape.positions([21, 21], [position] * 2)]
    assert found[0] == found[1]
    assert found[0]["token"] == tokenizer.token_text(21)
    kept = weakref.ref(tokenizer)
    del tokenizer, shape
    gc.collect()
    assert kept() is None


def test_minus_infinity_can_be_written() -> None:
    assert finite(Logprob(float("-inf"), 9, None)) == -9999.0
    assert finite(Logprob(-3.5, 1, None)) == -3.5
