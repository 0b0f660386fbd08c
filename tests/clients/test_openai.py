"""The openai package against the server: answers, streams, tools, schemas and errors by its own types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from server import Server

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

STORY: Any = [{"role": "user", "content": "Tell me a story about a dragon."}]
SEEDED: Any = {"model": "demo", "seed": 5, "temperature": 1.0}


class Animal(pydantic.BaseModel):
    """Bounded on all sides, so that a toy comes to an end."""

    kind: Literal["fox", "owl"]
    legs: Literal[2, 4]
    tame: bool


class GetWeather(pydantic.BaseModel):
    """The weather of a place."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_models(client: Any) -> None:
    cards = list(client.models.list())
    assert cards[0].id == "demo"
    assert cards[0].max_model_len == 1024  # read by clients, though the package does not know it
    assert client.models.retrieve("demo") == cards[0]


def test_predicted_outputs(client: Any) -> None:
    """As its guide sends them: the answer is the same, and the usage tells how good the prediction was."""
    asked = {"messages": STORY, "max_tokens": 60, **SEEDED}
    plain = client.chat.completions.create(**asked)
    text = plain.choices[0].message.content
    found = client.chat.completions.create(**asked, prediction={"type": "content", "content": text})
    assert found.choices[0].message.content == text
    details = found.usage.completion_tokens_details
    assert 30 < details.accepted_prediction_tokens <= found.usage.completion_tokens == 60
    assert details.rejected_prediction_tokens < 30
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_chat_whole_and_streamed(client: Any) -> None:
    asked = {"messages": STORY, "n": 2, "logprobs": True, "top_logprobs": 3, "max_tokens": 30, **SEEDED}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 60
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert [c.finish_reason for c in own[-2:]] == [None, choice.finish_reason]
        entries = [entry for c in own if c.logprobs for entry in c.logprobs.content]
        assert entries == choice.logprobs.content
        assert len(entries) == 30
        spelled = b"".join(bytes(entry.bytes) for entry in entries)
        assert spelled.decode(errors="replace").startswith(choice.message.content.rstrip("\ufffd"))
        assert all(entry.logprob <= entry.top_logprobs[0].logprob for entry in entries)


def test_the_helper_of_streams(client: Any) -> None:
    """It puts chunks together by its own rules."""
    asked = {"messages": STORY, "logprobs": True, "stop": ".", **SEEDED}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
    assert "".join(e.delta for e in events if e.type == "content.delta") == whole.choices[0].message.content
    final = stream.get_final_completion().choices[0]
    assert final.message.content == whole.choices[0].message.content
    assert final.logprobs.content == whole.choices[0].logprobs.content


def test_completions(client: Any) -> None:
    asked = {"prompt": ["Once upon a time", "The"], "echo": True, "logprobs": 2, "max_tokens": 9, **SEEDED}
    whole = client.completions.create(**asked)
    assert [choice.text[:3] for choice in whole.choices] == ["Onc", "The"]
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    chunks = list(client.completions.create(**asked, stream=True))
    for choice in whole.choices:
        texts = [c.text for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(texts) == choice.text


def test_parse(client: Any) -> None:
    for seed in range(5):
        asked = {"model": "demo", "messages": STORY, "seed": seed}
        found = client.chat.completions.parse(**asked, response_format=Animal).choices[0].message
        assert isinstance(found.parsed, Animal)
        assert json.loads(found.content) == found.parsed.model_dump()
        with client.chat.completions.stream(**asked, response_format=Animal) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == found.parsed


def test_parse_that_does_not_fit(client: Any) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="demo", messages=STORY, response_format=Animal, max_tokens=3)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "GetWeather"}}])
def test_tools(client: Any, choice: Any) -> None:
    asked = {"messages": STORY, "tools": [openai.pydantic_function_tool(GetWeather)], "tool_choice": choice}
    asked |= {"parallel_tool_calls": False, **SEEDED}
    whole = client.chat.completions.parse(**asked).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
    done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    assert [e.parsed_arguments for e in done] == [call.function.parsed_arguments]
    parts = [e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert "".join(parts) == call.function.arguments
    assert stream.get_final_completion().choices[0].finish_reason == "tool_calls"


def test_a_conversation_about_a_call(client: Any) -> None:
    """What the package made of an answer is sent back as it is, with what the tool said."""
    tools = [openai.pydantic_function_tool(GetWeather)]
    asked = {"tools": tools, **SEEDED}
    first = client.chat.completions.create(messages=STORY, tool_choice="required", **asked)
    message = first.choices[0].message
    told = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    turns = [*STORY, message, *told]
    second = client.chat.completions.create(messages=turns, **asked)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens // 2
    last = client.chat.completions.create(messages=turns, tool_choice="none", **asked).choices[0].message
    assert last.tool_calls is None
    assert last.content


def test_fields_that_the_package_does_not_know(client: Any) -> None:
    more = {"top_k": 1, "ignore_eos": True, "return_token_ids": True, "chat_template_kwargs": {}, "frob": 1}
    found = client.chat.completions.create(model="demo", messages=STORY, max_tokens=5, extra_body=more)
    assert len(found.choices[0].token_ids) == 5
    assert "'frob'" in found.warnings[0]
    assert found.timings["completion_tokens"] == 5


def test_raw_responses(client: Any) -> None:
    headers = {"X-Request-Id": "mine-7"}
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=STORY, max_tokens=5, extra_headers=headers
    )
    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.parse()._request_id == "mine-7"
    streaming = client.chat.completions.with_streaming_response
    with streaming.create(model="demo", messages=STORY, max_tokens=5, stream=True) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_many_at_once(server: Server, client: Any) -> None:
    """The asynchronous client, with streams and whole answers side by side."""
    asked = [{"model": "demo", "messages": STORY, "seed": n, "max_tokens": 20} for n in range(16)]

    async def streamed(own: Any, body: Any) -> str:
        chunks = await own.chat.completions.create(**body, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def whole(own: Any, body: Any) -> str:
        return (await own.chat.completions.create(**body)).choices[0].message.content

    async def both() -> list[list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as own:
            tasks = [[kind(own, body) for body in asked] for kind in (streamed, whole)]
            return await asyncio.gather(*(asyncio.gather(*group) for group in tasks))

    texts, others = asyncio.run(both())
    assert texts == others
    assert len(set(texts)) > 1
    alone = client.chat.completions.create(**asked[3])
    assert alone.choices[0].message.content == texts[3]
