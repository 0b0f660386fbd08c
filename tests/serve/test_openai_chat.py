"""/v1/chat/completions over real sockets: streams and whole responses, and LLM.chat beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai_client import CHAT, MESSAGES, SAMPLED, chat, choices, chunks, joined_chat, refused

from quire import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_threads=1) as llm:
        yield llm


def test_a_response_has_the_shape_that_clients_read(client: httpx.Client) -> None:
    found = chat(client, model="demo", max_tokens=8)
    assert found["id"].startswith("chatcmpl-")
    assert (found["object"], found["model"]) == ("chat.completion", "demo")
    assert found["system_fingerprint"].startswith("quire-")
    (choice,) = found["choices"]
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert (choice["index"], choice["logprobs"], choice["stop_reason"]) == (0, None, None)
    assert choice["finish_reason"] == "length"
    usage = found["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert usage["prompt_tokens_details"].keys() == {"cached_tokens"}
    predicted = dict.fromkeys(("accepted_prediction_tokens", "rejected_prediction_tokens"), 0)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0, **predicted}
    times = found["timings"]
    assert 0 < times["ttft_ms"] <= times["total_ms"]
    assert times["cached_tokens"] + times["computed_tokens"] == usage["prompt_tokens"]
    assert "warnings" not in found


def test_stream_response_and_llm_are_equal(client: httpx.Client, llm: LLM) -> None:
    asked = {"n": 3, "max_tokens": 40, "stop": ["lived", " the"], **SAMPLED}
    shown = {"logprobs": True, "top_logprobs": 3, "return_token_ids": True}
    whole = chat(client, **asked, **shown)
    found = chunks(client, CHAT, messages=MESSAGES, **asked, **shown)
    assert joined_chat(found) == whole["choices"]
    assert found[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert "prompt_token_ids" not in found[1]
    (own,) = llm.chat(MESSAGES, SamplingParams(logprobs=3, **asked), use_tqdm=False)
    assert own.prompt_token_ids == whole["prompt_token_ids"]
    for choice, output in zip(whole["choices"], own.outputs, strict=True):
        assert choice["message"]["content"] == output.text
        assert choice["token_ids"] == output.token_ids
        assert (choice["finish_reason"], choice["stop_reason"]) == (output.finish_reason, output.stop_reason)
        assert [e["logprob"] for e in choice["logprobs"]["content"]] == [
            position[token].logprob for position, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        for entry, position in zip(choice["logprobs"]["content"], output.logprobs, strict=True):
            top = sorted((p for p in position.values() if p.rank <= 3), key=lambda p: p.rank)
            assert [e["logprob"] for e in entry["top_logprobs"]] == [p.logprob for p in top]


@pytest.mark.parametrize("stop", [[], ["lived", " the"]])
def test_greedy_choices_are_equal(client: httpx.Client, stop: list[str]) -> None:
    asked = {"temperature": 0, "max_tokens": 40, "logprobs": True, "return_token_ids": True, "stop": stop}
    alone = chat(client, **asked)
    whole = chat(client, n=3, **asked)
    assert whole["choices"] == [alone["choices"][0] | {"index": index} for index in range(3)]
    assert whole["usage"]["completion_tokens"] == 3 * alone["usage"]["completion_tokens"]
    assert whole["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert joined_chat(chunks(client, CHAT, messages=MESSAGES, n=3, **asked)) == whole["choices"]


def test_choices_of_a_stream_are_interleaved(client: httpx.Client) -> None:
    found = chunks(client, CHAT, messages=MESSAGES, n=4, max_tokens=100, ignore_eos=True, **SAMPLED)
    order = [choice["index"] for choice in choices(found)]
    assert order != sorted(order)


def test_the_order_of_a_stream(client: httpx.Client) -> None:
    *first, last = chunks(client, CHAT, messages=MESSAGES, max_tokens=30, temperature=0)
    deltas = [chunk["choices"][0]["delta"] for chunk in [*first, last]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(delta.keys() == {"content"} and delta["content"] for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert last["choices"][0]["finish_reason"] == "length"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in first)
    assert last["timings"]["completion_tokens"] == 30
    assert not any("timings" in chunk or "usage" in chunk for chunk in first)


def test_usage_of_a_stream(client: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "n": 2, **SAMPLED}
    whole = chat(client, **body)["usage"]
    *first, last = chunks(client, CHAT, stream_options={"include_usage": True}, **body)
    assert last["choices"] == []
    assert (last["usage"]["completion_tokens"], last["usage"]["total_tokens"]) == (
        whole["completion_tokens"],
        whole["total_tokens"],
    )
    assert "timings" in last
    assert not any("timings" in chunk or chunk.get("usage") for chunk in first)
    for unasked in (None, {}, {"include_usage": False}):
        assert not any("usage" in chunk for chunk in chunks(client, CHAT, stream_options=unasked, **body))
    options = {"include_usage": True, "continuous_usage_stats": True}
    every = chunks(client, CHAT, stream_options=options, **body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in every]
    assert counts == sorted(counts)
    assert counts[-1] == whole["completion_tokens"]
    only = chunks(client, CHAT, stream_options={"continuous_usage_stats": True}, **body)
    assert only[-1]["choices"]
    assert all("usage" in chunk for chunk in only)
    assert ["timings" in chunk for chunk in only] == [False] * (len(only) - 1) + [True]


def test_a_choice_without_text_has_a_role_and_an_end(client: httpx.Client, llm: LLM) -> None:
    end = llm.frontend.eos_token_ids[0]
    found = chunks(client, CHAT, messages=MESSAGES, allowed_token_ids=[end])
    assert [choice["delta"] for choice in choices(found)] == [{"role": "assistant", "content": ""}, {}]
    whole = chat(client, allowed_token_ids=[end])
    assert whole["choices"][0]["message"]["content"] == ""
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("stop", 1)


def test_the_end_token_is_not_among_those_of_a_text(client: httpx.Client) -> None:
    """As guidance reads a stream: where a chunk has several tokens, their texts are its text."""
    schema = {"type": "object", "properties": {"a": {"const": "bc"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"schema": schema | {"additionalProperties": False}}}
    body = {"messages": MESSAGES, "response_format": form, "logprobs": True, "return_token_ids": True}
    found = [*choices(chunks(client, CHAT, **body))]
    for choice in found:
        if text := choice["delta"].get("content"):
            assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == text
    assert found[-1]["finish_reason"] == "stop"
    assert len(found[-1]["logprobs"]["content"]) == len(found[-1]["token_ids"]) == 1


def test_bytes_rebuild_split_characters(client: httpx.Client, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    pieces = [t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) in (b"\xc3", b"\xa9", b"e")]
    assert len(pieces) == 3
    varied = {"frequency_penalty": 2, "max_tokens": 200, **SAMPLED}
    body = {"allowed_token_ids": pieces, "logprobs": True, **varied}
    (whole,) = chat(client, **body)["choices"]
    entries = whole["logprobs"]["content"]
    text = bytes(b for entry in entries for b in entry["bytes"]).decode(errors="replace")
    assert text == whole["message"]["content"]
    assert "é" in text
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert "\ufffd" in {entry["token"] for entry in entries}
    assert joined_chat(chunks(client, CHAT, messages=MESSAGES, **body)) == [whole]


def test_stop_reasons(client: httpx.Client) -> None:
    greedy = {"temperature": 0, "max_tokens": 30}
    text = chat(client, **greedy)["choices"][0]["message"]["content"]
    word = text.split()[3]
    (by_text,) = chat(client, stop=word, **greedy)["choices"]
    assert (by_text["finish_reason"], by_text["stop_reason"]) == ("stop", word)
    assert by_text["message"]["content"] == text[: text.index(word)]
    (kept,) = chat(client, stop=[word], include_stop_str_in_output=True, **greedy)["choices"]
    assert kept["message"]["content"] == text[: text.index(word)] + word
    token = chat(client, return_token_ids=True, **greedy)["choices"][0]["token_ids"][7]
    (by_token,) = chat(client, stop_token_ids=[token], **greedy)["choices"]
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", token)


def test_an_answer_has_all_the_room_there_is(client: httpx.Client) -> None:
    found = chat(client, ignore_eos=True)
    assert found["usage"]["total_tokens"] == 1024
    assert found["choices"][0]["finish_reason"] == "length"
    found = chat(client, max_tokens=50, max_completion_tokens=3, ignore_eos=True)
    assert found["usage"]["completion_tokens"] == 3


def test_the_model_has_defaults_of_its_own(client: httpx.Client, llm: LLM) -> None:
    assert llm.frontend.default_params == {"temperature": 0.5, "top_p": 0.95}
    body = {"seed": 3, "max_tokens": 60}
    text = chat(client, **body)["choices"][0]["message"]["content"]
    params = SamplingParams(temperature=0.5, top_p=0.95, seed=3, max_tokens=60)
    assert llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0].text == text
    assert chat(client, temperature=None, top_p=None, **body)["choices"][0]["message"]["content"] == text


def test_penalties_and_masks_reach_the_engine(client: httpx.Client, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    banned = tokenizer.encode(" the")[0]
    body = {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "min_p": 0.01,
        "top_k": 50,
        "min_tokens": 10,
        "max_tokens": 60,
        "logit_bias": {str(banned): -100},
        "bad_words": ["was"],
        **SAMPLED,
    }
    text = chat(client, **body)["choices"][0]["message"]["content"]
    assert llm.chat(MESSAGES, SamplingParams(**body), use_tqdm=False)[0].outputs[0].text == text
    assert " was " not in text


def test_a_message_is_continued(client: httpx.Client, llm: LLM) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "Once upon a"}]
    body = {"messages": turns, "temperature": 0, "max_tokens": 5, "return_token_ids": True}
    found = chat(client, continue_final_message=True, **body)
    prompt = llm.get_tokenizer().decode(found["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.endswith("assistant\nOnce upon a")
    assert found == found | {"choices": chat(client, **body, continue_final_message=True)["choices"]}
    again = chat(client, continue_final_message=True, add_generation_prompt=False, **body)
    assert again["prompt_token_ids"] == found["prompt_token_ids"]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(client, CHAT, messages=turns, **both)["param"] == "continue_final_message"


def test_a_schema_beside_json_object_is_followed(client: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"enum": [11, 12]}},
        "required": ["age"],
        "additionalProperties": False,
    }
    for form in ({"type": "json_object", "schema": schema}, {"type": "json", "value": schema}):
        (choice,) = chat(client, response_format=form, max_tokens=40)["choices"]
        assert json.loads(choice["message"]["content"])["age"] in (11, 12)


def test_a_prompt_is_truncated(client: httpx.Client) -> None:
    whole = chat(client, max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    for side, kept in ((None, whole[-5:]), ("left", whole[-5:]), ("right", whole[:5])):
        cut = {"truncate_prompt_tokens": 5, "truncation_side": side}
        assert chat(client, max_tokens=1, return_token_ids=True, **cut)["prompt_token_ids"] == kept
    assert refused(client, CHAT, truncation_side="middle")["param"] == "truncation_side"
    long = [{"role": "user", "content": "dragon " * 3000}]
    assert refused(client, CHAT, messages=long)["code"] == "context_length_exceeded"
    found = chat(client, messages=long, truncate_prompt_tokens=-1, max_tokens=24)
    assert found["usage"]["prompt_tokens"] == 1000
    error = refused(client, CHAT, truncate_prompt_tokens=-1, max_tokens=1024)  # not cut to nothing
    assert (error["param"], "leaves no room" in error["message"]) == ("max_tokens", True)


def test_prompt_logprobs(client: httpx.Client, llm: LLM) -> None:
    found = chat(client, prompt_logprobs=2, max_tokens=1, temperature=0)
    params = SamplingParams(prompt_logprobs=2, max_tokens=1, temperature=0)
    own = llm.chat(MESSAGES, params, use_tqdm=False)[0].prompt_logprobs
    first, *rest = found["prompt_logprobs"]
    assert first is None
    for shown, position in zip(rest, own[1:], strict=True):
        assert shown == {
            str(token): {"logprob": e.logprob, "rank": e.rank, "decoded_token": e.decoded_token}
            for token, e in position.items()
        }
    every = chat(client, prompt_logprobs=-1, max_tokens=1)["prompt_logprobs"]
    assert len(every[1]) == llm.frontend.model.config.vocab_size
    assert refused(client, CHAT, prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"


def test_logprobs_of_a_long_prompt_hold_up_no_one(client: httpx.Client) -> None:
    """They are put into words beside the event loop; what comes of it is the same."""
    long = [{"role": "user", "content": "dragon " * 300}]
    found = [chat(client, messages=long, prompt_logprobs=20, max_tokens=1) for _ in range(2)]
    assert found[0]["prompt_logprobs"] == found[1]["prompt_logprobs"]
    assert len(found[0]["prompt_logprobs"]) == found[0]["usage"]["prompt_tokens"] > 500


def test_tokens_as_ids(client: httpx.Client) -> None:
    body = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "max_tokens": 5}
    found = chat(client, return_tokens_as_token_ids=True, **body)["choices"][0]
    names = [entry["token"] for entry in found["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in found["token_ids"]]


def test_a_cache_salt_keeps_prompts_apart(client: httpx.Client) -> None:
    turns = [{"role": "user", "content": "A long question about many things. " * 8}]

    def cached(salt: str | None) -> int:
        usage = chat(client, messages=turns, max_tokens=1, cache_salt=salt)["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached("mine") == 0
    assert cached("mine") > 0
    assert cached("another's") == 0


def test_unknown_fields_are_named(client: httpx.Client) -> None:
    extra = {"frobnicate": 1, "x" * 1000: 2}
    told = chat(client, max_tokens=1, **extra)["warnings"]
    assert "'frobnicate'" in told[0]
    assert len(told[1]) < 100
    found = chunks(client, CHAT, messages=MESSAGES, max_tokens=5, **extra)
    assert found[0]["warnings"] == told
    assert not any("warnings" in chunk for chunk in found[1:])
    many = chat(client, max_tokens=1, **{f"field{i}": i for i in range(1000)})["warnings"]
    assert len(many) < 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("logits_processors", ["x"]),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("web_search_options", {}),
        ("documents", [{"text": "x"}]),
        ("chat_template", "{{ messages }}"),
        ("use_beam_search", True),
        ("length_penalty", 2.0),
        ("best_of", 2),
        ("lora", "x"),
        ("echo", True),
        ("add_special_tokens", True),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    client: httpx.Client, name: str, value: object
) -> None:
    error = refused(client, CHAT, **{name: value})
    assert error["param"] == name
    assert name in error["message"]


def test_what_asks_for_nothing_is_taken(client: httpx.Client) -> None:
    harmless = {
        "best_of": 1,
        "modalities": ["text"],
        "functions": None,
        "length_penalty": 1.0,
        "use_beam_search": False,
        "logits_processors": [],
        "user": "me",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "stop": None,
        "logit_bias": None,
    }
    assert "warnings" not in chat(client, max_tokens=1, **harmless)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("logprobs", {"logprobs": 1}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user"}]}),
        ("messages", {"messages": "hello"}),
        ("max_tokens", {"max_tokens": 0}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"chat_template": "x"}}),
        ("cache_salt", {"cache_salt": "a/b"}),
        ("cache_salt", {"cache_salt": ""}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
    ],
)
def test_what_contradicts_itself_is_refused(
    client: httpx.Client, param: str, body: dict[str, object]
) -> None:
    assert refused(client, CHAT, **body)["param"] == param


def test_another_model_is_not_found(client: httpx.Client) -> None:
    reply = client.post(CHAT, json={"messages": MESSAGES, "model": "other"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_content_in_parts(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": MESSAGES[0]["content"]}]
    body = {"temperature": 0, "max_tokens": 5, "return_token_ids": True}
    found = chat(client, messages=[{"role": "user", "content": parts}], **body)
    assert found["prompt_token_ids"] == chat(client, **body)["prompt_token_ids"]
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}]
    error = refused(client, CHAT, messages=[{"role": "user", "content": image}])
    assert error["message"].startswith("messages[0].content[0].image_url: this model reads no images")
    assert error["param"] == "messages[0].content[0].image_url"


def test_the_document_describes_the_body(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["required"] == ["messages"]
    assert "top_logprobs" in json.dumps(schema)


# Tools and structures

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 2, 3]}},
                "required": ["city", "days"],
            },
        },
    }
    for name in ("get_weather", "get_news")
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "maximum": 9}},
    "required": ["name", "age"],
}


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call["function"]["arguments"])
    return found


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "get_news"}}])
def test_calls_that_must_be_made(client: httpx.Client, tool_choice: Any) -> None:
    body = {"tools": TOOLS, "tool_choice": tool_choice, "n": 4, "max_tokens": 400, **SAMPLED}
    body |= {"logprobs": True, "return_token_ids": True, "parallel_tool_calls": False}
    whole = chat(client, **body)["choices"]
    for choice in whole:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["function"]["name"] in ("get_weather", "get_news")
        if tool_choice != "required":
            assert call["function"]["name"] == "get_news"
        assert arguments_of(call)["days"] in (1, 2, 3)
    streamed = joined_chat(chunks(client, CHAT, messages=MESSAGES, **body))
    assert len(streamed) == 4
    for choice, other in zip(streamed, whole, strict=True):
        ids = [c["message"]["tool_calls"][0].pop("id") for c in (choice, other)]
        assert ids[0] != ids[1]
        choice["message"]["content"] = choice["message"]["content"] or None
        assert choice == other


def test_a_tool_that_nothing_can_follow_is_named(client: httpx.Client) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(30):
        deep = {"type": "array", "items": deep, "minItems": 9, "maxItems": 9}
    bad = {"name": "dig", "strict": True, "parameters": {"type": "object", "properties": {"a": deep}}}
    bad["parameters"] |= {"patternProperties": {"(": {}}}
    error = refused(client, CHAT, tools=[TOOLS[0], {"type": "function", "function": bad}])
    assert error["param"] == "tools[1].function.parameters"


def test_calls_side_by_side(client: httpx.Client, llm: LLM) -> None:
    """A model that does not come to an end: calls that were begun are told, and that they are too long."""
    endless = {str(token): -100 for token in llm.frontend.eos_token_ids}
    body = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 300, "logit_bias": endless, **SAMPLED}
    (whole,) = chat(client, **body)["choices"]
    calls = whole["message"]["tool_calls"]
    assert len(calls) > 2
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(arguments_of(call)["days"] in (1, 2, 3) for call in calls[:-1])
    assert whole["finish_reason"] == "length"
    (streamed,) = joined_chat(chunks(client, CHAT, messages=MESSAGES, **body))
    made = [call["function"] for call in streamed["message"]["tool_calls"]]
    assert made == [call["function"] for call in calls]


def test_tools_that_need_not_be_called(client: httpx.Client) -> None:
    found = chat(client, tools=TOOLS, tool_choice="none", max_tokens=20, **SAMPLED)["choices"][0]
    assert "tool_calls" not in found["message"]
    assert found["message"]["content"]
    auto = {"tools": TOOLS, "max_tokens": 300, "n": 4, **SAMPLED}
    for choice in chat(client, **auto)["choices"]:
        called = "tool_calls" in choice["message"]
        assert (choice["finish_reason"] == "tool_calls") <= called
        assert called or choice["message"]["content"]


def test_a_conversation_goes_on_after_a_call(client: httpx.Client) -> None:
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'},
    }
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    assert chat(client, messages=turns, tools=TOOLS, max_tokens=5)["usage"]["prompt_tokens"] > 50


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "tools": TOOLS},
    ],
)
def test_an_answer_that_follows_a_schema(client: httpx.Client, form: dict[str, Any]) -> None:
    body = {**form, "max_tokens": 300, **SAMPLED}
    (whole,) = chat(client, **body)["choices"]
    if "tool_calls" not in whole["message"]:
        found = json.loads(whole["message"]["content"])
        assert isinstance(found["name"], str)
        assert isinstance(found["age"], int)
    assert joined_chat(chunks(client, CHAT, messages=MESSAGES, **body))[0]["finish_reason"] != "length"


def test_other_structures(client: httpx.Client) -> None:
    def answer(**body: Any) -> str:
        text: str = chat(client, max_tokens=200, **body, **SAMPLED)["choices"][0]["message"]["content"]
        return text

    assert answer(structured_outputs={"choice": ["red", "green"]}) in ("red", "green")
    assert answer(structured_outputs={"regex": "[0-9]{3}-[0-9]{2}"})[3] == "-"
    assert answer(structured_outputs={"grammar": 'start: "a" "b"+ "c"'}).startswith("ab")
    assert answer(response_format={"type": "text"})
    begun = answer(response_format={"type": "json_object"})
    assert begun.startswith("{")


@pytest.mark.parametrize(
    ("param", "body"),
    [
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        ),
        ("structured_outputs", {"structured_outputs": {"regex": "("}}),
        ("structured_outputs", {"structured_outputs": {"grammar": "start: x"}}),
        (
            "response_format",
            {"structured_outputs": {"json": SCHEMA}, "response_format": {"type": "json_object"}},
        ),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "perhaps"}),
        (
            "tools[0].function.parameters",
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"type": "object", "properties": {"a": {"type": "x"}}},
                            "strict": True,
                        },
                    }
                ]
            },
        ),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools[0]", {"tools": [{"type": "web_search"}]}),
    ],
)
def test_what_no_grammar_can_be_made_of(client: httpx.Client, param: str, body: dict[str, Any]) -> None:
    error = refused(client, CHAT, **body)
    assert error["param"] == param
