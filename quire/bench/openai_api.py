"""Requests to a server of the OpenAI API, and the chunks of its answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.json import decode, encode

from quire.bench.http_client import Client, HttpReply, Lost
from quire.bench.http_reply import BadReply
from quire.bench.metrics import Timeline
from quire.bench.workload import WORDS, Content, PromptVocabulary, Request
from quire.errors import QuireError, quoted

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FULL = (429, 503, 529)  # statuses of servers that are full
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")
SHORT_TEXT, LONG_TEXT = 16, 144  # words; their tokens tell those of any other number of words


class StreamFailed(Exception):
    """The server sent an error within a stream."""


class Unusable(QuireError):
    """The server does not answer as it must for anything to be measured."""


@dataclass(frozen=True, slots=True)
class Api:
    """The requests of one model at one endpoint."""

    endpoint: str
    model: str
    stream: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of every body

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")

    def body(self, request: Request) -> bytes:
        """Return the body of a request; a stream has the usage at its end."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.num_output_tokens}
        if self.is_chat:
            body["messages"] = _messages(request.content)
        else:
            body["prompt"] = request.content
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return encode(body | dict(self.extra))


def _messages(content: Content) -> Content:
    if not isinstance(content, str):
        return content
    return [{"role": "user", "content": content}]


def begin(
    client: Client,
    api: Api,
    request: Request,
    done: Callable[[Timeline], object],
    planned_s: float | None = None,
    seen: Callable[[], None] | None = None,
) -> Timeline:
    """Send one request and return its timeline, which is complete when `done` is called with it.

    A failure becomes the timeline's `error`. `seen` is called for each chunk that brings tokens.
    """
    body = api.body(request)
    asked = _Asked(Timeline(time.perf_counter(), planned_s), api.stream, done, seen)
    client.begin_post(api.endpoint, body, asked.take, asked.end)
    return asked.timeline


async def ask(client: Client, api: Api, request: Request) -> Timeline:
    """Send one request and wait for the end of its answer."""
    ended: asyncio.Future[Timeline] = asyncio.get_running_loop().create_future()

    def done(timeline: Timeline) -> None:
        if not ended.done():
            ended.set_result(timeline)

    begin(client, api, request, done)
    return await ended


@dataclass(slots=True, eq=False)
class _Asked:
    """A request whose answer is followed."""

    timeline: Timeline
    stream: bool
    done: Callable[[Timeline], object]
    seen: Callable[[], None] | None
    is_complete: bool = False

    def take(self, data: bytes, at_s: float) -> None:
        """Take an event of the stream."""
        timeline = self.timeline
        if data == b"[DONE]":
            self.is_complete = True
            return
        chunk = decode(data)
        if chunk.get("error"):
            raise StreamFailed(f"stream: {_error_name(chunk['error'])}")
        for choice in chunk.get("choices") or ():
            if _brings_tokens(choice, not timeline.chunk_s):
                timeline.chunk_s.append(at_s)
                if self.seen:
                    self.seen()
                break
        _count(timeline, chunk)

    def end(self, outcome: HttpReply | Exception) -> None:
        """Take the reply, or the reason that there is none."""
        timeline = self.timeline
        if isinstance(outcome, HttpReply):
            timeline.end_s = outcome.end_s
            self._read(outcome)
        else:
            timeline.end_s, timeline.error = time.perf_counter(), _kind(outcome)
        if not timeline.error and not (self.is_complete and timeline.chunk_s):
            timeline.error = "stream without an end" if timeline.chunk_s else "no tokens came"
        timeline.num_output_tokens = timeline.num_output_tokens or len(timeline.chunk_s)
        self.done(timeline)

    def _read(self, reply: HttpReply) -> None:
        timeline = self.timeline
        if reply.status != 200:
            _read_refusal(timeline, reply)
        elif not self.stream:
            try:
                answer = decode(reply.body)
                if answer.get("error"):
                    timeline.error = f"reply: {_error_name(answer['error'])}"
                _count(timeline, answer)
            except (ValueError, AttributeError) as error:
                timeline.error = _kind(error)
            timeline.chunk_s.append(reply.end_s)
            self.is_complete = True


def _brings_tokens(choice: Mapping[str, Any], is_first: bool) -> bool:
    """Return True for text, calls or token ids, and for the end of an empty answer."""
    if choice.get("text") or choice.get("token_ids"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in _TEXTS) or (is_first and bool(choice.get("finish_reason")))


def _count(timeline: Timeline, chunk: Mapping[str, Any]) -> None:
    if usage := chunk.get("usage"):
        timeline.num_prompt_tokens = usage.get("prompt_tokens") or 0
        timeline.num_output_tokens = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        timeline.num_cached_tokens = details.get("cached_tokens") or 0
    if timings := chunk.get("timings"):
        timeline.num_drafted = timings.get("drafted_tokens") or 0
        timeline.num_accepted = timings.get("accepted_tokens") or 0
        timeline.decode_s = (timings.get("decode_ms") or 0.0) / 1e3
        timeline.drafting_saved_s = (timings.get("drafting_saved_ms") or 0.0) / 1e3


def _read_refusal(timeline: Timeline, reply: HttpReply) -> None:
    timeline.is_rejected = reply.status in FULL
    timeline.retry_after = reply.header("retry-after")
    try:
        name = _error_name(decode(reply.body)["error"])
    except (ValueError, LookupError, TypeError):
        name = "without an explanation"
    timeline.error = f"HTTP {reply.status} {name}"


def _error_name(error: Any) -> str:
    """Return the kind of an error, without the parts that differ from request to request."""
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or error.get("message"))[:60]
    return str(error)[:60]


def _kind(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    known = isinstance(error, StreamFailed | Lost | BadReply)
    return str(error) if known else f"{type(error).__name__}: {error}"[:80]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the server lists."""

    name: str
    max_model_len: int | None = None
    owner: str = ""  # the name of the engine, of those that give it


async def get(client: Client, path: str) -> HttpReply:
    """Return the reply to a GET, whatever its status. Raises Unusable if there is none."""
    try:
        return await client.get(path)
    except (OSError, UnicodeError, Lost, BadReply) as error:
        raise Unusable(f"no server answers: {_kind(error)}") from error


async def find_model(client: Client, wanted: str | None) -> ServedModel:
    """Return the first model of the list, or the one wanted. Raises Unusable."""
    reply = await get(client, "/v1/models")
    try:
        models = {entry["id"]: entry for entry in json.loads(reply.body)["data"]}
    except (ValueError, LookupError, TypeError) as error:
        raise Unusable(f"/v1/models is not a list of models (status {reply.status})") from error
    name = wanted or next(iter(models), "")
    if name not in models:
        known = ", ".join(map(quoted, models)) or "none"
        raise Unusable(f"the server has no model {quoted(name)}", f"its models: {known}")
    entry = models[name]
    return ServedModel(name, entry.get("max_model_len"), str(entry.get("owned_by")))


async def learn(client: Client, api: Api) -> PromptVocabulary:
    """Find out what prompts can be made of: token ids if the server has /tokenize, otherwise words.

    The number of tokens in a text of words is learned from the usage of two requests. Raises Unusable.
    """
    if not api.is_chat:
        text = json.dumps({"model": api.model, "prompt": " ".join(WORDS), "add_special_tokens": False})
        try:
            reply = await client.post("/tokenize", text.encode())
            if token_ids := tuple(sorted(set(json.loads(reply.body)["tokens"]))):
                return PromptVocabulary(token_ids)
        except (OSError, Lost, BadReply, ValueError, LookupError, TypeError):
            pass  # not every server has it, and some have another one
    counts = []
    for num_words in (SHORT_TEXT, LONG_TEXT):
        text = " ".join((WORDS * 2)[:num_words])
        timeline = await ask(client, api, Request(text, 1))
        if timeline.error or not timeline.num_prompt_tokens:
            raise Unusable(f"a first request failed: {timeline.error or 'it has no usage'}")
        counts.append(timeline.num_prompt_tokens)
    slope = (counts[1] - counts[0]) / (LONG_TEXT - SHORT_TEXT)
    if slope <= 0:
        raise Unusable(
            f"the server counts {counts[0]:,} tokens in {SHORT_TEXT} words, and {counts[1]:,} in {LONG_TEXT}",
            "its usage must count the tokens of prompts",
        )
    return PromptVocabulary((), slope, counts[0] - slope * SHORT_TEXT)
