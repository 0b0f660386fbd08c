"""Tools: requests that need one of a list, the calls, and the answers made of what the tools return."""

import json
from dataclasses import dataclass

from scripts.demo.facts import fact
from scripts.demo.small_talk import small_talk
from scripts.demo.source import Dialogue, Source, assistant, user
from scripts.demo.tool_intents import INTENTS, Intent, invented

NO_TOOL = ("I have no tool for that.", "Sorry, none of my tools can do that.")


@dataclass
class Tool:
    """An intent as one list shows it: a function with a chosen name, and chosen names for its parameters."""

    intent: Intent
    name: str
    shown: dict[str, str]
    schema: dict


def declare(source: Source, intent: Intent) -> Tool:
    """Choose the names and write the OpenAI-style declaration."""
    shown = {canonical: source.choice(param.names) for canonical, param in intent.params.items()}
    described = source.chance(0.4)
    properties = {}
    for canonical, param in intent.params.items():
        properties[shown[canonical]] = {"type": param.type}
        if param.enum and source.chance(0.9):
            properties[shown[canonical]]["enum"] = list(param.enum)
        if param.description and described:
            properties[shown[canonical]]["description"] = param.description
    parameters = {"type": "object", "properties": properties}
    if source.chance(0.7):
        parameters["required"] = list(properties)[: 1 if source.chance(0.3) else None]
    function = {"name": source.choice(intent.names)}
    if source.chance(0.85):
        function["description"] = source.choice(intent.descriptions)
    function["parameters"] = parameters
    return Tool(intent, function["name"], shown, {"type": "function", "function": function})


def draw_intent(source: Source) -> Intent:
    return invented(source) if source.chance(0.4) else source.choice(INTENTS)


def toolbox(source: Source, count: int) -> list[Tool]:
    """Tools of different names and intents, in random order."""
    box: dict[str, Tool] = {}
    taken: set[int] = set()
    while len(box) < count:
        intent = draw_intent(source)
        tool = declare(source, intent)
        if id(intent) not in taken and tool.name not in box:
            box[tool.name] = tool
            taken.add(id(intent))
    return list(box.values())


def ask(source: Source, tool: Tool) -> tuple[str, dict, dict]:
    """(what the user says, arguments under the shown names, arguments under the canonical names)."""
    wordings = tool.intent.wordings
    wording = source.wording(wordings) if len(wordings) > 1 else wordings[0]
    canonical = {
        key: param.draw(source) for key, param in tool.intent.params.items() if f"{{{key}}}" in wording
    }
    text = wording.format(**canonical)
    return text[0].upper() + text[1:], {tool.shown[key]: value for key, value in canonical.items()}, canonical


def calling(calls: list[tuple[str, dict]]) -> dict:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ],
    }


def respond(source: Source, tool: Tool, arguments: dict) -> tuple[dict, str]:
    """Return a tool's result as a message, and the sentence to say about it."""
    if source.chance(0.08):
        problem = source.choice(("not found", "no connection", "not allowed", "timeout"))
        return {
            "role": "tool",
            "content": json.dumps({"error": problem}),
        }, f"Sorry, that did not work: {problem}."
    result = tool.intent.result(source)
    said = {key: ", ".join(value) if isinstance(value, list) else value for key, value in result.items()}
    answer = tool.intent.answer.format(**{**arguments, **said})
    return {"role": "tool", "content": json.dumps(result)}, answer[0].upper() + answer[1:]


def tool_call(source: Source) -> Dialogue:
    """A request for one of one to four tools: the call."""
    box = toolbox(source, source.number(1, 4))
    tool = source.choice(box)
    text, arguments, _ = ask(source, tool)
    calls = [(tool.name, arguments)]
    return Dialogue(
        [user(source.typed(text)), calling(calls)], "tool_call", [t.schema for t in box], {"calls": calls}
    )


def two_calls(source: Source) -> Dialogue:
    """Two requests in one sentence: two calls in a row, and one answer to both."""
    box = toolbox(source, source.number(1, 3))
    first, second = source.choice(box), source.choice(box)
    asked, calls, results, answers = [], [], [], []
    for tool in (first, second):
        text, arguments, canonical = ask(source, tool)
        message, answer = respond(source, tool, canonical)
        asked.append(text)
        calls.append((tool.name, arguments))
        results.append(message)
        answers.append(answer)
    glue = source.choice((" And ", " Also: ", " And then: ", " Then ", " "))
    messages = [user(glue.join(asked)), calling(calls)]
    task, expect = "two_calls", {"calls": calls}
    if source.chance(0.5):
        messages += [*results, assistant(" ".join(answers))]
        task, expect = "tool_answer", {"exact": " ".join(answers)}
    return Dialogue(messages, task, [tool.schema for tool in box], expect)


def tool_answer(source: Source) -> Dialogue:
    """A call, what came back, and the answer; now and then a second request after it."""
    box = toolbox(source, source.number(1, 3))
    messages, expect = [], {}
    for _ in range(1 + source.chance(0.25)):
        tool = source.choice(box)
        text, arguments, canonical = ask(source, tool)
        message, answer = respond(source, tool, canonical)
        messages += [user(source.typed(text)), calling([(tool.name, arguments)]), message, assistant(answer)]
        expect = {"exact": answer}
    return Dialogue(messages, "tool_answer", [tool.schema for tool in box], expect)


def no_tool(source: Source) -> Dialogue:
    """Tools are there, but what is asked is small talk, a fact, or something none of them can do."""
    box = toolbox(source, source.number(1, 3))
    schemas = [tool.schema for tool in box]
    if source.chance(0.6):
        plain = (small_talk if source.chance(0.5) else fact)(source)
        return Dialogue(plain.messages, "no_tool", schemas, plain.expect)
    missing = [intent for intent in INTENTS if all(intent is not tool.intent for tool in box)]
    text, _, _ = ask(source, declare(source, source.choice(missing)))
    return Dialogue(
        [user(source.typed(text)), assistant(source.choice(NO_TOOL))], "no_tool", schemas, {"any_of": NO_TOOL}
    )


def tool_talk(source: Source) -> Dialogue:
    draw = source.random.random()
    return (
        tool_call if draw < 0.4 else tool_answer if draw < 0.65 else two_calls if draw < 0.82 else no_tool
    )(source)
