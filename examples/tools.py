"""A tool loop: the model calls a function, the program runs it, and the model answers with the result.

    quire serve                              in another terminal
    python examples/tools.py [QUESTION]

Needs the openai package. OPENAI_BASE_URL names another server (default: http://127.0.0.1:8000/v1).
"""

import json
import os
import sys
from typing import Any

from openai import APIConnectionError, OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
]
MAX_ROUNDS = 5  # a model may call tools again after seeing a result


def get_weather(city: str) -> dict[str, Any]:
    """Stand in for a weather service."""
    return {"condition": "rainy", "temperature": len(city)}


FUNCTIONS = {"get_weather": get_weather}


def answer(client: OpenAI, model: str, messages: list[Any]) -> str:
    """Return the final answer, after running every tool call the model makes on the way."""
    for _ in range(MAX_ROUNDS):
        reply = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, temperature=0)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = FUNCTIONS[call.function.name](**arguments)
            print(f"{call.function.name}({arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    return "(no answer: too many rounds of tool calls)"


def main(question: str = "What is the weather in Oslo?") -> None:
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),
    )
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(f"no server at {client.base_url}: start one with 'quire serve'")
    print(question)
    print(answer(client, model, [{"role": "user", "content": question}]))


if __name__ == "__main__":
    main(*sys.argv[1:2])
