"""Random requests of every kind whose answers are decided by what they ask for; answers in one form."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import httpx
from openai_client import CHAT, COMPLETIONS, chunks, joined_chat, joined_completions

Body = dict[str, Any]

WORDS = [
    "once",
    "upon",
    "a",
    "time",
    "the",
    "dragon,",
    "a",
    "lamp",
    "and",
    "a",
    "fox",
    "who",
    "counts",
    "boats",
]
SHARED = "Once upon a time, in a small village by the sea, there lived a fox who kept a lantern. "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["fox", "owl", "hare"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("register", "find")
]
STRUCTURES = [
    {"json": SCHEMA},
    {"regex": r"[a-z]{3,9}( [a-z]{2,5}){1,4}\."},
    {"choice": ["red", "green", "a colour of its own"]},
    {"grammar": 'start: "(" WORD ("," WORD)* ")"\nWORD: /[a-z]{1,6}/'},
]
FORMATS = [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}]
# What cannot be: it is refused, and nobody else notices.
WRONG: list[Body] = [
    {"prompt": "a", "temperature": 9},
    {"prompt": [99_999]},
    {"prompt": "a", "structured_outputs": {"regex": "(" * 50}},
    {"prompt": "a", "logit_bias": {"99999": 1}},
]


def words(rng: random.Random) -> str:
    """A prompt; many share a beginning, or repeat themselves."""
    shared = SHARED * rng.choice([0, 0, 1, 2])
    own = " ".join(rng.choices(WORDS, k=rng.randrange(1, 30)))
    return shared + " ".join([own[:80]] * rng.choice([2, 4])) if rng.random() < 0.3 else shared + own


def sampling(rng: random.Random) -> Body:
    """Parameters that go together, each of them in a part of the requests."""
    body: Body = {"max_tokens": rng.choice([1, 40, 120, 120]), "seed": rng.getrandbits(40)}
    if rng.random() < 0.2:
        return body | {"temperature": 0}
    body |= {"temperature": rng.choice([0.3, 1.0, 1.5]), "n": rng.choice([1, 1, 1, 2, 3])}
    options: list[Body] = [
        {"top_p": 0.8},
        {"top_k": 7},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.9, "frequency_penalty": -0.4},
        {"logit_bias": {str(rng.randrange(300, 2000)): 5, "17": -100}},
        {"allowed_token_ids": sorted(rng.sample(range(2000), 60))},
        {"bad_words": ["the", "lamp"]},
        {"stop": [" the", "."]},
        {"stop": "a", "include_stop_str_in_output": True},
        {"stop_token_ids": rng.sample(range(300, 2000), 40)},
        {"ignore_eos": True},
        {"min_tokens": 1},
    ]
    for option in rng.sample(options, rng.randrange(6)):
        body |= option
    return body


def request(rng: random.Random) -> tuple[str, Body]:
    """An endpoint, and what it is asked. Never a stream."""
    return rng.choice([_completion, _completion, _chat])(rng)


def _completion(rng: random.Random) -> tuple[str, Body]:
    prompt: Any = words(rng)
    if rng.random() < 0.2:
        prompt = [rng.choices(range(300, 2000), k=rng.randrange(1, 60)), [400 + rng.randrange(9), 500]]
    body = {"prompt": prompt, "return_token_ids": True, "echo": rng.random() < 0.2, **sampling(rng)}
    if rng.random() < 0.6:
        body["logprobs"] = rng.choice([0, 1, 5])
    if rng.random() < 0.25 and "allowed_token_ids" not in body:
        body["structured_outputs"] = rng.choice(STRUCTURES)
    return COMPLETIONS, body


def _chat(rng: random.Random) -> tuple[str, Body]:
    turns = [{"role": "user", "content": words(rng)}]
    if rng.random() < 0.3:
        turns = [{"role": "system", "content": SHARED}, *turns]
    body = {"messages": turns, "return_token_ids": True, **sampling(rng)}
    if rng.random() < 0.5:
        body |= {"logprobs": True, "top_logprobs": rng.choice([0, 3])}
    if rng.random() < 0.2:
        body["prediction"] = {"type": "content", "content": words(rng)}
    kind = rng.random()
    if "allowed_token_ids" not in body and kind < 0.3:
        body |= {"tools": TOOLS, "tool_choice": rng.choice(["required", "auto"])}
    elif "allowed_token_ids" not in body and kind < 0.5:
        body["response_format"] = rng.choice(FORMATS)
    return CHAT, body


def message(rng: random.Random) -> Body:
    """A body for /v1/messages."""
    calls = [{"name": tool["function"]["name"], "input_schema": SCHEMA} for tool in TOOLS]
    body = {"messages": [{"role": "user", "content": words(rng)}], "max_tokens": rng.choice([1, 60, 200])}
    more: list[Body] = [
        {"stop_sequences": [" the", ". "]},
        {"tools": calls, "tool_choice": {"type": rng.choice(["any", "auto"])}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {},
    ]
    return body | _drawn(rng) | rng.choice(more)


def response(rng: random.Random) -> Body:
    """A body for /v1/responses."""
    calls = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
    body = {"input": words(rng), "max_output_tokens": rng.choice([1, 60, 200])}
    more: list[Body] = [
        {"stop": [" the", ". "]},
        {"tools": calls, "tool_choice": rng.choice(["required", "auto"])},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        {},
    ]
    return body | _drawn(rng) | rng.choice(more)


def _drawn(rng: random.Random) -> Body:
    values: Body = {"seed": rng.getrandbits(40), "temperature": rng.choice([0, 0.6, 1.0])}
    return values | rng.choice([{}, {"top_p": 0.9}, {"top_k": 5}, {"repetition_penalty": 1.2}])


def answer(
    client: httpx.Client, path: str, body: Body, stream: bool, begun: Callable[[], None] | None = None
) -> Any:
    """The choices of an answer without what differs each time, the ids of calls; and the tokens counted.

    None: it was refused. `begun` is called when some of a stream has come.
    """
    if stream:
        join = joined_chat if path == CHAT else joined_completions
        found = chunks(client, path, begun, **body, stream_options={"include_usage": True})
        choices, usage = join(found), found[-1]["usage"]
    else:
        reply = client.post(path, json=body)
        if reply.status_code == 400:
            return None
        assert reply.status_code == 200, reply.text
        choices, usage = reply.json()["choices"], reply.json()["usage"]
    counts = [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    return [_plain(choice) for choice in choices], counts


def _plain(choice: Any) -> Any:
    message = choice.get("message")
    if message is not None:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            del call["id"]
    if (logprobs := choice["logprobs"]) is not None:
        choice["logprobs"] = {name: values or None for name, values in logprobs.items()}
    return choice
