"""Structured output on the demo model: what comes is what was asked for, and no neighbour notices."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
from constrained import verify_all

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.errors import RequestError
from quire.grammar.grammars import Grammars, Matcher
from quire.outputs import CompletionOutput, RequestOutput
from quire.runner.masks import GrammarState, Masks
from quire.types import Admission

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "\U0001f642", "\u6f22\u5b57"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
WORDS = StructuredOutputsParams(regex="([a-z]{6,8} ){16}end")
PROMPTS = ["Tell me about a fox.", "Once upon a time", "Hi", "What is 3 + 4?"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=150, structured_outputs=StructuredOutputsParams(json=PERSON)),
    SamplingParams(temperature=0.9, seed=3, max_tokens=100, n=3, logprobs=1, structured_outputs=WORDS),
    SamplingParams(temperature=1, seed=4, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=1, seed=5, max_tokens=150, structured_outputs={"json": PERSON}),
]


@pytest.fixture(scope="module", params=["native", "reference"])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(device: str) -> Iterator[LLM]:
    with LLM("demo", device=device) as made:
        yield made


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[Any]]:
    return [taken(ask(llm, prompt, own)) for prompt, own in zip(PROMPTS, PARAMS, strict=True)]


def ask(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0]


def answer(llm: LLM, structure: dict[str, Any], **values: Any) -> CompletionOutput:
    values = {"temperature": 0.8, "seed": 1, "max_tokens": 200} | values
    structured = StructuredOutputsParams(**structure)
    return ask(llm, "Give me", SamplingParams(structured_outputs=structured, **values)).outputs[0]


def taken(output: RequestOutput) -> list[Any]:
    """All that could differ between two runs."""
    return [(c.token_ids, c.text, c.finish_reason, c.error, c.logprobs) for c in output.outputs]


def together(llm: LLM) -> list[list[Any]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [taken(output) for output in outputs]


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(
    "structure", [{"choice": ["yes", "no", "maybe so"]}, {"regex": "[0-9]{3}-[abc]{2}!"}]
)
def test_choices_and_expressions(llm: LLM, structure: dict[str, Any], temperature: float) -> None:
    one = answer(llm, structure, temperature=temperature)
    assert one.finish_reason == "stop"
    assert (
        one.text in structure["choice"]
        if "choice" in structure
        else re.fullmatch(structure["regex"], one.text)
    )


def test_json_by_a_schema(llm: LLM) -> None:
    for seed in range(5):
        one = answer(llm, {"json": PERSON}, seed=seed)
        assert one.finish_reason == "stop"
        assert one.stop_reason is None
        jsonschema.validate(json.loads(one.text), PERSON)


def test_any_object(llm: LLM) -> None:
    braces = [llm.get_tokenizer().encode(brace)[0] for brace in "{}"]
    one = answer(llm, {"json_object": True}, logit_bias=dict.fromkeys(braces, 100))
    assert one.text == "{}"


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a"{3} ("b" | "c")',
        'root ::= "aaa" [bc]',
        '{"grammars": [{"lark_grammar": "start: /aaa[bc]/"}]}',
    ],
)
def test_grammars_in_three_dialects(llm: LLM, grammar: str) -> None:
    assert answer(llm, {"grammar": grammar}).text in ("aaab", "aaac")


def test_characters_of_several_tokens(llm: LLM) -> None:
    text = "\U0001f642 \u6f22\u5b57 gr\u00f6\u00dfe"
    one = answer(llm, {"json": {"const": text}})
    assert json.loads(one.text) == text
    wild = answer(llm, {"json": {"type": "string", "maxLength": 30}}, temperature=2, seed=11)
    assert isinstance(json.loads(wild.text), str)


def test_control_tokens_come_where_they_are_named(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    one = answer(llm, {"grammar": 'start: <tool_call> "x" </tool_call>'})
    ids = [tokenizer.token_id("<tool_call>"), tokenizer.token_id("</tool_call>")]
    assert [one.token_ids[0], one.token_ids[2]] == ids
    plain = answer(llm, {"json": {"const": "<|im_end|><tool_call>"}}, temperature=0)
    assert json.loads(plain.text) == "<|im_end|><tool_call>"
    assert not tokenizer.control_ids.intersection(plain.token_ids[:-1])


def test_a_conversation(llm: LLM) -> None:
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["red", "blue"]))
    output = llm.chat([{"role": "user", "content": "What colour?"}], params, use_tqdm=False)[0]
    assert output.outputs[0].text in ("red", "blue")


def test_every_end_token_ends(llm: LLM) -> None:
    """Also where more could follow."""
    for end in llm.frontend.eos_token_ids:
        one = answer(llm, {"choice": ["a", "a b c d"]}, logit_bias={end: 100})
        assert (one.text, one.token_ids[-1], one.finish_reason) == ("a", end, "stop")


def test_min_tokens_gives_way_to_the_structure(llm: LLM) -> None:
    one = answer(llm, {"choice": ["yes", "no"]}, min_tokens=20)
    assert one.text in ("yes", "no")
    assert one.finish_reason == "stop"
    long = answer(llm, {"regex": "(ab)*"}, min_tokens=12, logit_bias={llm.frontend.eos_token_ids[0]: 100})
    assert len(long.token_ids) == 13
    assert long.finish_reason == "stop"


def test_an_output_that_is_cut_has_length_as_its_reason(llm: LLM) -> None:
    one = answer(llm, {"regex": "[a-z]{400}"}, max_tokens=7)
    assert (one.finish_reason, len(one.token_ids)) == ("length", 7)


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    ruled = SamplingParams(
        temperature=0, logprobs=5, structured_outputs=StructuredOutputsParams(choice=["Zz"])
    )
    one, two = (ask(llm, "Give me", params).outputs[0].logprobs for params in (free, ruled))
    assert one is not None
    assert two is not None
    top = {token_id: entry.logprob for token_id, entry in one[0].items()}
    assert {i: entry.logprob for i, entry in two[0].items() if i in top} == top
    assert min(entry.rank for entry in list(two[0].values())[:1]) > 1


def test_the_same_alone_and_together(llm: LLM, alone: list[list[Any]]) -> None:
    assert together(llm) == alone
    assert {reason for output in alone for _, _, reason, _, _ in output} <= {"stop", "length"}
    assert len({str(ids) for ids, *_ in alone[1]}) == 3  # each choice has its own way through the grammar


def test_the_same_with_drafts_and_without(
    llm: LLM, device: str, alone: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.speculation.choose_lengths", verify_all)
    llm.engine.records.clear()  # type: ignore[attr-defined]
    with LLM("demo", device=device, speculative="off") as plain:
        for model in (llm, plain):
            assert together(model) == alone
        accepted = [
            sum(record.num_accepted for record in model.engine.records)  # type: ignore[attr-defined]
            for model in (llm, plain)
        ]
    assert accepted[0] > 0
    assert accepted[1] == 0


def test_the_same_after_a_preemption(llm: LLM, device: str, alone: list[list[Any]]) -> None:
    program = llm.engine.runner._backend.program  # type: ignore[attr-defined]
    token_bytes = program.kv_token_bytes(4 if device == "reference" else 2)
    options = {"max_model_len": 128, "kv_cache_memory_bytes": token_bytes * 144, "max_num_batched_tokens": 32}
    with LLM("demo", device=device, speculative="off", **options) as small:  # drafts follow measured times
        assert together(small) == alone
        assert small.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("max_num_seqs", [2, 64])
def test_the_same_with_two_steps_in_flight(device: str, max_num_seqs: int, alone: list[list[Any]]) -> None:
    with LLM("demo", device=device, max_steps_in_flight=2, max_num_seqs=max_num_seqs) as ahead:
        assert together(ahead) == alone


def test_a_fault_ends_one_request(llm: LLM, monkeypatch: pytest.MonkeyPatch, alone: list[list[Any]]) -> None:
    advance, copy, start = Matcher.advance, Matcher.copy, Grammars.start

    def fail_at_five(self: Any, token_ids: Any) -> None:
        if len(self._output) + len(token_ids) >= 5 and self.doomed:
            raise RuntimeError("the matcher broke")
        advance(self, token_ids)

    def doom(matcher: Any, doomed: bool) -> Matcher:
        matcher.doomed = doomed
        return cast("Matcher", matcher)

    monkeypatch.setattr(Matcher, "advance", fail_at_five)
    monkeypatch.setattr(Matcher, "copy", lambda self: doom(copy(self), self.doomed))
    monkeypatch.setattr(Grammars, "start", lambda self, text: doom(start(self, text), "doomed" in text))
    doomed = SamplingParams(
        max_tokens=50, structured_outputs=StructuredOutputsParams(regex="(very ){20}doomed")
    )
    outputs = llm.generate([*PROMPTS, "Hi"], [*PARAMS, doomed], use_tqdm=False)
    assert [taken(output) for output in outputs[:-1]] == alone
    (one,) = outputs[-1].outputs
    assert (one.finish_reason, one.error) == ("error", "the grammar failed: the matcher broke")
    assert len(one.token_ids) == 5


@pytest.mark.parametrize(
    ("structure", "values", "message"),
    [
        ({"regex": "(.{1,1000}){1,1000}"}, {}, "the grammar failed"),
        ({"regex": "abc"}, {"allowed_token_ids": [5]}, "no token may follow: structured_outputs"),
    ],
)
def test_what_cannot_go_on_says_so(
    llm: LLM, structure: dict[str, Any], values: dict[str, Any], message: str
) -> None:
    one = answer(llm, structure, **values)
    assert one.finish_reason == "error"
    assert one.error is not None
    assert one.error.startswith(message)


def test_grammars_can_be_made_ready_beforehand() -> None:
    """In a thread, once: the first step that needs them finds them there."""
    loaded, used, threads = threading.Event(), list[Any](), list[threading.Thread]()

    def load() -> Any:
        threads.append(threading.current_thread())
        loaded.set()
        return "grammars"

    masks = Masks(load, 2)
    masks.prepare()
    assert loaded.wait(10)
    state: Any = SimpleNamespace(compute=lambda grammars, token_ids, drafted: used.append(grammars))
    for mask in masks.begin([(state, (), ())] * 3):
        mask.result()
    assert used == ["grammars"] * 3
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize(("may_end", "words"), [(True, [0b11, 0b10]), (False, [0b10, 0])])
def test_end_tokens_may_follow_where_the_output_may_end(may_end: bool, words: list[int]) -> None:
    """A tokenizer may know one that the model cannot give."""
    taken: list[int] = []
    matcher = SimpleNamespace(advance=taken.extend, allowed=lambda: (np.array([0b10, 0], np.uint32), may_end))
    grammars: Any = SimpleNamespace(start=lambda grammar: matcher)
    state = GrammarState(Admission(0, "r", 0, SamplingParams(), (0, 33, 10**6), 1, grammar="any"))
    state.compute(grammars, [5, 6], ())
    assert taken == [6]
    assert [mask.tolist() for mask in state.masks] == [words]


def test_refused_before_anything_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="uniqueItems") as caught:
        answer(llm, {"json": {"type": "array", "uniqueItems": True}})
    assert caught.value.param == "structured_outputs"
    params = SamplingParams(structured_outputs=WORDS)
    params.ignore_eos = True
    with pytest.raises(RequestError, match="ignore_eos"):
        ask(llm, "Hi", params)
    monkeypatch.setattr(llm.frontend, "eos_token_ids", (10**6,))
    with pytest.raises(RequestError, match="no end token"):
        answer(llm, {"regex": "a"})
    monkeypatch.setattr(llm.frontend, "tokenizer", None)
    with pytest.raises(RequestError, match="no tokenizer"):
        answer(llm, {"regex": "a"}, detokenize=False)


def test_nothing_is_added_where_no_grammar_is(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("demo", device=device) as fresh:
        masks = fresh.engine.runner._masks  # type: ignore[attr-defined]
        monkeypatch.setattr(masks, "begin", None)
        ask(fresh, "Hi", SamplingParams(max_tokens=4))
        assert masks._grammars is None
        assert not masks._threads._threads


def random_schema(rng: random.Random, size: int) -> dict[str, Any]:
    """A schema whose instances are short; the larger `size`, the more is nested."""
    if size <= 1 or rng.random() < 0.2:
        low = rng.randint(-50, 50)
        return rng.choice(
            [
                {"type": "string", "maxLength": rng.randint(0, 6)},
                {"type": "string", "pattern": rng.choice(["^[a-f]{1,4}$", "^(x|yz){2}$", "^\\d{1,3}$"])},
                {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)},
                {"enum": rng.sample(["a", "b\u00e9", 1, -2.5, None, True, {"k": [1]}, "\U0001f642"], 3)},
                {"const": rng.choice(["", '"', "\n", 0, [], {"a": None}])},
                {"type": "boolean"},
                {"type": ["null", "boolean"]},
                {"type": "string", "format": rng.choice(["date", "ipv4"])},
            ]
        )
    parts = [random_schema(rng, size // 2) for _ in range(rng.randint(1, 3))]
    kind = rng.choice(["object", "array", "tuple", "any of", "reference"])
    if kind == "array":
        return {"type": "array", "items": parts[0], "minItems": rng.randint(0, 1), "maxItems": 2}
    if kind == "tuple":
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": rng.randint(0, len(parts))}
    if kind == "any of":
        return {"anyOf": parts}
    names = rng.sample(["id", "naam", "\u540d", "a b", 'q"'], len(parts))
    made = {
        "type": "object",
        "properties": dict(zip(names, parts, strict=True)),
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
    return {"allOf": [made]} if kind == "reference" else made


def test_whatever_the_schema_the_output_is_valid(llm: LLM, device: str) -> None:
    rng = random.Random(20)
    schemas = [random_schema(rng, size // 4) for size in range(4, 44 if device == "native" else 14)]
    params = [
        SamplingParams(temperature=1.2, seed=i, max_tokens=250, structured_outputs={"json": schema})
        for i, schema in enumerate(schemas)
    ]
    outputs = llm.generate(["Answer:"] * len(schemas), params, use_tqdm=False)
    for schema, output in zip(schemas, outputs, strict=True):
        (one,) = output.outputs
        assert one.finish_reason in ("stop", "length"), (schema, one.error)
        if one.finish_reason == "stop":
            jsonschema.validate(json.loads(one.text), schema)
    assert sum(output.outputs[0].finish_reason == "stop" for output in outputs) > len(schemas) * 0.8
