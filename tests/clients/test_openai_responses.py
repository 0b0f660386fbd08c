"""The openai package's responses: streams, schemas, tools and who runs them, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from server import Server

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

ASKED: Any = {"model": "demo", "input": "Tell me a story about a dragon.", "temperature": 0}


class Animal(pydantic.BaseModel):
    """Bounded on all sides, so that a toy comes to an end."""

    kind: Literal["fox", "owl"]
    legs: Literal[2, 4]


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_an_answer_whole_and_streamed(client: Any) -> None:
    whole = client.responses.create(**ASKED)
    with client.responses.stream(**ASKED) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text != ""
    assert final.usage.output_tokens == whole.usage.output_tokens
    chatted = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": ASKED["input"]}], temperature=0
    )
    assert chatted.choices[0].message.content == whole.output_text


def test_parse(client: Any) -> None:
    found = client.responses.parse(**ASKED, text_format=Animal)
    assert isinstance(found.output_parsed, Animal)
    with client.responses.stream(**ASKED, text_format=Animal) as stream:
        assert stream.get_final_response().output_parsed == found.output_parsed


@pytest.mark.parametrize("streams", [False, True])
def test_tools(client: Any, streams: bool) -> None:
    tools = [openai.pydantic_function_tool(GetWeather)["function"] | {"type": "function"}]
    asked = ASKED | {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    if streams:
        with client.responses.stream(**asked) as stream:
            found = stream.get_final_response()
    else:
        found = client.responses.parse(**asked)
    (call,) = [item for item in found.output if item.type == "function_call"]
    assert "city" in call.arguments
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    turns = [{"role": "user", "content": ASKED["input"]}, *found.output, told]
    again = client.responses.create(**asked | {"input": turns, "tool_choice": "none"})
    assert again.output_text


def test_the_package_runs_tools(client: Any) -> None:
    """Of the newer line."""
    runner = pytest.importorskip("openai.lib.responses_tool_runner")
    heard = []

    def get_weather(arguments: GetWeather) -> str:
        heard.append(arguments.city)
        return "rain " * 20

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")["function"]
    known = runner.RegisteredFunction({"type": "function", **tool}, lambda a: get_weather(GetWeather(**a)))
    asked = {"model": "demo", "input": "What is the weather in Oslo?", "temperature": 0}
    turns = runner.ResponsesToolRunner(functions=[known]).iterate(client, asked, max_steps=3)
    first, second = (turn.response for turn, _ in zip(turns, range(2), strict=False))
    assert heard == ["Oslo"]
    assert first.usage.input_tokens + 20 < second.usage.input_tokens
    turns.close()


def test_many_at_once(server: Server) -> None:
    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as own:

            async def streamed() -> str:
                async with own.responses.stream(**ASKED) as stream:
                    return (await stream.get_final_response()).output_text

            async def whole() -> str:
                return (await own.responses.create(**ASKED)).output_text

            return await asyncio.gather(*(ask() for ask in [streamed, whole] * 8))

    assert len(set(asyncio.run(all_of_them()))) == 1


def test_what_is_kept_nowhere(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASKED, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.APIStatusError) as missing:
        client.responses.retrieve("resp_1")
    assert missing.value.status_code == 404
