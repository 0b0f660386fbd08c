"""/v1/chat/completions over real sockets: streams and whole responses, and LLM.chat beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator

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
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
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
    options = {"include_usage": True, "continuous_usage_stats": True}
    every = chunks(client, CHAT, stream_options=options, **body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in every]
    assert counts == sorted(counts)
    assert counts[-1] == whole["completion_tokens"]
    only = chunks(client, CHAT, stream_options={"continuous_usage_stats": True}, **body)
    assert only[-1]["choices"]
    assert all("usage" in chunk for chunk in only)


def test_a_choice_without_text_has_a_role_and_an_end(client: httpx.Client, llm: LLM) -> None:
    end = llm.frontend.eos_token_ids[0]
    found = chunks(client, CHAT, messages=MESSAGES, allowed_token_ids=[end])
    assert [choice["delta"] for choice in choices(found)] == [{"role": "assistant", "content": ""}, {}]
    whole = chat(client, allowed_token_ids=[end])
    assert whole["choices"][0]["message"]["content"] == ""
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("stop", 1)


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


def test_a_prompt_is_truncated(client: httpx.Client) -> None:
    whole = chat(client, max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    found = chat(client, max_tokens=1, return_token_ids=True, truncate_prompt_tokens=5)
    assert found["prompt_token_ids"] == whole[-5:]
    long = [{"role": "user", "content": "dragon " * 3000}]
    assert refused(client, CHAT, messages=long)["code"] == "context_length_exceeded"
    found = chat(client, messages=long, truncate_prompt_tokens=-1, max_tokens=24)
    assert found["usage"]["prompt_tokens"] == 1000


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
        ("prediction", {"type": "content", "content": "x"}),
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
        ("n", {"n": 2, "temperature": 0}),
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
    assert refused(client, CHAT, messages=[{"role": "user", "content": image}])["param"] == "messages"


def test_the_document_describes_the_body(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["required"] == ["messages"]
    assert "top_logprobs" in json.dumps(schema)
