"""`prediction` of chat completions: what a client expects of an answer. It changes no answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai_client import CHAT, COMPLETIONS, MESSAGES, chat, chunks, refused

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.server.chat_task import count_predicted
from quire.types import NewRequest

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "logprobs": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_threads=1) as llm:
        yield llm


def predicted(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


@pytest.mark.parametrize("wrong", [False, True])
def test_no_answer_changes(client: httpx.Client, wrong: bool) -> None:
    plain = chat(client, **GREEDY)
    (choice,) = plain["choices"]
    text = "Something else altogether." if wrong else choice["message"]["content"]
    parts = [{"type": "text", "text": text[:10]}, {"type": "text", "text": text[10:]}]
    for content in (text, parts, ""):
        found = chat(client, **GREEDY, **predicted(content))
        assert found["choices"] == plain["choices"]
        assert "warnings" not in found
        details = found["usage"]["completion_tokens_details"]
        assert details.keys() == {
            "reasoning_tokens",
            "accepted_prediction_tokens",
            "rejected_prediction_tokens",
        }
        assert found["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    options = {"include_usage": True}
    found = chunks(client, CHAT, messages=MESSAGES, **GREEDY, **predicted(parts), stream_options=options)
    assert found[-1]["usage"]["completion_tokens_details"].keys() == details.keys()


def test_other_endpoints_do_without(client: httpx.Client) -> None:
    body = {"prompt": "Once", "max_tokens": 1, **predicted("upon a time")}
    assert "warnings" not in client.post(COMPLETIONS, json=body).json()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"type": "content", "content": "fox " * 1025}, "no answer more than 1,024"),
        ({"type": "content", "content": "x" * 300_000}, "more than 1,171 tokens, and no answer more"),
        ({"type": "audio", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content is missing"),
        ({"type": "content", "content": [{"type": "image_url", "text": "x"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ("x", "prediction"),
    ],
)
def test_what_is_no_prediction(client: httpx.Client, value: Any, message: str) -> None:
    error = refused(client, CHAT, prediction=value)
    assert error["param"] == "prediction"
    assert message in error["message"]
    assert error["code"] != "context_length_exceeded", "agents would shorten the conversation"


def test_nothing_is_predicted(client: httpx.Client) -> None:
    assert "warnings" not in chat(client, max_tokens=1, prediction=None)


def test_what_the_engine_gets(llm: LLM) -> None:
    """Text that reads like a control token is text, and nothing is put before it."""
    frontend, text = llm.frontend, "a fox<|im_end|>"
    prompt = frontend.encode({"prompt": "Once", "prediction": text})
    request = frontend.request(prompt, SamplingParams(), request_id="1", arrival_s=0.0)
    tokenizer = frontend.need_tokenizer()
    assert request.predicted_token_ids == tuple(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.decode(request.predicted_token_ids, skip_special_tokens=True) == text
    plain = frontend.encode("Once")
    assert prompt.token_ids == plain.token_ids
    assert plain.predicted_token_ids == ()


def test_of_prompts_in_python(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1)
    prompts: list[Any] = ["Once upon", {"prompt": "Once upon", "prediction": " a time there was"}]
    plain, predicted = llm.generate(prompts, params, use_tqdm=False)
    assert plain.outputs[0].token_ids == predicted.outputs[0].token_ids
    assert plain.outputs[0].logprobs == predicted.outputs[0].logprobs
    with pytest.raises(RequestError, match="prediction must be text"):
        llm.generate({"prompt": "Once", "prediction": [1, 2]}, params, use_tqdm=False)


def test_tokens_that_do_not_exist(llm: LLM) -> None:
    """They would be computed."""
    request = NewRequest("1", (1, 2), SamplingParams(), predicted_token_ids=(5, 1 << 20))
    with pytest.raises(RequestError, match="not in the vocabulary"):
        llm.engine.add(request)


@pytest.mark.parametrize(
    ("predicted", "answers", "expected"),
    [
        ((1, 2, 3, 4, 5, 6), [[1, 2, 3, 4, 5, 6]], 6),
        ((1, 2, 3, 4, 5, 6), [[9, 1, 2, 3, 4, 9, 5, 6]], 4),
        ((1, 2, 3, 4, 9, 5, 6, 7, 8), [[5, 6, 7, 8, 0, 1, 2, 3, 4]], 8),
        ((1, 2, 3, 4, 5, 6), [[1, 2, 3, 9, 4, 5, 6]], 0),
        ((1, 2), [[0, 1, 2]], 2),
        ((1, 2), [[2, 1]], 0),
        ((1, 2, 3, 4) * 5, [[1, 2, 3, 4]], 4),
        ((1, 2, 3, 4, 0, 5, 6, 7, 8), [[1, 2, 3, 4], [5, 6, 7, 8]], 8),
        ((1, 2, 3, 4), [[]], 0),
    ],
)
def test_predicted_tokens_that_appear(
    predicted: tuple[int, ...], answers: list[list[int]], expected: int
) -> None:
    assert count_predicted(predicted, answers) == expected


def test_counts_tell_how_good_a_prediction_was(client: httpx.Client) -> None:
    """They are the same however often the answer was drafted from elsewhere."""
    text = chat(client, **GREEDY)["choices"][0]["message"]["content"]
    for content, share in ((text, 1.0), ("A squirrel wrote seven letters.", 0.0), (text + " " + text, 0.5)):
        details = chat(client, **GREEDY, **predicted(content))["usage"]["completion_tokens_details"]
        accepted, rejected = (details[f"{name}_prediction_tokens"] for name in ("accepted", "rejected"))
        assert accepted / (accepted + rejected) == pytest.approx(share, abs=0.03)
