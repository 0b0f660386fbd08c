"""llama.cpp's own endpoints: /completion and its stream, what is refused, properties, slots, templates."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from outside_values import VALUES, replaced
from requests_over_http import idle, wait_for
from server import Server

from quire.errors import EngineDead
from quire.server.errors import HTTPRefusal
from quire.server.llamacpp.completion import _failed
from quire.server.llamacpp.protocol import REFUSED_HERE, SUPPORTED, LlamacppCompletionRequest
from quire.server.llamacpp.routes import slots
from quire.server.unsupported_fields import IGNORED, OFF_FROM, OFF_UP_TO, REFUSED

PATH = "/completion"
STORY: list[Any] = [{"role": "user", "content": "Tell me a story about a dragon."}]
SAMPLED = {"seed": 5, "temperature": 1.0, "top_p": 1.0}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"enum": [1, 2]}},
    "required": ["age"],
    "additionalProperties": False,
}
Object = dict[str, Any]


def ask(client: httpx.Client, **body: Any) -> Any:
    reply = client.post(PATH, json={"prompt": "Once upon a time", "n_predict": 12, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(client: httpx.Client, path: str = PATH, status: int = 400, **body: Any) -> str:
    """What is said of a request that is refused, in llama.cpp's shape."""
    reply = client.post(path, json={"prompt": "Once upon a time", "n_predict": 12, **body})
    assert reply.status_code == status, (reply.status_code, reply.text)
    error: Object = reply.json()["error"]
    assert error.keys() == {"code", "message", "type"}
    assert error["code"] == status
    message: str = error["message"]
    return message


def events(client: httpx.Client, **body: Any) -> list[Object]:
    given = {"prompt": "Once upon a time", "n_predict": 12, "stream": True, **body}
    with client.stream("POST", PATH, json=given) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        *found, rest = reply.read().decode().split("\n\n")
    assert rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in found]


def template(client: httpx.Client, **body: Any) -> str:
    prompt: str = client.post("/apply-template", json={"messages": STORY, **body}).json()["prompt"]
    return prompt


def test_a_prompt_of_the_template_is_a_conversation(client: httpx.Client) -> None:
    """Its control tokens are control tokens, so the model reads what it reads of a conversation."""
    chat = client.post("/v1/chat/completions", json={"messages": STORY, **SAMPLED, "max_tokens": 60}).json()
    found = ask(client, prompt=template(client), **SAMPLED, n_predict=60)
    assert found["content"] == chat["choices"][0]["message"]["content"]
    assert found["tokens_evaluated"] == chat["usage"]["prompt_tokens"]
    assert found["tokens_predicted"] == chat["usage"]["completion_tokens"]


def test_a_template_with_tools_and_without_a_turn_of_the_assistant(client: httpx.Client) -> None:
    assert template(client).endswith("<|im_start|>assistant\n")
    assert template(client, add_generation_prompt=False).endswith("<|im_end|>\n")
    tool = {"type": "function", "function": {"name": "get_news", "parameters": {"type": "object"}}}
    assert "get_news" in template(client, tools=[tool])
    reply = client.post("/apply-template", json={"messages": []})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, 400)


def test_a_response(client: httpx.Client) -> None:
    found = ask(client, **SAMPLED, return_tokens=True)
    assert found["stop"] is True
    assert (found["index"], found["model"], found["prompt"]) == (0, "demo", "Once upon a time")
    assert found["tokens_predicted"] == len(found["tokens"]) == 12
    assert (found["stop_type"], found["stopping_word"], found["truncated"]) == ("limit", "", False)
    timings = found["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == found["tokens_evaluated"]
    assert timings["predicted_n"] == 12
    assert timings["prompt_per_second"] > 0
    assert timings.get("draft_n_accepted", 0) <= timings.get("draft_n", 0) < 64 * 12
    settings = found["generation_settings"]
    assert (settings["n_predict"], settings["seed"], settings["top_p"]) == (12, 5, 1.0)
    assert ask(client)["tokens"] == []
    decoded = client.post("/detokenize", json={"tokens": found["tokens"]}).json()["content"]
    assert decoded == found["content"]


def test_a_stream_is_the_response_in_parts(client: httpx.Client) -> None:
    options = {**SAMPLED, "n_predict": 60, "n_probs": 2, "stop": ["never"]}
    whole = ask(client, **options, return_tokens=True)
    *parts, last = events(client, **options)
    assert not any(part["stop"] for part in parts)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [i for part in parts for i in part["tokens"]] == whole["tokens"]
    probabilities = [p for part in parts for p in part.get("completion_probabilities", ())]
    assert probabilities == whole["completion_probabilities"]
    assert (last["content"], last["tokens"], last["stop"]) == ("", [], True)
    for name in ("stop_type", "tokens_predicted", "tokens_evaluated", "generation_settings", "model"):
        assert last[name] == whole[name]
    assert "timings" not in parts[0]
    assert events(client, timings_per_token=True)[0]["timings"]["predicted_n"] > 0


def test_how_it_ends(client: httpx.Client) -> None:
    story = ask(client, prompt=template(client), temperature=0, n_predict=-1)
    assert (story["stop_type"], story["stopping_word"]) == ("eos", "")
    word = story["content"].split()[3]
    stopped = ask(client, prompt=template(client), temperature=0, stop=["", word, "never"])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert stopped["content"] == story["content"].partition(word)[0]
    full = ask(client, prompt=[5] * 1000, n_predict=-1, ignore_eos=True)
    assert (full["stop_type"], full["truncated"], full["tokens_predicted"]) == ("limit", True, 24)


def test_probabilities(client: httpx.Client) -> None:
    found = ask(client, temperature=0, n_probs=3, return_tokens=True)
    entries = found["completion_probabilities"]
    assert [entry["id"] for entry in entries] == found["tokens"]
    for entry in entries:
        assert entry["top_logprobs"][0]["id"] == entry["id"]
        assert len(entry["top_logprobs"]) == 3
        assert entry.keys() == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
    assert "completion_probabilities" not in ask(client)


def test_prompts_of_every_form(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"content": "Once upon a time"}).json()["tokens"]
    text = ask(client, temperature=0)
    assert ask(client, temperature=0, prompt=ids)["content"] == text["content"]
    assert ask(client, temperature=0, prompt=ids)["prompt"] == "Once upon a time"
    half = client.post("/detokenize", json={"tokens": ids[1:]}).json()["content"]
    mixed = ask(client, temperature=0, prompt=[ids[0], half])
    assert mixed["content"] == text["content"]
    several = ask(client, temperature=0, prompt=["The", ids, [ids[0], half]])
    assert [one["index"] for one in several] == [0, 1, 2]
    assert several[1]["content"] == several[2]["content"] == text["content"]
    assert ask(client, temperature=0, prompt=["Once upon a time"])["content"] == text["content"]
    joined = {0: "", 1: ""}
    for event in events(client, temperature=0, prompt=["The", "Once upon a time"]):
        joined[event["index"]] += event["content"]
    assert joined == {0: several[0]["content"], 1: text["content"]}
    control = ask(client, prompt=["<|im_end|>", 5])
    assert control["tokens_evaluated"] == 2


@pytest.mark.parametrize(
    "prompt", ["", [], [-1], [2048], [[5], [99999]], [1.5], {"prompt_string": "a"}, None]
)
def test_prompts_that_are_none(client: httpx.Client, prompt: Any) -> None:
    assert refused(client, prompt=prompt)


def test_a_prompt_that_is_too_long(client: httpx.Client) -> None:
    for prompt in ([5] * 1024, "word " * 100_000, ["word " * 100_000, 5]):
        reply = client.post(PATH, json={"prompt": prompt})
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "exceed_context_size_error")


def test_a_grammar_and_a_schema(client: httpx.Client) -> None:
    grammar = 'root ::= ("yes" | "no") "!"'
    assert ask(client, grammar=grammar)["content"] in ("yes!", "no!")
    found = ask(client, json_schema=SCHEMA, temperature=0, n_predict=40)
    jsonschema.validate(json.loads(found["content"]), SCHEMA)
    assert found["stop_type"] == "eos"
    assert refused(client, grammar="root ::= nothing").startswith("grammar")
    assert refused(client, json_schema={"type": "nothing"}).startswith("json_schema")
    assert "contradict" in refused(client, grammar=grammar, json_schema={})


def test_biases(client: httpx.Client) -> None:
    (token,) = client.post("/tokenize", json={"content": "z"}).json()["tokens"]
    for bias in ([[token, 100]], [["z", 100]], {"z": 100}, {str(token): 100}):
        found = ask(client, temperature=0, logit_bias=bias, n_predict=3, return_tokens=True)
        assert found["tokens"] == [token] * 3
    first = ask(client, temperature=0, n_predict=1, return_tokens=True)["tokens"]
    other = ask(client, temperature=0, logit_bias=[[first[0], False]], return_tokens=True)["tokens"]
    assert first[0] not in other
    assert refused(client, logit_bias=[[5, True]]).startswith("logit_bias")
    assert refused(client, logit_bias=[[9999, False]]).startswith("logit_bias")
    assert refused(client, logit_bias=[[5, 1e9]]).startswith("logit_bias")
    assert refused(client, logit_bias=[[5, "1"]]).startswith("logit_bias")
    assert refused(client, logit_bias=[[5, 1]] * 5000) == "logit_bias has more than 4,096 entries"
    assert refused(client, logit_bias=[["x" * 300, 1]]) == "logit_bias: a text has more than 256 characters"


def test_penalties(client: httpx.Client) -> None:
    options = {"prompt": template(client), "temperature": 0, "n_predict": 60}
    plain = ask(client, **options)
    punished = ask(client, **options, repeat_penalty=1.9, repeat_last_n=64)
    assert punished["content"] != plain["content"]
    assert punished["warnings"] == ["repeat_last_n has no effect: penalties apply to the whole text"]
    off = ask(client, **options, repeat_penalty=1.9, repeat_last_n=0)
    assert off["content"] == plain["content"]
    assert "warnings" not in off


@pytest.mark.parametrize("seed", [-1, (1 << 32) - 1])
def test_any_seed(client: httpx.Client, seed: int) -> None:
    found = {ask(client, seed=seed, n_predict=1)["generation_settings"]["seed"] for _ in range(3)}
    assert len(found) == 3
    assert seed not in found


ASKED_FOR: dict[str, Any] = {
    **dict.fromkeys({*REFUSED, *REFUSED_HERE}.difference(SUPPORTED, {"penalize_nl"}), 0.5),
    "min_keep": 2,
    "n": 2,
    "n_probs": 21,
    "prompt_logprobs": 1,
    "repeat_penalty": 5,
    "samplers": ["temperature", "top_k"],
    "stop": [5],
    "temperature": -1,
}


@pytest.mark.parametrize("name", sorted(ASKED_FOR))
def test_what_is_not_done_is_refused_by_its_name(client: httpx.Client, name: str) -> None:
    assert refused(client, **{name: ASKED_FOR[name]}).startswith(name)


def test_lengths_of_drafts_change_nothing(client: httpx.Client) -> None:
    lengths = {"speculative.n_max": 16, "speculative.n_min": 0, "speculative.p_min": 0.75}
    found, plain = ask(client, **SAMPLED, **lengths), ask(client, **SAMPLED)
    assert "warnings" not in found
    assert found["content"] == plain["content"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert "warnings" not in client.post("/v1/chat/completions", json=body | lengths).json()
    assert "warnings" in ask(client, **{"speculativ.n_max": 1})


def test_what_asks_for_nothing_is_taken(client: httpx.Client) -> None:
    """All that a front end sends, at its defaults, and what only says how an absent sampler would work."""
    plain = ask(client, **SAMPLED)
    defaults: Object = {**OFF_UP_TO, **OFF_FROM, **dict.fromkeys(IGNORED, 1)}
    defaults |= dict.fromkeys(("grammar_lazy", "lora", "image_data", "response_fields", "n_cmpl"))
    defaults |= {
        "grammar": "",
        "stop": [],
        "timings_per_token": False,
        "repeat_last_n": 64,
        "repeat_penalty": 1,
        "n": 1,
        "n_probs": 0,
    }
    del defaults["grammar_triggers"], defaults["preserved_tokens"], defaults["return_progress"]
    found = ask(client, **SAMPLED, **defaults)
    assert found["content"] == plain["content"]
    assert "warnings" not in found
    order = ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    for samplers in (order, "edskypmxt"):
        (warning,) = ask(client, samplers=samplers)["warnings"]
        assert warning.startswith("samplers are applied in this order")
    assert ask(client, return_progress=True, surprise=1)["warnings"] == [
        "unknown field 'surprise' has no effect",
        "return_progress has no effect",
    ]


@pytest.mark.parametrize("value", [name for name in VALUES if "long" not in name])
def test_odd_values_of_every_field(client: httpx.Client, value: str) -> None:
    base: Object = {"prompt": "Once", "n_predict": 1}
    alike = {*REFUSED, *IGNORED}.difference(SUPPORTED, {"lora", "id_slot"})  # of any type: two stand for all
    for field in msgspec.structs.fields(LlamacppCompletionRequest):
        if field.name in alike:
            continue
        body = replaced(base, field.encode_name, VALUES[value])
        headers = {"Content-Type": "application/json"}
        reply = client.post(PATH, content=body, headers=headers)
        statuses = (200, 400, 404) if field.name == "model" else (200, 400)
        assert reply.status_code in statuses, (field.name, value, reply.text)
        if reply.status_code != 200:
            error = reply.json()["error"]
            assert error.keys() == {"code", "message", "type"}
            assert len(error["message"]) < 1000


def test_fields_that_may_be_long(client: httpx.Client) -> None:
    letters = "x" * 300_000
    assert ask(client, json_schema={"enum": [letters]})["content"] == '"xxxxxxxxxxx'
    for field in ("grammar", "json_schema"):
        value: Any = letters * 7 if field == "grammar" else {"enum": [letters * 7]}
        assert "1,048,576 characters" in refused(client, **{field: value})
    assert refused(client, stop=[letters]).startswith("stop[0] must be a string of 1 to 1,024")


def test_an_error_within_a_stream() -> None:
    event = _failed(EngineDead("gone")).decode()
    assert event.startswith("data: ")
    assert event.endswith("\n\n")
    assert json.loads(event[6:])["error"]["code"] == 503


def test_another_model(client: httpx.Client) -> None:
    assert "not served" in refused(client, status=404, model="other")


def test_what_the_server_is(client: httpx.Client) -> None:
    found = client.get("/props").json()
    assert (found["model_path"], found["model_alias"]) == ("demo", "demo")
    assert found["total_slots"] == 64
    assert found["default_generation_settings"]["n_ctx"] == 1024
    assert found["default_generation_settings"]["params"]["temperature"] == 0.5  # the model's own
    assert found["modalities"] == {"vision": False, "audio": False}
    assert (found["bos_token"], found["eos_token"]) == ("<|endoftext|>", "<|im_end|>")
    assert "im_start" in found.pop("chat_template")
    assert "/" not in json.dumps(found)


@pytest.mark.parametrize("path", ["/props", "/infill", "/slots/0?action=save"])
def test_what_is_refused_whatever_is_sent(client: httpx.Client, path: str) -> None:
    assert refused(client, path, status=501)
    assert client.post(path).json()["error"]["type"] == "not_supported_error"


def test_slots_tell_lengths_and_no_text(server: Server, client: httpx.Client) -> None:
    wait_for(lambda: idle(server), 60, "nothing runs")
    assert not any(slot["is_processing"] for slot in client.get("/slots").json())
    ids = client.post("/tokenize", json={"content": "Once upon a time"}).json()["tokens"]
    body = {"prompt": ids, "n_predict": 900, "ignore_eos": True, "stream": True, "temperature": 2}
    with server.client() as other, client.stream("POST", PATH, json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        answered = other.get("/slots", params={"fail_on_no_slot": 1})
    found = answered.json()
    assert [slot["id"] for slot in found] == list(range(64))
    assert all(slot["speculative"] for slot in found)
    (busy,) = (slot for slot in found if slot["is_processing"])
    assert busy["n_prompt_tokens"] == len(ids)
    assert busy["next_token"]["n_decoded"] > 0
    assert busy["next_token"]["n_decoded"] + busy["next_token"]["n_remain"] == 900
    assert "upon" not in answered.text
    wait_for(lambda: idle(server), 1.0, "a client that goes ends its request")


def test_no_slot_is_idle() -> None:
    """What computes its prompt is busy, too, though nothing is known of it yet."""
    status, handle = SimpleNamespace(num_running=2), SimpleNamespace(prompts=[])
    config, frontend = SimpleNamespace(speculative="off"), SimpleNamespace(max_model_len=8)
    engine = SimpleNamespace(status=status)
    serving = SimpleNamespace(
        engine=engine,
        engine_config=config,
        frontend=frontend,
        requests=[handle],
        names=("demo",),
        num_slots=2,
    )
    app = SimpleNamespace(state=SimpleNamespace(service=serving))

    def asked(**query: str) -> Any:
        request: Any = SimpleNamespace(app=app, query_params=query)
        return json.loads(bytes(asyncio.run(slots(request)).body))

    assert [slot["is_processing"] for slot in asked()] == [True, True]
    with pytest.raises(HTTPRefusal, match="no slot") as caught:
        asked(fail_on_no_slot="1")
    assert caught.value.status == 503
    status.num_running = 1
    assert [slot["is_processing"] for slot in asked(fail_on_no_slot="1")] == [True, False]


def test_tokens_by_llamacpps_names(client: httpx.Client) -> None:
    def tokens(**body: Any) -> Any:
        reply = client.post("/tokenize", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["tokens"]

    assert len(tokens(content="<|im_start|>")) == 1
    assert len(tokens(content="<|im_start|>", parse_special=False)) > 1
    assert tokens(content="Hello") == tokens(prompt="Hello")
    pieces = tokens(content="Hé", with_pieces=True)
    assert [piece["id"] for piece in pieces] == tokens(content="Hé")
    assert pieces[0]["piece"] == "H"
    assert b"".join(bytes(p["piece"]) for p in pieces[1:]) == "é".encode()
    assert client.post("/tokenize", json={"content": "a", "prompt": "a"}).status_code == 400


def test_health(client: httpx.Client) -> None:
    assert client.get("/v1/health").json()["status"] == "ok"


def test_the_document(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    responses = paths[PATH]["post"]["responses"]
    assert "text/event-stream" in responses["200"]["content"]
    error = responses["default"]["content"]["application/json"]["schema"]["$ref"]
    assert error.endswith("/LlamacppErrorBody")
    assert {"/props", "/slots", "/apply-template", "/infill", "/completions"} <= paths.keys()
