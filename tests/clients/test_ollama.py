"""The ollama package: answers, streams, tools and who runs them, formats, what it asks of models, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from server import Server

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix
ollama = pytest.importorskip("ollama")
pydantic = pytest.importorskip("pydantic")

STORY: Any = [{"role": "user", "content": "Tell me a story about a dragon."}]
GREEDY: Any = {"temperature": 0, "num_predict": 60}


class Animal(pydantic.BaseModel):
    """Bounded on all sides, so that a toy comes to an end."""

    kind: Literal["fox", "owl"]
    legs: Literal[2, 4]


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: which one
    """
    return "rain " * 20


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with ollama.Client(server.url) as client:
        yield client


def test_an_answer_whole_and_streamed(client: Any) -> None:
    whole = client.chat("demo", STORY, options=GREEDY)
    parts = [*client.chat("demo", STORY, options=GREEDY, stream=True)]
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert (parts[-1].done_reason, parts[-1].eval_count) == (whole.done_reason, whole.eval_count)
    assert whole.eval_count / whole.eval_duration > 0
    generated = client.generate("demo", STORY[0]["content"], options=GREEDY)
    assert generated.response == whole.message.content
    streamed = client.generate("demo", STORY[0]["content"], options=GREEDY, stream=True)
    assert "".join(part.response for part in streamed) == whole.message.content


def test_the_package_describes_and_runs_tools(client: Any) -> None:
    turns: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    first = client.chat("demo", turns, tools=[get_weather], options=GREEDY)
    (call,) = first.message.tool_calls
    said = get_weather(**call.function.arguments)
    turns += [first.message, {"role": "tool", "content": said, "tool_name": call.function.name}]
    second = client.chat("demo", turns, tools=[get_weather], options=GREEDY)
    assert second.prompt_eval_count > first.prompt_eval_count + 20


def test_a_format(client: Any) -> None:
    found = client.chat("demo", STORY, format=Animal.model_json_schema(), options=GREEDY)
    assert Animal.model_validate_json(found.message.content)


def test_logprobs(client: Any) -> None:
    found = client.chat("demo", STORY, logprobs=True, top_logprobs=2, options=GREEDY)
    assert len(found.logprobs) == found.eval_count
    assert len(found.logprobs[0].top_logprobs) == 2


def test_models(client: Any) -> None:
    names = [model.model for model in client.list().models]
    assert "demo:latest" in names
    assert client.show(names[0]).capabilities == ["completion", "tools"]
    assert client.ps().models[0].context_length == 1024
    assert client.chat("demo:latest", []).done_reason == "load"


def test_many_at_once(server: Server) -> None:
    async def all_of_them() -> set[str]:
        async with ollama.AsyncClient(server.url) as own:
            found = await asyncio.gather(*(own.chat("demo", STORY, options=GREEDY) for _ in range(8)))
        return {one.message.content for one in found}

    assert len(asyncio.run(all_of_them())) == 1


def test_errors(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="not served") as caught:
        client.chat("other", STORY)
    assert caught.value.status_code == 404
    assert client.chat("demo", STORY, options={**GREEDY, "num_ctx": 1 << 20}).done
    with pytest.raises(ollama.ResponseError, match="think"):
        next(client.generate("demo", "Hi", think=True, stream=True))
    with pytest.raises(ollama.ResponseError, match="gives no embeddings") as caught:
        client.embed("demo", "Hi")
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="not supported") as caught:
        client.pull("demo")
    assert caught.value.status_code == 501
