"""AsyncLLM on the demo model: what LLM gives, and every way in which a request may end early."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.errors import ConfigError, EngineDead, RequestError
from quire.outputs import CompletionOutput, RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=2, max_tokens=900, ignore_eos=True)
STORY = [{"role": "user", "content": "Tell me a story."}]
LIMIT_S = 60.0  # no test waits longer for anything


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = AsyncLLM("demo")
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def blocking() -> Iterator[LLM]:
    with LLM("demo") as made:
        yield made


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


async def last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    async for output in outputs:
        final = output
    assert final.finished
    return final


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def freed(llm: AsyncLLM) -> None:
    """Wait until nothing runs; all blocks are free then."""
    scheduler = llm.engine.scheduler
    await until(lambda: not (scheduler.num_running or scheduler.num_waiting or llm.engine.has_work))
    scheduler.check()
    assert scheduler.num_free_blocks == llm._client.status.num_blocks


@pytest.fixture
def slow(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLM]:
    """Steps that take a while: a long request does not end by itself, and must not run to its end."""
    step, begin = llm.engine.step, llm._client.status.steps
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.01), step())[1])
    yield llm
    assert 0 < llm._client.status.steps - begin < 500


def gist(choice: CompletionOutput) -> tuple[Any, ...]:
    """All that does not depend on the time, floats by their bits."""
    logprobs = [
        (i, p.logprob.hex(), p.rank) for position in choice.logprobs or () for i, p in position.items()
    ]
    return choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason, logprobs


def test_tasks_get_what_llm_gives(llm: AsyncLLM, blocking: LLM) -> None:
    prompts = [f"Tell me a story about {number} birds." for number in range(10)]
    params = [
        SamplingParams(
            temperature=i % 3 / 2, seed=i, max_tokens=8 + i, logprobs=2, n=1 + (i == 5), stop=["the"]
        )
        for i in range(10)
    ]
    expected = blocking.generate(prompts, params, use_tqdm=False)

    async def check() -> None:
        steps = llm._client.status.steps
        asked = (llm.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True))
        found = await asyncio.gather(*map(last, asked))
        for one, other in zip(expected, found, strict=True):
            assert list(map(gist, one.outputs)) == list(map(gist, other.outputs))
            assert one.prompt_token_ids == other.prompt_token_ids
        assert llm._client.status.steps - steps < 40  # they ran together
        await freed(llm)

    run(check())


def test_a_conversation_comes_in_pieces(llm: AsyncLLM, blocking: LLM) -> None:
    expected = blocking.chat(STORY, GREEDY, use_tqdm=False)[0].outputs[0].text

    async def check() -> None:
        text, lengths = "", list[int]()
        async for output in llm.chat(STORY, GREEDY):
            text += output.outputs[0].delta
            lengths.append(len(output.outputs[0].token_ids))
            assert text == output.outputs[0].text
        assert text == expected
        assert output.finished
        assert lengths == sorted(set(lengths))

    run(check())


def test_requests_without_seed_are_numbered_as_those_of_llm() -> None:
    params = SamplingParams(temperature=1.5, max_tokens=16, ignore_eos=True)
    with LLM("demo", seed=3) as llm:
        expected = [output.outputs[0].text for output in llm.chat([STORY] * 4, params, use_tqdm=False)]

    async def check() -> None:
        async with AsyncLLM("demo", seed=3) as other:
            found = await asyncio.gather(*(last(other.chat(STORY, params)) for _ in range(4)))
        assert [output.outputs[0].text for output in found] == expected

    run(check())
    assert len(set(expected)) > 1


def test_a_cancelled_task_frees_its_blocks(slow: AsyncLLM) -> None:
    async def check() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in slow.generate("Tell me a story.", LONG):
                begun.set()

        tasks = [asyncio.create_task(read()) for _ in range(3)]
        await begun.wait()
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        await freed(slow)

    run(check())


def test_leaving_the_loop_frees_its_blocks(slow: AsyncLLM) -> None:
    async def check() -> None:
        async for _ in slow.generate("Tell me a story.", LONG):
            break
        await freed(slow)
        kept = slow.generate("Tell me a story.", LONG)
        await anext(kept)
        assert slow.engine.has_work
        await kept.aclose()
        await freed(slow)

    run(check())


def test_an_exception_of_the_reader_frees_its_blocks(slow: AsyncLLM) -> None:
    async def check() -> None:
        async def read() -> None:
            async for output in slow.generate("Tell me a story.", LONG):
                len(output.outputs) // 0

        with pytest.raises(ZeroDivisionError):
            await read()
        await freed(slow)

    run(check())


def test_an_abandoned_reader_frees_its_blocks(slow: AsyncLLM) -> None:
    async def check() -> None:
        dropped = slow.generate("Tell me a story.", LONG)
        await anext(dropped)
        del dropped
        gc.collect()
        await freed(slow)

    async def left() -> None:
        await anext(slow.generate("Tell me a story.", LONG))

    run(check())
    run(left())  # the end of the event loop ends it
    run(freed(slow))


def test_abort_by_name(slow: AsyncLLM) -> None:
    async def check() -> None:
        outputs = slow.generate("Tell me a story.", LONG, "mine")
        assert (await anext(outputs)).request_id == "mine"
        await slow.abort("mine")
        await slow.abort("another")
        final = await last(outputs)
        assert final.outputs[0].finish_reason == "abort"
        await freed(slow)

    run(check())


@pytest.mark.parametrize(
    ("prompt", "params", "name", "message"),
    [
        ([5] * 5000, GREEDY, None, "your prompt has 5000 tokens"),
        ([10**9], GREEDY, None, "not in the vocabulary"),
        ({"text": "hi"}, GREEDY, None, "unknown prompt field 'text'"),
        ("hi", "greedy", None, "sampling_params is a str"),
        ("hi", [GREEDY], None, "sampling_params is a list"),
        ("hi", GREEDY, 7, "request_id is a int"),
        ("hi", GREEDY, "open", "request id 'open' is in use"),
    ],
)
def test_a_wrong_request_is_refused_before_its_first_token(
    slow: AsyncLLM, prompt: Any, params: Any, name: Any, message: str
) -> None:
    async def check() -> None:
        other = slow.generate("Hello!", LONG, "open")
        await anext(other)
        with pytest.raises(RequestError, match=message):
            await anext(slow.generate(prompt, params, name))
        assert not (await anext(other)).finished
        await other.aclose()
        await freed(slow)

    run(check())
    with pytest.raises(RequestError, match="no messages"):
        slow.chat([])


def test_a_priority_that_is_no_number_is_refused(llm: AsyncLLM) -> None:
    rank: Any = "first"

    async def check() -> None:
        with pytest.raises(RequestError, match="priority = 'first' is of the wrong type"):
            await anext(llm.generate("Hello!", GREEDY, priority=rank))

    run(check())


def test_a_death_ends_every_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ArithmeticError("a broken kernel")

    async def check() -> None:
        async with AsyncLLM("demo", device="null") as llm:
            readers = [llm.generate("Hello!", LONG) for _ in range(3)]
            for reader in readers:
                await anext(reader)
            monkeypatch.setattr(llm.engine, "_step", fails)
            ends = await asyncio.gather(*map(last, readers), return_exceptions=True)
            assert [type(end) for end in ends] == [EngineDead] * 3
            assert all("ArithmeticError: a broken kernel" in str(end) for end in ends)
            for reader in readers:
                with pytest.raises(StopAsyncIteration):
                    await anext(reader)
            with pytest.raises(EngineDead, match="a broken kernel"):
                await anext(llm.generate("Hello!", GREEDY))

    run(check())


def test_nothing_runs_after_close() -> None:
    async def check() -> None:
        llm = await asyncio.to_thread(AsyncLLM, "demo", device="null")
        reader = llm.generate("Hello!", LONG)
        await anext(reader)
        await llm.close()
        with pytest.raises(EngineDead, match="the engine was stopped"):
            await last(reader)
        with pytest.raises(EngineDead, match="the engine is stopped"):
            await anext(llm.generate("Hello!", GREEDY))

    before = set(threading.enumerate())
    run(check())
    ours = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("quire")]
    for thread in ours:
        thread.join(30)  # of texts: it was told to end, and nobody waits for it
    assert not [thread for thread in ours if thread.is_alive()]


def test_requests_that_are_not_encoded_yet_end_at_close() -> None:
    """They are told like the others; nobody has cancelled their tasks."""

    async def check() -> None:
        llm = await asyncio.to_thread(AsyncLLM, "demo", device="null")
        busy = threading.Event()
        llm._text.submit(busy.wait, LIMIT_S)
        asked = [asyncio.ensure_future(anext(llm.generate("Hello!", GREEDY))) for _ in range(2)]
        await asyncio.sleep(0)
        await llm.close()
        busy.set()
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDead] * 2

    run(check())


def test_a_request_can_be_aborted_before_it_is_encoded() -> None:
    async def check() -> None:
        async with AsyncLLM("demo", device="null") as llm:
            busy = threading.Event()
            llm._text.submit(busy.wait, LIMIT_S)
            early = asyncio.ensure_future(last(llm.generate("Hello!", LONG, "early")))
            await asyncio.sleep(0)
            await llm.abort("early")
            busy.set()
            assert (await early).outputs[0].finish_reason == "abort"
            again = await last(llm.generate("Hello!", GREEDY, "early"))
            assert again.outputs[0].finish_reason == "length"

    run(check())


def test_a_model_that_nobody_holds_is_gone() -> None:
    before = set(threading.enumerate())
    llm = AsyncLLM("demo", device="null")
    (engine,) = [thread for thread in set(threading.enumerate()) - before if thread.name == "quire-engine"]
    del llm
    gc.collect()
    engine.join(LIMIT_S)
    assert not engine.is_alive()


def test_what_cannot_be_loaded_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="choose one of 'int8', 'int4'"):
        AsyncLLM("demo", quantization="int5")


def test_a_program_may_end_while_its_requests_run() -> None:
    code = """
import asyncio, quire
async def main():
    llm = quire.AsyncLLM("demo")
    async for _ in llm.generate("Hello!", quire.SamplingParams(max_tokens=900, ignore_eos=True)):
        keep.append(llm)
        return print("left")
keep = []
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")
