"""The anthropic package: its README's example, streams, tools and who runs them, schemas, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from readme import Example, examples, run
from server import Server

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix
anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")

STORY: Any = [{"role": "user", "content": "Tell me a story about a dragon."}]
ASKED: Any = {"model": "demo", "max_tokens": 60, "messages": STORY}
GREEDY: Any = {"extra_body": {"temperature": 0}}
STARTS = [example for example in examples("anthropic") if example.heading == "Getting started"]


class Animal(pydantic.BaseModel):
    """Bounded on all sides, so that a toy comes to an end."""

    kind: Literal["fox", "owl"]
    legs: Literal[2, 4]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("example", STARTS, ids=lambda e: e.heading)
def test_an_example(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], example: Example
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "any")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
    run(example)
    assert "TextBlock" in capsys.readouterr().out


def test_an_answer_whole_and_streamed(client: Any) -> None:
    whole = client.messages.create(**ASKED, **GREEDY, system="Be brief.")
    with client.messages.stream(**ASKED, **GREEDY, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
    final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


@pytest.mark.parametrize("streams", [False, True])
def test_the_package_runs_tools(client: Any, streams: bool) -> None:
    """Each turn the model is told all that was said: the conversation grows."""
    heard = []

    @anthropic.beta_tool
    def get_weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city.

        Args:
            city: which one
        """
        heard.append(city)
        return "rain " * 20

    asked = ASKED | {"tools": [get_weather], "tool_choice": {"type": "any"}, "max_tokens": 100, **GREEDY}
    runner = client.beta.messages.tool_runner(**asked, max_iterations=3, stream=streams)
    replies = [turn.get_final_message() if streams else turn for turn in runner]
    assert len(replies) == 3
    assert len(heard) >= 2
    assert set(heard) <= {"Oslo", "Rome"}
    sizes = [r.usage.input_tokens + r.usage.cache_read_input_tokens for r in replies]
    assert sizes[0] + 20 < sizes[1]
    assert sizes[1] + 20 < sizes[2]


def test_parse(client: Any) -> None:
    found = client.messages.parse(**ASKED, output_format=Animal)
    assert isinstance(found.parsed_output, Animal)


def test_count_tokens(client: Any) -> None:
    counted = client.messages.count_tokens(model="demo", messages=STORY, system="Be brief.")
    usage = client.messages.create(**ASKED, system="Be brief.").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_many_at_once(server: Server) -> None:
    async def both() -> tuple[list[str], list[str]]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="any", max_retries=0) as own:

            async def streamed() -> str:
                async with own.messages.stream(**ASKED, **GREEDY) as stream:
                    return "".join([text async for text in stream.text_stream])

            async def whole() -> str:
                return (await own.messages.create(**ASKED, **GREEDY)).content[0].text

            return (
                await asyncio.gather(*(streamed() for _ in range(8))),
                await asyncio.gather(*(whole() for _ in range(8))),
            )

    texts, others = asyncio.run(both())
    assert len({*texts, *others}) == 1


def test_errors(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**ASKED | {"model": "claude-1"})
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**ASKED | {"max_tokens": -1})
    with pytest.raises(anthropic.BadRequestError, match="thread"):
        client.messages.create(**ASKED, extra_body={"thread": {"type": "create"}})
