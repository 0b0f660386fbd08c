"""/v1/completions over real sockets: echo, offsets, lists of prompts, and LLM.generate beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai_client import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    SAMPLED,
    ask,
    choices,
    chunks,
    joined_completions,
    refused,
)

from quire import LLM, SamplingParams

CONTEXT = 1024  # of the demo model, in tokens
PROMPT = "Once upon a time, in a small village by the sea"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_threads=1) as llm:
        yield llm


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    return ask(client, COMPLETIONS, **{"prompt": PROMPT, **body})


def test_a_response_has_the_shape_that_clients_read(client: httpx.Client) -> None:
    found = complete(client, ignore_eos=True)
    assert found["id"].startswith("cmpl-")
    assert found["object"] == "text_completion"
    (choice,) = found["choices"]
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    assert found["usage"]["completion_tokens"] == 16
    assert "timings" in found


def test_stream_response_and_llm_are_equal(client: httpx.Client, llm: LLM) -> None:
    prompts = [PROMPT, "The dragon", "It was"]
    asked = {"n": 3, "max_tokens": 30, "stop": [" the", "."], **SAMPLED}
    shown = {"logprobs": 2, "return_token_ids": True, "prompt": prompts}
    whole = complete(client, **asked, **shown)
    assert [choice["index"] for choice in whole["choices"]] == list(range(9))
    found = chunks(client, COMPLETIONS, **asked, **shown)
    assert joined_completions(found) == whole["choices"]
    own = llm.generate(prompts, SamplingParams(logprobs=2, **asked), use_tqdm=False)
    outputs = [(request, output) for request in own for output in request.outputs]
    for choice, (request, output) in zip(whole["choices"], outputs, strict=True):
        assert choice["prompt_token_ids"] == request.prompt_token_ids
        assert choice["text"] == output.text
        assert choice["token_ids"] == output.token_ids
        assert (choice["finish_reason"], choice["stop_reason"]) == (output.finish_reason, output.stop_reason)
        assert choice["logprobs"]["token_logprobs"] == [
            position[token].logprob for position, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        assert choice["logprobs"]["top_logprobs"] == [
            {entry.decoded_token: entry.logprob for entry in position.values()}
            for position in output.logprobs
        ]
    assert whole["usage"]["prompt_tokens"] == sum(len(request.prompt_token_ids) for request in own)


def test_greedy_choices_are_equal(client: httpx.Client) -> None:
    asked = {"prompt": [PROMPT, "The dragon"], "temperature": 0, "max_tokens": 9, "logprobs": 1, "echo": True}
    alone = complete(client, **asked)
    whole = complete(client, n=2, **asked)
    pairs = [choice for choice in alone["choices"] for _ in range(2)]
    assert whole["choices"] == [choice | {"index": index} for index, choice in enumerate(pairs)]
    assert whole["usage"]["completion_tokens"] == 2 * alone["usage"]["completion_tokens"]
    assert joined_completions(chunks(client, COMPLETIONS, n=2, **asked)) == whole["choices"]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_prompts_are_texts_or_token_ids(client: httpx.Client, llm: LLM, many: bool, as_ids: bool) -> None:
    encode = llm.get_tokenizer().encode
    texts = [PROMPT, "The"] if many else [PROMPT]
    prompts: list[Any] = [encode(text) for text in texts] if as_ids else texts
    body = {"temperature": 0, "max_tokens": 4}
    listed = [choice["text"] for choice in complete(client, prompt=prompts, **body)["choices"]]
    params = SamplingParams(**body)
    assert listed == [o.outputs[0].text for o in llm.generate(texts, params, use_tqdm=False)]
    if not many:
        assert complete(client, prompt=prompts[0], **body)["choices"][0]["text"] == listed[0]


def test_echo(client: httpx.Client, llm: LLM) -> None:
    body = {"temperature": 0, "max_tokens": 6, "n": 1}
    text = complete(client, **body)["choices"][0]["text"]
    whole = complete(client, echo=True, **body)
    assert whole["choices"][0]["text"] == PROMPT + text
    found = chunks(client, COMPLETIONS, prompt=PROMPT, echo=True, **body)
    assert next(choices(found))["text"] == PROMPT
    assert joined_completions(found)[0]["text"] == PROMPT + text
    ids = llm.get_tokenizer().encode(PROMPT)
    assert complete(client, prompt=ids, echo=True, **body)["choices"][0]["text"] == PROMPT + text


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_with_logprobs(client: httpx.Client, llm: LLM, max_tokens: int) -> None:
    """What harnesses of evaluation do: is a token of the prompt the most likely one?"""
    ids = llm.get_tokenizer().encode(PROMPT)
    body = {"prompt": [ids], "temperature": 0, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    found = complete(client, **body)
    (whole,) = found["choices"]
    assert found["usage"]["completion_tokens"] == max_tokens
    assert whole["finish_reason"] == "length"
    logprobs = whole["logprobs"]
    count = len(ids) + max_tokens
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), count
    )
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    columns = (logprobs[name][1:] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, logprob, top in zip(*columns, strict=True):
        assert top[token] == logprob
        assert 1 <= len(top) <= 2
    params = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1)
    (own,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    expected = [p[token].logprob for p, token in zip(own.prompt_logprobs[1:], ids[1:], strict=True)]
    assert logprobs["token_logprobs"][1 : len(ids)] == expected
    greedy = [p[token].rank == 1 for p, token in zip(own.prompt_logprobs[1:], ids[1:], strict=True)]
    tops = zip(logprobs["tokens"][1 : len(ids)], logprobs["top_logprobs"][1 : len(ids)], strict=True)
    assert [top[token] == max(top.values()) for token, top in tops] == greedy
    streamed = joined_completions(chunks(client, COMPLETIONS, **body))
    assert streamed == [whole]


def test_offsets_are_places_in_the_text(client: httpx.Client) -> None:
    prompt = "Zoë and the café — 東京, a dragon 🐉"
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 12, **SAMPLED}
    (whole,) = complete(client, **body)["choices"]
    tokens, offsets = whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    for token, begin, end in zip(tokens, offsets, [*offsets[1:], len(whole["text"])], strict=True):
        if "\ufffd" not in token:
            assert whole["text"][begin:end].endswith(token)  # behind what became of half a character
    assert "\ufffd" in "".join(tokens)
    (alone,) = complete(client, **{**body, "echo": False})["choices"]
    assert alone["logprobs"]["text_offset"][0] == 0
    assert [o + len(prompt) for o in alone["logprobs"]["text_offset"]] == offsets[-12:]


def test_tokens_that_read_alike_are_told_apart(client: httpx.Client, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    halves = [t for t in range(tokenizer.vocab_size) if tokenizer.token_text(t) == "\ufffd"][:8]
    body = {"allowed_token_ids": halves, "logprobs": 20, "max_tokens": 8, **SAMPLED}
    (found,) = complete(client, **body)["choices"]
    logprobs = found["logprobs"]
    columns = logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]
    for token, logprob, top in zip(*columns, strict=True):
        assert token == "\ufffd"
        assert top[token] == logprob
        assert len(top) >= 20  # none of the likely ones was lost to another
    (found,) = complete(client, return_tokens_as_token_ids=True, return_token_ids=True, **body)["choices"]
    assert found["logprobs"]["tokens"] == [f"token_id:{token}" for token in found["token_ids"]]


def test_prompt_logprobs(client: httpx.Client, llm: LLM) -> None:
    (found,) = complete(client, prompt_logprobs=0, max_tokens=1)["choices"]
    ids = llm.get_tokenizer().encode(PROMPT)
    assert found["prompt_logprobs"][0] is None
    assert [list(p) for p in found["prompt_logprobs"][1:]] == [[str(token)] for token in ids[1:]]
    (both,) = complete(client, prompt_logprobs=3, logprobs=1, echo=True, max_tokens=1)["choices"]
    assert all(3 <= len(p) <= 4 for p in both["prompt_logprobs"][1:])
    assert all(1 <= len(p) <= 2 for p in both["logprobs"]["top_logprobs"][1:])


def test_special_tokens_are_added_unless_refused(client: httpx.Client) -> None:
    body = {"max_tokens": 1, "return_token_ids": True}
    (found,) = complete(client, add_special_tokens=False, **body)["choices"]
    assert found["prompt_token_ids"]


def test_a_prompt_is_truncated(client: httpx.Client, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPT)
    body = {"max_tokens": 1, "return_token_ids": True, "echo": True}
    (found,) = complete(client, truncate_prompt_tokens=3, **body)["choices"]
    assert found["prompt_token_ids"] == ids[-3:]
    assert found["text"].startswith(llm.get_tokenizer().decode(ids[-3:]))
    (found,) = complete(client, truncate_prompt_tokens=3, truncation_side="right", **body)["choices"]
    assert found["prompt_token_ids"] == ids[:3]
    error = refused(client, COMPLETIONS, truncate_prompt_tokens=0)
    assert error["param"] == "prompt"


def test_usage_of_a_stream(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [PROMPT, "The"], "max_tokens": 7, "ignore_eos": True, "stream_options": options}
    *first, last = chunks(client, COMPLETIONS, **body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 14
    assert last["timings"]["completion_tokens"] == 14
    assert all("usage" in chunk and "timings" not in chunk for chunk in first)
    del body["stream_options"]
    found = chunks(client, COMPLETIONS, **body)
    assert "timings" in found[-1]
    assert not any("usage" in chunk for chunk in found)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("suffix", {"suffix": "the end"}),
        ("best_of", {"best_of": 3}),
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": True}),
        ("max_tokens", {"max_tokens": 0}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [[]]}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": [1, "a"]}),
        ("prompt", {"prompt": [1, 2048]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [1.5]}),
        ("prompt", {"prompt": [1 << 70]}),
        ("prompt", {"prompt": ["a"] * 1025}),
        ("n", {"prompt": ["a"] * 100, "n": 100}),
        ("prompt", {"prompt": [5] * 1024}),
        ("prompt_logprobs", {"prompt": [[5] * 1000] * 200, "prompt_logprobs": 20}),
        ("prompt", {"prompt": ["a"] * 1024, "structured_outputs": {"choice": ["x" * 40_000, "y"]}}),
        ("min_tokens", {"min_tokens": 17}),
        ("stream_options", {"stream_options": {}}),
    ],
)
def test_what_cannot_be_is_refused(client: httpx.Client, param: str, body: dict[str, Any]) -> None:
    assert refused(client, COMPLETIONS, **body)["param"] == param


def test_a_prompt_that_is_missing(client: httpx.Client) -> None:
    reply = client.post(COMPLETIONS, json={"max_tokens": 1})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


def test_many_prompts(client: httpx.Client, llm: LLM) -> None:
    prompts = [[token] for token in range(100, 300)]
    found = complete(client, prompt=prompts, max_tokens=2, temperature=0)
    params = SamplingParams(max_tokens=2, temperature=0)
    own = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert [choice["text"] for choice in found["choices"]] == [o.outputs[0].text for o in own]


def test_a_limit_of_minus_one_is_none(client: httpx.Client) -> None:
    """As clients of llama.cpp and LM Studio send it."""
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": MESSAGES, "max_tokens": -1}),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": -1}),
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": -1}),
    ]
    for path, body in asked:
        found = ask(client, path, **body, ignore_eos=True)
        assert found["choices"][0]["finish_reason"] == "length"
        assert found["usage"]["total_tokens"] == CONTEXT
    assert refused(client, CHAT, max_tokens=-2)["param"] == "max_tokens"


def test_parameters_that_leave_no_token(client: httpx.Client) -> None:
    """They show when they meet the model: the request's own doing, and no failure of the server."""
    body = {"allowed_token_ids": [500], "logit_bias": {"500": -100}, "bad_words": [], "max_tokens": 4}
    assert complete(client, **body)["usage"]["completion_tokens"] == 4
    error = refused(client, COMPLETIONS, allowed_token_ids=[500], structured_outputs={"regex": "[0-9]+"})
    assert error["message"].startswith("no token may follow")
