"""The server under test: what it serves, the prompts it takes, and runs of load on it."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from quire.bench.driver import Done, LoadRun, Progress, drive
from quire.bench.http_client import Client
from quire.bench.load import LoadOptions, injected_requests, load_requests
from quire.bench.openai_api import Api, ServedModel, Unusable, ask, begin, find_model, learn
from quire.bench.saturation import SaturationWatch
from quire.bench.workload import PromptVocabulary, Request

ENGINES_WITH_IGNORE_EOS = ("quire", "vllm", "sglang")  # by the owner of their models
WARM_UP_TOKENS, WARM_UP_OUTPUT = 64, 8


@dataclass
class Target:
    """A server that has answered a first request."""

    client: Client
    model: ServedModel
    words: PromptVocabulary
    api: Api

    @classmethod
    async def connect(cls, client: Client, load: LoadOptions, name: str | None = None) -> Target:
        """Find the model and learn what prompts can be made of. Raises Unusable."""
        model = await find_model(client, name)
        ignore_eos = model.owner in ENGINES_WITH_IGNORE_EOS if load.ignore_eos is None else load.ignore_eos
        extra = {"temperature": load.temperature} | ({"ignore_eos": True} if ignore_eos else {})
        api = Api(load.endpoint, model.name, not load.no_stream, extra | dict(load.extra_body))
        return cls(client, model, await learn(client, api), api)

    async def settle(self) -> None:
        """Send one short request and wait for its answer. Raises Unusable."""
        request = Request(self.words.draw([(WARM_UP_TOKENS, secrets.token_hex(4))]), WARM_UP_OUTPUT)
        if error := (await ask(self.client, self.api, request)).error:
            raise Unusable(f"a first request failed: {error}")

    async def alone(self, load: LoadOptions, count: int) -> LoadRun:
        """Send the first requests of a load one after the other."""
        requests = load_requests(load, self.words, secrets.token_hex(4), self.model.max_model_len)
        few = list(islice(requests, count))
        return await self._drive(few, Progress(count, None, "alone "), is_open=False, max_concurrency=1)

    async def run(self, load: LoadOptions, label: str = "", *, may_stop: bool = False) -> LoadRun:
        """Send a load and return when all answers have ended. Prompts are new, so none is cached from before.

        With `may_stop` the run ends early when it is certain that the server is saturated. Raises ConfigError
        for a file of requests that cannot be used.
        """
        salt = secrets.token_hex(4)
        requests = load_requests(load, self.words, salt, self.model.max_model_len)
        total = len(requests) if isinstance(requests, Sequence) else None
        return await self._drive(
            requests,
            Progress(total, load.duration, label),
            is_open=load.is_open,
            max_concurrency=load.max_concurrency,
            until_s=load.duration,
            injected=injected_requests(load, self.words, salt),
            may_stop=may_stop,
        )

    async def _drive(
        self, requests: Iterable[Request], progress: Progress, *, may_stop: bool = False, **how: Any
    ) -> LoadRun:
        watch = SaturationWatch(self.client) if may_stop else None

        def send(request: Request, planned_s: float | None, done: Done) -> None:
            timeline = begin(self.client, self.api, request, done, planned_s, progress.chunk)
            if watch:
                watch.timelines.append(timeline)

        gc.collect()
        gc.freeze()  # collections during the run need not visit the objects made before
        try:
            return await drive(requests, send, progress, watch=watch, **how)
        finally:
            gc.unfreeze()
