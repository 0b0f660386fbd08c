"""What the soak asks for, and how it is judged: shares of kinds, answers that are right and wrong."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
from endurance.answers import Answer, Case, well_formed
from endurance.asking import Exchange
from endurance.mixture import LARGEST_STEP, Mixture
from endurance.soaking import read_metrics

from quire.bench.http_client import Client, HttpReply


def drawn(count: int) -> list[Case]:
    mixture = Mixture("demo", 0, 20, 50)
    return [mixture.draw() for _ in range(count)]


def test_the_mixture_has_its_shares():
    kinds = Counter(case.kind for case in drawn(4000))
    shares = {"hung up on": 0.20, "invalid": 0.05, "grammar": 0.10, "tools": 0.05}
    assert {kind: kinds[kind] / 4000 for kind in shares} == pytest.approx(shares, abs=0.02)
    assert [case.body for case in drawn(50)] == [case.body for case in drawn(50)]


def test_the_largest_is_cut_to_what_a_step_holds():
    case = Mixture("demo", 0, 20, 50).largest()
    body = json.loads(case.body)
    assert (body["echo"], body["logprobs"], body["truncate_prompt_tokens"]) == (True, 1, LARGEST_STEP)
    assert len(body["prompt"].split()) == LARGEST_STEP  # each is a token at least


def whole(text: str, reason: str = "stop", **rest) -> Answer:
    message = {"content": text, **rest}
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    choice = {"index": 0, "message": message, "text": text, "finish_reason": reason}
    return Answer(200, {"choices": [choice], "usage": usage})


def only(kind: str, words: str = "") -> Case:
    """The first case of a kind whose body has these words."""
    return next(case for case in drawn(4000) if case.kind == kind and words.encode() in case.body)


GOOD_ANIMAL = '{"name": "Rita", "age": 3, "kind": "fox", "tags": []}'


@pytest.mark.parametrize(
    ("case", "good", "bad"),
    [
        (only("grammar", "json_schema"), GOOD_ANIMAL, GOOD_ANIMAL.replace("3", "151")),
        (only("grammar", "json_object"), "{}", "[]"),
        (only("grammar", "regex"), "AB-1234-aa", "AB-123"),
        (only("grammar", "choice"), "red", "red "),
        (only("grammar", "start:"), "1 + 22", "1 +"),
    ],
)
def test_answers_are_held_to_their_grammar(case, good, bad):
    assert case.problem(whole(good)) == ""
    assert case.problem(whole(bad)) != ""
    assert case.problem(whole(bad, "length")) == ""  # it was cut


def test_answers_are_held_to_their_tools():
    case = only("tools")
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Rome", "days": 2}'}}
    assert case.problem(whole("", "tool_calls", tool_calls=[call])) == ""
    assert "calls" in case.problem(whole("", "tool_calls"))
    for wrong in ('{"city": "Rome"}', '{"city": "Rome, the eternal one", "days": 2}', '{"city": "Rome"'):
        call["function"]["arguments"] = wrong
        assert "calls" in case.problem(whole("", "tool_calls", tool_calls=[call]))


def streamed(*choices: dict, num_done: int = 1) -> Answer:
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    events = [{"choices": [choice], "usage": None} for choice in choices]
    return Answer(200, events=[*events, {"choices": [], "usage": usage}], num_done=num_done)


def test_a_stream_ends_each_choice_once():
    text, end = {"index": 0, "text": "a"}, {"index": 0, "text": "b", "finish_reason": "stop"}
    assert well_formed(streamed(text, end)) == ""
    assert streamed(text, end).text() == "ab"
    assert "choices ended" in well_formed(streamed(text))
    assert "choices ended" in well_formed(streamed(end, end))
    assert "choices ended" in well_formed(streamed(text, end), n=2)
    assert "[DONE]" in well_formed(streamed(text, end, num_done=2))
    assert "finish reasons" in well_formed(streamed({**end, "finish_reason": "abort"}))


def response(*deltas: str, text: str = "ab", status: str = "completed", total: int = 3) -> list[dict]:
    usage = {"input_tokens": 2, "output_tokens": 1, "total_tokens": total}
    items = [{"type": "message", "content": [{"type": "output_text", "text": text}]}]
    told = {"status": status, "output": items, "usage": usage}
    events = [{"type": "response.output_text.delta", "delta": delta} for delta in deltas]
    events.append({"type": "response.completed", "response": told})
    return [event | {"sequence_number": number} for number, event in enumerate(events)]


def test_responses_add_up():
    case = only("responses", '"stream": true')
    assert case.problem(Answer(200, events=response("a", "b"))) == ""
    assert case.problem(Answer(200, response()[-1]["response"])) == ""
    assert "deltas" in case.problem(Answer(200, events=response("a")))
    assert "numbered" in case.problem(Answer(200, events=response("a", "b")[::2]))
    assert "add up" in case.problem(Answer(200, events=response("ab", total=4)))
    assert "which is incomplete" in case.problem(Answer(200, events=response("ab", status="incomplete")))
    assert "ended with" in case.problem(Answer(200, events=response("ab", status="failed")))
    assert "ended with" in case.problem(Answer(200, events=response("ab")[:1]))


def message(*kinds: str, reason: str = "end_turn") -> list[dict]:
    return [{"type": kind, "delta": {"stop_reason": reason}} for kind in kinds]


def test_messages_begin_and_end():
    case, block = only("messages"), ("content_block_start", "content_block_delta", "content_block_stop")
    whole = ("message_start", *block, "message_delta", "message_stop")
    assert case.problem(Answer(200, events=message("message_start", "ping", *whole[1:]))) == ""
    assert case.problem(Answer(200, {"type": "message", "stop_reason": "max_tokens"})) == ""
    assert "ended with" in case.problem(Answer(200, {"type": "message", "stop_reason": None}))
    assert "began with" in case.problem(Answer(200, events=message(*whole[1:])))
    assert "ended with" in case.problem(Answer(200, events=message(*whole[:-1])))
    assert "did not end" in case.problem(Answer(200, events=message(*whole[:3], *whole[4:])))
    assert "because" in case.problem(Answer(200, events=message(*whole, reason="refusal")))


class StuckClient(Client):
    """The server says nothing, ever."""

    async def post(self, path: str, body: bytes, on_event: object = None) -> HttpReply:
        await asyncio.Event().wait()
        raise AssertionError


def test_a_request_without_an_end_hangs():
    one = Exchange(only("chat"))
    asyncio.run(one.run(StuckClient("http://127.0.0.1:1"), 0.5))
    assert one.hung
    assert "did not end" in one.problem
    assert not one.ended_with_engine


def test_what_is_invalid_must_be_refused_in_words():
    case = only("invalid", '"temperature": 3')
    error = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}
    assert case.problem(Answer(400, {"error": error})) == ""
    assert "HTTP 500" in case.problem(Answer(500, {"error": error}))
    assert "another shape" in case.problem(Answer(400, {"detail": "no"}))
    assert "HTTP 200" in case.problem(whole("accepted"))


def test_metrics_are_summed_over_labels():
    text = '# HELP a b\na_total{x="1"} 2.0\na_total{x="2 y"} 3\nb_bucket{le="1"} 9\nc 1e-3\n'
    assert read_metrics(text) == {"a_total": 5.0, "c": 0.001}
