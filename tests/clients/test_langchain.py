"""langchain-openai's ChatOpenAI: answers, streams, tools, structured output, usage."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from server import Server

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix
langchain = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")
tools = pytest.importorskip("langchain_core.tools")
pydantic = pytest.importorskip("pydantic")

QUESTION = "Tell me a story about a dragon."


class Animal(pydantic.BaseModel):
    """Bounded on all sides, so that a toy comes to an end."""

    kind: Literal["fox", "owl"]
    legs: Literal[2, 4]


@tools.tool
def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"rain in {city}"


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(server: Server, request: pytest.FixtureRequest) -> Any:
    """Of either interface. Sampled, and the same each time."""
    options = {"use_responses_api": True} if request.param else {"seed": 5, "stream_usage": True}
    return langchain.ChatOpenAI(
        model="demo", base_url=f"{server.url}/v1", api_key="any", temperature=0, max_retries=0, **options
    )


def text_of(message: Any) -> str:
    found = message.text
    return found if isinstance(found, str) else found()


def test_an_answer_whole_and_streamed(model: Any) -> None:
    whole = model.invoke(QUESTION)
    assert text_of(whole)
    usage = whole.usage_metadata
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] > 20
    parts = list(model.stream(QUESTION))
    joined = parts[0]
    for part in parts[1:]:
        joined += part
    assert len(parts) > 2
    assert text_of(joined) == text_of(whole)
    assert joined.usage_metadata["output_tokens"] == usage["output_tokens"]


def test_many_at_once(model: Any) -> None:
    turns = [messages.SystemMessage("You tell stories."), messages.HumanMessage(QUESTION)]

    async def both() -> tuple[Any, str]:
        return await model.ainvoke(turns), "".join([text_of(part) async for part in model.astream(turns)])

    whole, streamed = asyncio.run(both())
    assert text_of(whole) == streamed


def test_tools(model: Any) -> None:
    bound = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    asked = [messages.HumanMessage("What is the weather in Oslo?")]
    called = bound.invoke(asked)
    (call,) = called.tool_calls
    assert call["args"]["city"] in ("Oslo", "Rome")
    told = get_weather.invoke(call)
    assert text_of(model.bind_tools([get_weather]).invoke([*asked, called, told])) is not None
    parts = list(bound.stream(asked))
    joined = parts[0]
    for part in parts[1:]:
        joined += part
    assert [one["args"] for one in joined.tool_calls] == [call["args"]]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: Any, method: str) -> None:
    found = model.with_structured_output(Animal, method=method).invoke(QUESTION)
    assert isinstance(found, Animal)


def test_logprobs(server: Server) -> None:
    model = langchain.ChatOpenAI(model="demo", base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    found = model.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    entries = found.response_metadata["logprobs"]["content"]
    assert len(entries[0]["top_logprobs"]) == 2


def test_errors(server: Server) -> None:
    model = langchain.ChatOpenAI(model="other", base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    with pytest.raises(Exception, match="model_not_found"):
        model.invoke(QUESTION)
