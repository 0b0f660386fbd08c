"""Engines in processes of their own, for tests: requests, what they should give, and following streams."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from quire import SamplingParams
from quire.build import build
from quire.config import EngineConfig
from quire.engine.client import Stream
from quire.server.remote import RemoteEngine, RestartPolicy
from quire.types import NewRequest, Output

DEMO = EngineConfig(model="demo", max_model_len=512, max_num_seqs=16)
NULL = EngineConfig(model="demo", device="null", max_model_len=512, max_num_seqs=16, speculative="off")
QUICK = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.01, max_deaths=100)
LIMIT_S = 120.0  # no test waits longer for anything, on a machine that has other work


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 2 * LIMIT_S))


def request(name: str, *prompt: int, arrival_s: float | None = None, **params: Any) -> NewRequest:
    """A request that runs to max_tokens (16), greedy unless told otherwise."""
    params = {"temperature": 0, "seed": 1, "detokenize": False, **params}
    now = time.monotonic() if arrival_s is None else arrival_s
    return NewRequest(name, prompt or (5, 6, 7), SamplingParams(**params), now)


def faulty(step_ms: float = 5) -> tuple[str, ...]:
    """The command of an engine whose prompts may make it fail, see faulty_engine.py."""
    return (sys.executable, str(Path(__file__).with_name("faulty_engine.py")), str(step_ms))


@asynccontextmanager
async def running(config: EngineConfig = NULL, **options: Any) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(config, **{"policy": QUICK, **options})
    await engine.start()
    try:
        yield engine
    finally:
        await asyncio.wait_for(engine.close(), LIMIT_S)


async def follow(stream: Stream, num_sequences: int = 1) -> list[Output]:
    """All outputs of a request."""
    outputs: list[Output] = []
    while sum(output.finish_reason is not None for output in outputs) < num_sequences:
        outputs += await asyncio.wait_for(stream.get(), LIMIT_S)
    return outputs


async def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> float:
    """Wait for a condition; how long it took."""
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begin_s < limit_s, "waited in vain"
        await asyncio.sleep(0.002)
    return time.monotonic() - begin_s


def local(config: EngineConfig, requests: Iterable[NewRequest]) -> dict[str, list[Output]]:
    """What the engine gives in this process, by request."""
    engine = build(config).engine
    outputs: dict[str, list[Output]] = {}
    for one in requests:
        engine.add(one)
        outputs[one.request_id] = []
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def gist(outputs: Iterable[Output]) -> dict[int, Any]:
    """By sequence, all that does not depend on the time or on which step brought it; floats by their bits."""
    sequences: dict[int, Any] = {}
    for output in outputs:
        tokens, logprobs, prompt, _ = sequences.setdefault(output.sequence, ([], [], [], None))
        tokens += output.token_ids
        logprobs += [(t.token_id, t.logprob.hex(), t.rank) for p in output.logprobs for t in p]
        prompt += [(t.token_id, t.logprob.hex(), t.rank) for p in output.prompt_logprobs for t in p]
        ending = (output.finish_reason, output.stop_reason, output.error)
        sequences[output.sequence] = (tokens, logprobs, prompt, ending)
    return sequences


def exists(pid: int) -> bool:
    """True while there is such a process, a zombie too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def runs(pid: int) -> bool:
    """True while there is such a process and it is no zombie (of a parent that is not this process)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))
