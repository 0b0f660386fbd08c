"""Blocks that one engine's process computed are used by another one, with the same bits."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from remote_engines import DEMO, follow, local, request, run, running

from quire.engine.client import Stream
from quire.engine.open_request import OpenRequest
from quire.engine.request import prompt_hashes
from quire.server.remote import RemoteEngine
from quire.transfer.parcels import AnyParcel, InlineParcel, SharedParcel
from quire.types import Output

PROMPT = tuple(range(3, 163))
ASKED = request("moved", *PROMPT, max_tokens=12, logprobs=2, temperature=1)


async def read(engine: RemoteEngine, shared: bool) -> list[AnyParcel]:
    """The blocks of the prompt that an engine has."""
    arrived: asyncio.Queue[AnyParcel | None] = asyncio.Queue()
    engine.read_blocks("a read", prompt_hashes(ASKED, DEMO.block_size), shared, arrived.put_nowait)
    found = []
    while (parcel := await asyncio.wait_for(arrived.get(), 10)) is not None:
        found.append(parcel)
    return found


async def answered(engine: RemoteEngine, parcels: list[AnyParcel]) -> list[Output]:
    own = OpenRequest(replace(ASKED, arrival_s=time.monotonic()), engine)
    own.brought = parcels
    engine.adopt(own)
    return await follow(Stream(own))


def joined(outputs: list[Output]) -> tuple[object, ...]:
    tokens = tuple(token for output in outputs for token in output.token_ids)
    return tokens, tuple(one for output in outputs for one in output.logprobs), outputs[-1].finish_reason


@pytest.mark.parametrize("shared", [False, True])
def test_blocks_move_between_processes(shared: bool) -> None:
    expected = joined(local(DEMO, [ASKED])["moved"])

    async def check() -> None:
        async with running(DEMO) as first, running(DEMO) as second:
            assert await read(first, shared) == []
            await follow(first.submit(replace(ASKED, request_id="prefill")))
            parcels = await read(first, shared)
            assert {type(one) for one in parcels} == {SharedParcel if shared else InlineParcel}
            assert sum(len(one.hashes) for one in parcels) == len(PROMPT) // DEMO.block_size - 1
            outputs = await answered(second, parcels)
            assert joined(outputs) == expected
            assert outputs[-1].num_cached_tokens == len(PROMPT) - DEMO.block_size
            again = await answered(first, [])
            assert joined(again) == expected

    run(check())


def test_blocks_of_another_engine_are_computed_instead() -> None:
    other = replace(DEMO, kv_cache_dtype="float16")
    expected = joined(local(DEMO, [ASKED])["moved"])

    async def check() -> None:
        async with running(other) as first, running(DEMO) as second:
            await follow(first.submit(replace(ASKED, request_id="prefill")))
            parcels = await read(first, False)
            assert parcels
            outputs = await answered(second, parcels)
            assert joined(outputs) == expected
            assert outputs[-1].num_cached_tokens == 0

    run(check())


def test_a_read_ends_with_its_engine() -> None:
    async def check() -> None:
        async with running(DEMO) as engine:
            await follow(engine.submit(ASKED))
            assert engine._child is not None
            arrived: asyncio.Queue[AnyParcel | None] = asyncio.Queue()
            engine._child.process.kill()
            engine.read_blocks("a read", prompt_hashes(ASKED, DEMO.block_size), False, arrived.put_nowait)
            while await asyncio.wait_for(arrived.get(), 10) is not None:
                pass

    run(check())
