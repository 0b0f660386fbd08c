"""Tools of /v1/responses: the functions that the model sees, and the items of its calls."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from named_events import Object, ScriptedRun, events, sent
from server import Server
from test_responses import PATH, SAMPLED, STORY, UNASKED, ask, refused, response

from quire.errors import RequestError
from quire.server.body import parse
from quire.server.chat_task import ChatTask, Finish
from quire.server.event_stream import encode
from quire.server.openai.items import ResponseRequest, task_of
from quire.server.openai.response_tools import CalledTool, CustomInput, Toolbox
from quire.server.openai.responses import ResponseWriter
from quire.text.answer import CallArguments, CallStart

CITY: Object = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Bonn"]}}, "required": ["city"]}
WEATHER: Object = {"type": "function", "name": "weather", "parameters": CITY}
AGENTS: Object = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [
        {"type": "function", "name": "spawn", "description": "Starts one.", "parameters": CITY},
        {"type": "custom", "name": "note", "format": {"type": "text"}},
    ],
}
LARK = 'start: line+\nline: "+" COLOR LF\nCOLOR: "red" | "blue"\n%import common.LF\n'
PAINT: Object = {
    "type": "custom",
    "name": "paint",
    "description": "Paints.",
    "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
}
SEARCH: Object = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": CITY}
SHELL: Object = {"type": "local_shell"}
ALL = [WEATHER, AGENTS, PAINT, SEARCH, SHELL]


def conversation(**body: Any) -> tuple[ChatTask, Toolbox]:
    asked, _ = parse(json.dumps({"input": "Hi", **body}).encode(), ResponseRequest)
    return task_of(asked)


def functions(**body: Any) -> dict[str, Object]:
    """Return the functions that the model sees, by name."""
    tools = conversation(**body)[0].tools or ()
    assert all(tool["type"] == "function" for tool in tools)
    return {tool["function"]["name"]: dict(tool["function"]) for tool in tools}


def streamed(toolbox: Toolbox, *batches: Any) -> list[Object]:
    run: Any = ScriptedRun(*batches)
    stream = ResponseWriter(response(), run, toolbox, UNASKED)
    return sent(stream.events(), stream.failed)


def called(name: str, *pieces: str, finish: str = "tool_calls") -> tuple[list[Object], Object]:
    """Return the events of a call as the client receives them, and its item."""
    batches: list[Any] = [[CallStart(0, "call_a", name)], *([CallArguments(0, piece)] for piece in pieces)]
    found = streamed(conversation(tools=ALL)[1], *batches, [Finish(finish, None)])
    (item,) = found[-1]["response"]["output"]
    assert found[-2] == {**found[-2], "type": "response.output_item.done", "item": item}
    return found[3:-2], item


# Functions that the model sees


def test_a_namespace_is_a_prefix_of_the_names_of_its_tools() -> None:
    offered = functions(tools=[WEATHER, AGENTS])
    assert list(offered) == ["weather", "agents.spawn", "agents.note"]
    assert offered["agents.spawn"]["parameters"] == CITY
    assert offered["agents.spawn"]["description"] == "Sub-agents.\n\nStarts one."
    assert offered["agents.note"]["description"] == ""


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    offered = functions(tools=[PAINT, {"type": "custom", "name": "free", "description": "Any."}])
    text = offered["paint"]["parameters"]["properties"]["input"]
    assert text["type"] == "string"
    assert re.fullmatch(text["pattern"], "+red\n+blue\n")
    assert not re.fullmatch(text["pattern"], "+green\n")
    assert offered["paint"]["parameters"]["required"] == ["input"]
    assert LARK.strip() in offered["paint"]["description"]
    assert offered["free"]["description"] == "Any."
    assert "pattern" not in offered["free"]["parameters"]["properties"]["input"]


@pytest.mark.parametrize("definition", ["[ab]+", "^[ab]+$"])
def test_a_custom_tool_may_have_a_regular_expression(definition: str) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": definition}
    offered = functions(tools=[{"type": "custom", "name": "x", "format": form}])
    assert offered["x"]["parameters"]["properties"]["input"]["pattern"] == "^(?:[ab]+)$"


def test_a_recursive_grammar_is_shown_and_not_enforced() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")" | "x"'}
    task = conversation(tools=[{"type": "custom", "name": "x", "format": form}])[0]
    assert task.tools is not None
    assert "pattern" not in task.tools[0]["function"]["parameters"]["properties"]["input"]
    (warning,) = task.warnings
    assert "tools[0].format" in warning
    assert "recursive" in warning


HOSTED = ["web_search", "web_search_preview_2025_03_11", "image_generation", "file_search", "mcp"]
HOSTED += ["code_interpreter", "computer_use_preview", "tool_search"]


@pytest.mark.parametrize("kind", HOSTED)
def test_hosted_tools_are_left_out_with_a_warning(kind: str) -> None:
    task = conversation(tools=[{"type": kind}, WEATHER, {"type": kind, "execution": "server"}])[0]
    assert [tool["function"]["name"] for tool in task.tools or ()] == ["weather"]
    assert [kind in warning for warning in task.warnings] == [True]


def test_the_history_may_bring_tools() -> None:
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [AGENTS, WEATHER]},
        {"role": "user", "content": "Hi"},
        {"type": "tool_search_call", "call_id": "A", "execution": "client", "arguments": {"city": "Ulm"}},
        {"type": "tool_search_output", "call_id": "A", "tools": [{**WEATHER, "description": "New."}, PAINT]},
    ]
    offered = functions(input=items)
    assert list(offered) == ["agents.spawn", "agents.note", "weather", "paint"]
    assert offered["weather"]["description"] == "New."


def test_many_tools_are_bounded() -> None:
    many = [{**WEATHER, "name": f"f{number}"} for number in range(513)]
    with pytest.raises(RequestError, match="more than 512 tools"):
        conversation(input=[{"type": "additional_tools", "tools": many}])
    again = {"type": "additional_tools", "tools": [PAINT] * 4000}
    odd = [{"type": f"web_search_{number}"} for number in range(100)]
    task = conversation(input=[again], tools=odd)[0]
    assert len(task.tools or ()) == 1
    assert len(task.warnings) == 16


# Choices


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", "required"),
        ({"type": "function", "name": "weather"}, {"name": "weather"}),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, {"name": "agents.spawn"}),
        ({"type": "custom", "name": "paint"}, {"name": "paint"}),
        ({"type": "local_shell"}, {"name": "local_shell"}),
    ],
)
def test_a_choice_names_a_function(choice: Any, expected: Any) -> None:
    assert conversation(tools=ALL, tool_choice=choice)[0].tool_choice == expected


def test_a_choice_of_several_tools() -> None:
    tools = [{"type": "function", "name": "weather"}, {"type": "namespace", "name": "agents"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [*tools, {"type": "web_search"}]}
    found = conversation(tools=ALL, tool_choice=choice)[0].tool_choice["allowed_tools"]
    names = [tool["function"]["name"] for tool in found["tools"]]
    assert (found["mode"], names) == ("required", ["weather", "agents.spawn", "agents.note"])


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("tools[1].name", {"tools": [WEATHER, WEATHER]}),
        ("tools[1]", {"tools": [WEATHER, {"type": "teapot", "name": "x"}]}),
        ("tools[0]", {"tools": [{"type": "namespace", "tools": [WEATHER]}]}),
        ("tools[0].tools[0]", {"tools": [{"type": "namespace", "name": "x", "tools": [AGENTS]}]}),
        ("tools[0].format", {"tools": [{"type": "custom", "name": "x", "format": {"type": "xml"}}]}),
        ("tools[0].format", {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]}),
        ("input[0].tools[0]", {"input": [{"type": "additional_tools", "tools": [{"type": "teapot"}]}]}),
        ("tool_choice", {"tools": ALL, "tool_choice": {"type": "namespace", "name": "agents"}}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "local_shell"}}),
    ],
)
def test_invalid_tools_are_refused(param: str, body: Object) -> None:
    with pytest.raises(RequestError) as caught:
        conversation(**body)
    assert caught.value.param == param


# Calls, as the client receives them


def test_a_call_in_a_namespace_has_both_names() -> None:
    found, item = called("agents.spawn", '{"city": ', '"Ulm"}')
    assert item == {
        "type": "function_call",
        "id": item["id"],
        "status": "completed",
        "call_id": "call_a",
        "name": "spawn",
        "namespace": "agents",
        "arguments": '{"city": "Ulm"}',
    }
    assert [event["type"] for event in found] == [
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    ]
    assert found[-1]["name"] == "spawn"
    assert "namespace" not in called("weather", "{}")[1]


def test_a_custom_call_has_its_text_and_streams_it() -> None:
    found, item = called("agents.note", '{"in', 'put": "a\\', "n\\u00e", '9\\"', ' b"', "}")
    assert (item["type"], item["name"], item["namespace"]) == ("custom_tool_call", "note", "agents")
    assert item["input"] == 'a\né" b'
    assert item["id"].startswith("ctc_")
    *deltas, done = found
    assert {event["type"] for event in deltas} == {"response.custom_tool_call_input.delta"}
    assert [event["delta"] for event in deltas] == ["a", "\n", 'é"', " b"]
    assert (done["type"], done["input"]) == ("response.custom_tool_call_input.done", item["input"])


def test_a_custom_call_that_is_cut() -> None:
    _, item = called("paint", '{"input": "+red\\', finish="length")
    assert (item["input"], item["status"]) == ("+red", "incomplete")


def test_a_search_among_tools_and_a_shell_command() -> None:
    found, item = called("tool_search", '{"city": "Bonn"}')
    assert found == []
    assert (item["type"], item["execution"], item["call_id"]) == ("tool_search_call", "client", "call_a")
    assert item["arguments"] == {"city": "Bonn"}
    _, item = called("local_shell", '{"command": ["ls", "-l"], "timeout_ms": 5}')
    assert item["type"] == "local_shell_call"
    assert item["action"] == {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5}
    assert called("local_shell", '{"command": ["l', finish="length")[1]["action"]["command"] == []


def test_arguments_that_are_sent_as_an_object_are_those_of_the_model() -> None:
    arguments = r'{"city": "a\ud834", "in": [{"\udd1e": 1e999}, 1.10, 123456789012345678901]}'
    item = CalledTool("tool_search", "tool_search").item("tsc_1", "completed", "call_a", arguments)
    sent = encode(item).decode()
    assert '"arguments":{"city":"a\ufffd","in":[{"\ufffd":1e999},1.10,123456789012345678901]}' in sent


TEXTS = ['a "b" \\ / \n\t\r \x08\x0c é 𝄞', "", "\\u0041", "}", "\u2028"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii", [True, False])
def test_texts_do_not_depend_on_how_they_are_cut(text: str, ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii)
    for size in range(1, len(arguments) + 1):
        reader = CustomInput()
        pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
        assert "".join(map(reader.push, pieces)) == text


@pytest.mark.parametrize("half", [r"\ud834", r"\udd1e", r"\ud834\ud834\udd1e\n", r"\ud834\u0041"])
def test_half_characters_are_replaced(half: str) -> None:
    arguments = f'{{"input": "a{half}b"}}'
    whole = CustomInput().push(arguments)
    assert whole[:2] == "a\ufffd"
    assert whole[-1] == "b"
    assert whole.encode()
    reader = CustomInput()
    assert "".join(map(reader.push, arguments)) == whole


# Over real sockets


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_holds_the_text_of_a_custom_tool(client: httpx.Client, stream: bool) -> None:
    body: Object = {"tools": [AGENTS, PAINT], "tool_choice": {"type": "custom", "name": "paint"}}
    body |= {"parallel_tool_calls": False, "max_output_tokens": 300, **SAMPLED}
    if stream:
        found = events(client, PATH, input=STORY, **body)
        item = found[-1]["response"]["output"][0]
        kind = "response.custom_tool_call_input.delta"
        assert "".join(event["delta"] for event in found if event["type"] == kind) == item["input"]
    else:
        (item,) = ask(client, **body)["output"]
    assert (item["type"], item["name"], item["status"]) == ("custom_tool_call", "paint", "completed")
    assert re.fullmatch(r"(\+(red|blue)\n)+", item["input"])


def test_calls_go_back_and_forth(client: httpx.Client) -> None:
    choice = {"type": "function", "name": "spawn", "namespace": "agents"}
    found = ask(client, tools=ALL, tool_choice=choice, parallel_tool_calls=False, **SAMPLED)
    (call,) = found["output"]
    assert (call["name"], call["namespace"]) == ("spawn", "agents")
    assert json.loads(call["arguments"])["city"] in ("Ulm", "Bonn")
    assert found["tools"] == ALL
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "It runs."}
    again = ask(
        client, input=[{"role": "user", "content": STORY}, call, output], tools=ALL, tool_choice="none"
    )
    assert again["output"][0]["type"] == "message"


def test_only_allowed_tools_are_called(client: httpx.Client) -> None:
    tools = [{**WEATHER, "name": name} for name in ("one", "two", "three")]
    allowed: Object = {"type": "allowed_tools", "mode": "required"}
    prompts = set()
    for name in ("one", "two", "three"):
        choice = {**allowed, "tools": [{"type": "function", "name": name}]}
        found = ask(client, tools=tools, tool_choice=choice, parallel_tool_calls=False, **SAMPLED)
        assert found["output"][-1]["name"] == name
        prompts.add(found["usage"]["input_tokens"])
    assert len(prompts) == 1  # which has all of them
    chat = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}
    one = {"type": "function", "function": {"name": "two", "parameters": CITY}}
    body: Object = {"messages": [{"role": "user", "content": STORY}], "tools": [one], "tool_choice": chat}
    reply = client.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice")
    chat["allowed_tools"]["tools"] = [one]  # type: ignore[index]
    reply = client.post("/v1/chat/completions", json={**body, "parallel_tool_calls": False, **SAMPLED})
    assert reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "two"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools", "mode": "required", "tools": []},
        {"type": "allowed_tools", "mode": "none", "tools": [{"type": "function", "name": "weather"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": ["required"]},
        {"type": "allowed_tools", "mode": "auto", "tools": 5},
        {"type": "allowed_tools"},
    ],
)
def test_a_choice_that_allows_no_tools_is_refused(client: httpx.Client, choice: Object) -> None:
    assert refused(client, tools=[WEATHER], tool_choice=choice)["param"] == "tool_choice"


def test_errors_name_the_place_of_a_tool(client: httpx.Client) -> None:
    bad = {"type": "function", "name": "f", "strict": True, "parameters": {"type": "object", "allOf": 1}}
    inner = {**AGENTS, "tools": [WEATHER, bad]}
    tools = [{"type": "web_search"}, WEATHER, inner]
    error = refused(client, tools=tools)
    assert error["param"] == "tools[2].tools[1].parameters"
    assert error["message"].startswith("tools[2].tools[1].parameters ")
    spaced = {"type": "namespace", "name": "a b", "tools": [WEATHER]}
    assert refused(client, tools=[WEATHER, spaced])["param"] == "tools[1].tools[0].name"


def test_an_expression_beyond_grammars_is_only_shown(client: httpx.Client) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": r"(a)\1"}
    found = ask(client, tools=[{"type": "custom", "name": "x", "format": form}], max_output_tokens=1)
    assert found["warnings"] == [
        "tool x: pattern of 'input' is not enforced: it is more than a regular expression"
    ]


def test_tools_left_out_are_in_the_warnings(client: httpx.Client) -> None:
    found = ask(client, tools=[{"type": "web_search"}, WEATHER], max_output_tokens=1)
    assert [("web_search" in warning) for warning in found["warnings"]] == [True]
    opened = events(client, PATH, input="Hi", tools=[{"type": "mcp"}], max_output_tokens=1)[0]
    assert "mcp" in opened["response"]["warnings"][0]


def test_sdk_reads_these_items(server: Server) -> None:
    body: Any = {"model": "demo", "input": STORY, "tools": ALL, "parallel_tool_calls": False}
    body |= {"tool_choice": {"type": "custom", "name": "paint"}, "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        (call,) = sdk.responses.create(**body).output
        assert call.type == "custom_tool_call"
        with sdk.responses.stream(**body) as stream:
            texts = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
            (item,) = stream.get_final_response().output
        assert item.type == "custom_tool_call"
        assert "".join(texts) == item.input == call.input
