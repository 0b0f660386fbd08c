"""A visit to the page without a browser: what there is to see of a server, recorded."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any

from quire.errors import QuireError
from quire.experiments.parameters import PARAMETERS

CONVERSATION = (
    "Tell me a story about a fox and a lantern.",
    "What is 3 + 4?",
    "Tell me the story about a fox and a lantern again, word for word.",
)
NUM_ANSWER = 160  # tokens of an answer, at most
TRIED = (32, 64, 128, 256, 512, 768, 960)  # tokens of prompts
NUM_TRIED = 32  # tokens of their answers
AGAIN = 512  # tokens of the prompt that is sent again, when it is cached
ALIKE, NUM_ALIKE = 200, 192  # tokens that two prompts begin with, and of their answers
TAIL = 12  # tokens that end each of them
TOGETHER = 8  # requests that begin one shortly after the other, and are computed together
REPLIES = ("/props", "/server_info", "/steps?last=4096", "/steps/law")
NOISE = {"temperature": 2, "seed": 1}  # nothing repeats in it, so that drafts do not end it at once
PAUSE_S = 0.8  # between two requests, so that a viewer can tell them apart
STAGGER_S = 0.03
POLL_S, TIMEOUT_S = 0.05, 120.0
Say = Callable[[str], None]


@dataclass(slots=True)
class Answer:
    """An answer as a client saw it, as the page notes its own. Times are on the clock of the frames.

    `kind`: of the conversation ("chat"), or to random tokens, computed "alone" or "together" with others, or
    to one of two prompts that begin "alike".
    """

    kind: str
    tag: str | None
    sent_s: float
    token_s: list[float] = field(default_factory=list)
    timings: dict[str, Any] | None = None
    prompt: str = ""  # of the conversation, as are `text` and what was drafted for each step of it
    text: str = ""
    drafting: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class RecordedVisit:
    """The content of the page: frames of events, replies by path, answers, and the lines of experiments."""

    frames: list[dict[str, Any]]
    replies: dict[str, Any]
    answers: list[Answer]
    experiments: dict[str, list[dict[str, Any]]]


class Visitor:
    """A client of one server, which watches its events from the beginning. Times are of time.monotonic."""

    def __init__(self, url: str, key: str = "") -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.frames: list[tuple[float, dict[str, Any]]] = []  # with the times of their arrival
        events = self._open("/page/events")
        self._take(events.readline())
        threading.Thread(target=self._watch, args=(events,), daemon=True).start()

    def _watch(self, events: HTTPResponse) -> None:
        with events, contextlib.suppress(OSError, HTTPException):  # until the server ends
            for line in events:
                self._take(line)

    def _take(self, line: bytes) -> None:
        self.frames.append((time.monotonic(), json.loads(line)))

    def _open(self, path: str, body: object = None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            reply: HTTPResponse = self._opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise QuireError(f"the server refused {path}: {_message(error.read())}") from None
        except OSError as error:
            raise QuireError(f"the server does not answer {path}: {error}") from None
        return reply

    def get(self, path: str) -> bytes:
        with self._open(path) as reply:
            return reply.read()

    def ask(self, kind: str, path: str, body: dict[str, Any], begun: threading.Event | None = None) -> Answer:
        """Return the answer to a request, which is streamed; set `begun` when its first text is there."""
        sent_s = time.monotonic()
        with self._open(path, {**body, "stream": True}) as reply:
            answer = Answer(kind, reply.headers["x-quire-tag"], sent_s)
            for chunk in _events(reply):
                choice: dict[str, Any] = (chunk["choices"] or [{}])[0]
                if "drafting" in choice:
                    answer.drafting.append(choice["drafting"])
                text = choice.get("text") or choice.get("delta", {}).get("content")
                if text:
                    answer.text += text if kind == "chat" else ""
                    answer.token_s.append(time.monotonic())
                    if begun is not None:
                        begun.set()
                answer.timings = chunk.get("timings") or answer.timings
        return answer

    def frames_until_idle(self) -> list[tuple[float, dict[str, Any]]]:
        """Return the frames up to where the last step has ended, and nothing is held in the cache any more.

        Raises QuireError if that does not come.
        """
        (last,) = json.loads(self.get("/steps?last=1"))["steps"]
        end_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end_s:
            frames, latest = list(self.frames), dict[str, Any]()
            for _, frame in frames:
                latest |= {name: value for name, value in frame.items() if value}
            idle = latest["counts"]["num_running"] == latest["cache"]["groups"][0]["num_held"] == 0
            if idle and latest["steps"][-1]["index"] == last["index"]:
                return frames
            time.sleep(POLL_S)
        raise QuireError("the server's events do not tell of its last step")

    def experiment(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of an experiment with its default parameters."""
        with self._open(f"/page/experiments/{name}", {}) as reply:
            lines = [json.loads(line) for line in reply]
        if not lines or "done" not in lines[-1]:
            raise QuireError(f"the experiment {name} failed: {lines[-1:]}")
        return lines


def _events(lines: Iterator[bytes] | HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the chunks of an event stream. Raises QuireError for one with an error."""
    for line in lines:
        data = line.strip().removeprefix(b"data: ")
        if line.startswith(b"data: ") and data != b"[DONE]":
            chunk = json.loads(data)
            if "error" in chunk:
                raise QuireError(f"the server failed: {chunk['error']['message']}")
            yield chunk


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return "it gave no reason"


def visit(url: str, key: str, last: Callable[[Visitor], None], say: Say) -> RecordedVisit:
    """Do what the chapters invite to do, and return what there was to see.

    `last` is called when the requests have ended, before the experiments. Raises QuireError where the server
    does not do its part.
    """
    visitor = Visitor(url, key)
    say("recording a conversation")
    answers = [*_converse(visitor), *_try_prompts(visitor)]
    frames = visitor.frames_until_idle()
    replies = {path.split("?")[0]: json.loads(visitor.get(path)) for path in REPLIES}
    last(visitor)
    experiments = {}
    for number, name in enumerate(PARAMETERS, 1):
        say(f"recording the experiment {name} ({number} of {len(PARAMETERS)})")
        experiments[name] = visitor.experiment(name)
    begin_s = min(arrival_s - frame["t"] for arrival_s, frame in frames)
    for answer in answers:
        answer.sent_s -= begin_s
        answer.token_s = [moment - begin_s for moment in answer.token_s]
    return RecordedVisit([frame for _, frame in frames], replies, answers, experiments)


def _converse(visitor: Visitor) -> Iterator[Answer]:
    messages: list[dict[str, str]] = []
    for prompt in CONVERSATION:
        messages.append({"role": "user", "content": prompt})
        options = {"include_drafting": True}
        body = {"messages": messages, "max_tokens": NUM_ANSWER, "stream_options": options}
        answer = visitor.ask("chat", "/v1/chat/completions", {**body, "temperature": 0})
        messages.append({"role": "assistant", "content": answer.text})
        answer.prompt = prompt
        yield answer
        time.sleep(PAUSE_S)


def _try_prompts(visitor: Visitor) -> Iterator[Answer]:
    """Send prompts of random tokens: one after the other, two that begin alike, several together."""
    vocab_size = visitor.frames[0][1]["facts"]["model"]["vocab_size"]
    chance = random.Random(0)

    def prompt(num_tokens: int) -> list[int]:
        return chance.choices(range(16, vocab_size), k=num_tokens)

    def ask(
        kind: str,
        ids: Sequence[int],
        num_tokens: int,
        delay_s: float = 0.0,
        begun: threading.Event | None = None,
    ) -> Answer:
        time.sleep(delay_s)
        body = {"prompt": ids, "max_tokens": num_tokens, "ignore_eos": True}
        return visitor.ask(kind, "/v1/completions", {**body, **NOISE}, begun)

    prompts = {length: prompt(length) for length in TRIED}
    for length in (*TRIED, AGAIN):
        yield ask("alone", prompts[length], NUM_TRIED)
        time.sleep(PAUSE_S)
    shared, begun = prompt(ALIKE), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, "alike", shared + prompt(TAIL), NUM_ALIKE, begun=begun)
        first.add_done_callback(lambda _: begun.set())
        begun.wait()
        second = ask("alike", shared + prompt(TAIL), NUM_ALIKE)
        yield from (first.result(), second)
    time.sleep(PAUSE_S)
    with ThreadPoolExecutor(TOGETHER) as pool:
        asked = []
        for number in range(TOGETHER):
            ids, num_tokens = prompt(chance.randrange(32, 256)), chance.randrange(32, 96)
            asked.append(pool.submit(ask, "together", ids, num_tokens, STAGGER_S * number))
        yield from (one.result() for one in asked)
