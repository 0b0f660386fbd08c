"""Requests that another engine continues: tokens and bits are those of one engine, wherever they were cut."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from compiled import compiled

from quire.build import build
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.open_request import OpenRequest, OpenRequests
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, Output

REGEX = "(one|two|three)( and (one|two|three)){2,5}"
SHARED = tuple(Random(0).choices(range(3, 400), k=50))
REPEATED = tuple(range(300, 320)) * 3


class Nobody:
    """Runs no request."""

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        raise AssertionError(request_id)

    def abort_later(self, own: OpenRequest) -> None:
        raise AssertionError(own.request.request_id)


@pytest.fixture(scope="module")
def grammar() -> str:
    return compiled(REGEX)


def mixture(grammar: str, max_tokens: int) -> list[NewRequest]:
    """Requests of every kind that keeps a state from token to token."""

    def ask(*prompt: int, constrained: str = "", **params: Any) -> NewRequest:
        fields = {"max_tokens": max_tokens, "logprobs": 2, "ignore_eos": not constrained, "seed": 5, **params}
        ends = (2,) if constrained else ()
        params = SamplingParams(**fields)
        return NewRequest(str(len(found)), prompt, params, eos_token_ids=ends, grammar=constrained)

    found: list[NewRequest] = []
    for prompt, params in (
        (REPEATED, {"temperature": 0, "prompt_logprobs": 1}),
        (SHARED, {"temperature": 0.9, "top_p": 0.9, "prompt_logprobs": 0}),
        (SHARED[:33], {"temperature": 1.0, "top_k": 20, "n": 3, "prompt_logprobs": 0}),
        (
            SHARED,
            {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "min_p": 0.02},
        ),
        ((9, 8, 7), {"bad_words_token_ids": [[20, 21], [22]], "logit_bias": {30: 2.0}, "min_tokens": 4}),
        ((4, 5), {"stop_token_ids": list(range(0, 400, 5)), "min_tokens": 3, "n": 2}),
        (SHARED[:20], {"constrained": grammar, "temperature": 1.2}),
        ((7,), {"constrained": grammar, "n": 2, "temperature": 1.0}),
    ):
        found.append(ask(*prompt, **params))  # type: ignore[arg-type]
    return found


class Run:
    """Requests in engines one after the other, each cut off after some steps."""

    def __init__(self, requests: list[NewRequest]) -> None:
        self.open = OpenRequests()
        self.requests = [self.open.open(OpenRequest(new, Nobody())) for new in requests]

    def go_on(self, engine: Engine, num_steps: int | None = None) -> None:
        """Run what is open, to the end or for so many steps."""
        for own in self.open:
            engine.add(own.continued())
        while self.open and num_steps != 0:
            self.open.deliver(engine.step())
            engine.scheduler.check()
            num_steps = None if num_steps is None else num_steps - 1
        for own in self.open:
            own.lose_engine(0.0, died=True)

    def given(self) -> list[Any]:
        return [gist(own.outputs) for own in self.requests]


def gist(outputs: list[Output]) -> dict[int, Any]:
    """By sequence, the tokens, the bits of log-probabilities, and the end; those of the prompt, once."""
    found: dict[int, Any] = {}
    for output in outputs:
        tokens, bits, prompt, ends = found.setdefault(output.sequence, ([], [], [], []))
        tokens += output.token_ids
        bits += [struct.pack("<Qfi", *one) for position in output.logprobs for one in position]
        prompt += [struct.pack("<Qfi", *one) for position in output.prompt_logprobs for one in position]
        if output.finish_reason is not None:
            ends.append((output.finish_reason, output.stop_reason, output.error))
    return found


Make = Callable[..., Engine]


@pytest.fixture(params=["native", "reference"])
def make(request: pytest.FixtureRequest) -> Make:
    def built(**options: Any) -> Engine:
        own = {"max_model_len": 256, "max_num_seqs": 16, "device": request.param, **options}
        return build(EngineConfig(model="demo", num_threads=1, **own)).engine

    return built


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"speculative": "off"},
    "drafts": {},
    "a draft model, two in flight": {"speculative": "demo-draft", "max_steps_in_flight": 2},
    "few slots, chunks of 16": {"max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 8},
    "nothing cached": {"enable_prefix_caching": False, "max_num_batched_tokens": 50},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "a cache of float16": {"kv_cache_dtype": "float16"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_and_bits_are_those_of_one_engine(name: str, make: Make, grammar: str) -> None:
    engine = make(**VARIANTS[name])
    slow = engine.runner._backend.__module__.endswith("reference")  # type: ignore[attr-defined]
    requests = mixture(grammar, 8 if slow else 24)
    undisturbed = Run(requests)
    undisturbed.go_on(engine)
    rng, disturbed, num_continued = Random(name), Run(requests), 0
    while num_continued < (2 if slow else 4):
        disturbed.go_on(make(**VARIANTS[name]), rng.randint(1, 4 if slow else 7))
        assert disturbed.open
        num_continued += any(any(own.continued().resumed) for own in disturbed.open)
    disturbed.go_on(make(**VARIANTS[name]))
    assert disturbed.given() == undisturbed.given()


def test_a_token_that_is_lost_is_noticed(make: Make, grammar: str) -> None:
    """The negative control: the next engine is not told the last token."""
    requests = mixture(grammar, 8)
    undisturbed, disturbed = Run(requests), Run(requests)
    undisturbed.go_on(make())
    disturbed.go_on(make(), 4)
    for own in disturbed.open:
        for one in own.sequences:
            del one.token_ids[-1:]
    disturbed.go_on(make())
    assert disturbed.given() != undisturbed.given()
