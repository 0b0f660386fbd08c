"""One request of a mixture from its beginning to its end, whatever that is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field

from endurance.answers import Answer, Case
from quire.bench.http_client import Client, Lost
from quire.bench.http_reply import BadReply

ENGINE_DEAD = ("engine_dead", "server_error", "api_error")  # how streams say it, each in its API's words
GONE_S = 0.02  # who is gone before anything has come has stayed so long


@dataclass(slots=True, eq=False)
class Exchange:
    """A request on its way, and what has come of it. Times are of time.perf_counter."""

    case: Case
    begin_s: float = field(default_factory=time.perf_counter)
    first_s: float = 0.0
    end_s: float = 0.0
    num_events: int = 0
    answer: Answer = field(default_factory=Answer)
    problem: str = ""  # what is wrong with the answer
    hung: bool = False  # it had no end within the client's patience

    async def run(self, client: Client, patience_s: float = 120.0) -> None:
        """Ask, and judge the answer. Raises nothing: what goes wrong becomes the problem.

        Of patience, seconds are counted and not the clock asked: the whole machine may have stood still.
        """
        asking, seconds = asyncio.create_task(self._ask(client)), 0
        try:
            while not asking.done() and seconds < patience_s:
                await asyncio.wait((asking,), timeout=1.0)
                seconds += 1
            self.end_s, self.hung = time.perf_counter(), not asking.done()
            if self.hung:
                raise TimeoutError("it did not end")
            await asking
            self.problem = self.case.problem(self.answer)
        except (OSError, Lost, BadReply, ValueError, LookupError, TypeError, AttributeError) as error:
            self.answer, self.problem = Answer(), f"{type(error).__name__}: {error}"
        finally:
            asking.cancel()

    @property
    def ended_with_engine(self) -> bool:
        """The server reported that the engine died."""
        return self.answer.status == 503 or self.answer.error in ENGINE_DEAD

    async def _ask(self, client: Client) -> None:
        answer, case = self.answer, self.case
        if case.hang_up_at == 0:
            await self._leave(client)
            return
        reply = await client.post(case.path, case.body, self._take)
        answer.status, answer.hung_up = reply.status, reply.hung_up
        if reply.body:
            answer.body = json.loads(reply.body)

    def _take(self, data: bytes, at_s: float) -> bool:
        answer, at = self.answer, self.case.hang_up_at
        self.num_events += 1
        self.first_s = self.first_s or at_s
        if data == b"[DONE]":
            answer.num_done += 1
        else:
            event = json.loads(data)
            if error := event.get("error") or (event.get("response") or {}).get("error"):
                answer.error = str(error.get("code") or error.get("type"))
            else:
                answer.events.append(event)
        return at is not None and self.num_events >= at

    async def _leave(self, client: Client) -> None:
        sending = client.post(self.case.path, self.case.body, lambda _, __: None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(sending, GONE_S)
        self.answer.hung_up = True
