"""SamplingParams: every field is bounded, and every refusal names the field and the range."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import MISSING, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, RequestError
from quire.sampling_params import SamplingParams, default_sampling_params

FIELDS = [f.name for f in fields(SamplingParams)]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, Any] = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "1e309": float("1e309"),
    "-0.0": -0.0,
    "2**63": 2**63,
    "-2**63": -(2**63),
    "10**5000": 10**5000,
    "-10**5000": -(10**5000),
    "-3": -3,
    "-1": -1,
    "0": 0,
    "1": 1,
    "1.5": 1.5,
    "1.0": 1.0,
    "5e-324": 5e-324,
    "True": True,
    "False": False,
    "None": None,
    "''": "",
    "'x'": "x",
    "b'x'": b"x",
    "'NUL'": "\x00",
    "[]": [],
    "[0]": [0],
    "[-1]": [-1],
    "[True]": [True],
    "[nan]": [math.nan],
    "['x']": ["x"],
    "['']": [""],
    "[2**63]": [2**63],
    "[[1]]": [[1]],
    "[[]]": [[]],
    "{}": {},
    "{1: 1}": {1: 1},
    "{'1': -1.5}": {"1": -1.5},
    "{1: nan}": {1: math.nan},
    "{1: inf}": {1: math.inf},
    "{-1: 1}": {-1: 1},
    "{'x': 1}": {"x": 1},
    "{'': 1}": {"": 1},
    "{'\u0661': 1}": {"\u0661": 1},
    "{True: 1}": {True: 1},
    "{1: True}": {1: True},
    "{'1': 1, 1: 1}": {"1": 1, 1: 1},
    "long list": [0] * 10**6,
    "long list of strings": [str(i) for i in range(10**6)],
    "long string": "x" * 10**6,
    "long dict": dict.fromkeys(range(10**6), 0.0),
    "deep list": nested(10**4),
    "object": object(),
    "complex": 1j,
}

FLOATS = "0 -0.0 1 1.0"
STRINGS = "None [] 'x' 'NUL' ['x']"
FLAGS = "True False"
LAWFUL = {  # everything else in HOSTILE must be refused
    "n": "1",
    "temperature": f"{FLOATS} 1.5 5e-324",
    "top_p": "1 1.0 5e-324",
    "top_k": "-1 0 1",
    "min_p": f"{FLOATS} 5e-324",
    "max_tokens": "-1 1 None",
    "min_tokens": "0 1",
    "stop": STRINGS,
    "stop_token_ids": "None [] [0]",
    "ignore_eos": FLAGS,
    "seed": "-2**63 -3 -1 0 1 None",
    "logprobs": "-1 0 1 None",
    "prompt_logprobs": "-1 0 1 None",
    "presence_penalty": f"{FLOATS} -1 1.5 5e-324",
    "frequency_penalty": f"{FLOATS} -1 1.5 5e-324",
    "repetition_penalty": "1 1.0 1.5 5e-324",
    "logit_bias": "None {} {1:1} {'1':-1.5}",
    "allowed_token_ids": "None [0]",
    "bad_words": STRINGS,
    "bad_words_token_ids": "[] [[1]]",
    "structured_outputs": "None",
    "include_stop_str_in_output": FLAGS,
    "skip_special_tokens": FLAGS,
    "detokenize": FLAGS,
}


def test_the_documentation_lists_every_field():
    text = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for field in fields(SamplingParams):
        if field.name != "bad_words_token_ids":
            (line,) = [r for r in rows if f"`{field.name}`" in r.split("|")[1]]
            shown = line.split("|")[3].strip()
            assert shown == (
                "none" if field.default in ((), MISSING) else f"{field.default}".removesuffix(".0")
            )


def refusal(**values: Any) -> RequestError | None:
    """The error that these values give; any other exception is a fault."""
    try:
        SamplingParams(**values)
    except RequestError as error:
        return error
    return None


def test_the_table_covers_every_field():
    assert sorted(LAWFUL) == sorted(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_hostile_values(name):
    lawful = LAWFUL[name].split()
    accepted = []
    for label, value in HOSTILE.items():
        begin = time.process_time()
        error = refusal(**{name: value})
        assert time.process_time() - begin < 0.1, label
        if error is None:
            accepted.append(label.replace(": ", ":"))
        else:
            assert error.param == name, label
            assert error.message.startswith(name), label
            assert len(error.message) < 200, label
            assert error.message.isprintable(), label
    assert sorted(accepted) == sorted(lawful)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.sampled_from(FIELDS), junk)
def test_any_value_is_accepted_or_refused_by_name(name, value):
    if error := refusal(**{name: value}):
        assert error.param == name
        assert error.message.startswith(name)
        return
    params = SamplingParams(**{name: value})
    again = replace(params)  # what was accepted is in its final form
    assert again == params
    assert type(getattr(again, name)) is type(getattr(params, name))


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), junk, max_size=5))
def test_any_request_is_accepted_or_refused(values):
    with contextlib.suppress(RequestError):  # any other exception is a fault
        SamplingParams.from_dict(values)


BOUNDS = [
    ("n", 1, 128),
    ("temperature", 0, 2),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0, 1),
    ("logprobs", -1, 20),
    ("prompt_logprobs", -1, 20),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("seed", -(2**63), 2**63 - 1),
]


@pytest.mark.parametrize(("name", "low", "high"), BOUNDS)
def test_bounds_are_inclusive(name, low, high):
    SamplingParams(**{name: low})
    SamplingParams(**{name: high})
    for outside in (low - 1, high + 1):
        with pytest.raises(RequestError, match=rf"^{name} must be .*{low:,} to {high:,}") as caught:
            SamplingParams(**{name: outside})
        assert f"{outside}" in caught.value.message


@pytest.mark.parametrize(("name", "high"), [("top_p", 1), ("repetition_penalty", 2)])
def test_bounds_above_zero(name, high):
    SamplingParams(**{name: high})
    SamplingParams(**{name: 1e-9})
    for outside in (0, -0.0, high + 1e-9, -1, Fraction(1, 10**400)):
        with pytest.raises(RequestError, match=rf"^{name} must be a number above 0, at most {high}"):
            SamplingParams(**{name: outside})


def test_lengths():
    SamplingParams(stop=[f"{i}" for i in range(64)])
    SamplingParams(stop="x" * 1024, bad_words=["y" * 256] * 128, stop_token_ids=range(1024))
    SamplingParams(logit_bias=dict.fromkeys(range(4096), 1), allowed_token_ids=range(1 << 18))
    SamplingParams(bad_words_token_ids=[[1] * 1024] * 256)
    too_long = {
        "stop": [f"{i}" for i in range(65)],
        "bad_words": ["y"] * 129,
        "stop_token_ids": range(1025),
        "logit_bias": dict.fromkeys(range(4097), 1),
        "allowed_token_ids": range((1 << 18) + 1),
        "bad_words_token_ids": [[1]] * 257,
    }
    too_long_inside = {"stop": ["x" * 1025], "bad_words": ["y" * 257], "bad_words_token_ids": [[1] * 1025]}
    for name, value in [*too_long.items(), *too_long_inside.items()]:
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})


def test_one_form():
    params = SamplingParams(stop="\n", top_k=-1, temperature=1, seed=-1, logit_bias={"7": 2, 8: -1})
    assert params.stop == ("\n",)
    assert params.top_k == 0
    assert type(params.temperature) is float
    assert params.seed is None
    assert params.logit_bias == {7: 2.0, 8: -1.0}
    assert SamplingParams(stop=["a", "b", "a"], stop_token_ids=[3, 1, 3]).stop_token_ids == (3, 1)
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, bad_words=None) == SamplingParams()
    assert params == replace(params)


def test_fields_that_contradict_each_other():
    for values, name in [
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": "x", "detokenize": False}, "stop"),
    ]:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**values)
        assert caught.value.param == name
    assert SamplingParams(n=2, temperature=0).num_sequences == 1
    assert SamplingParams(n=2, temperature=0.1).num_sequences == 2
    SamplingParams(min_tokens=16)
    SamplingParams(min_tokens=10**6, max_tokens=None)
    with pytest.raises(RequestError, match="min_tokens"):  # as when None is filled in later
        replace(SamplingParams(min_tokens=10**6, max_tokens=None), max_tokens=100)


def test_vocabulary():
    fits = SamplingParams(
        stop_token_ids=[9], logit_bias={9: 1}, allowed_token_ids=[9], bad_words_token_ids=[[9, 0]]
    )
    fits.check_vocabulary(10)
    SamplingParams().check_vocabulary(1)
    for name, value in {
        "stop_token_ids": [0, 10],
        "logit_bias": {10: 1, 0: 1},
        "allowed_token_ids": [10, 1],
        "bad_words_token_ids": [[1], [10, 1]],
    }.items():
        with pytest.raises(RequestError, match=rf"^{name} .* from 0 to 9 .*got 10$") as caught:
            SamplingParams(**{name: value}).check_vocabulary(10)
        assert caught.value.param == name


def test_from_dict():
    defaults = {"temperature": 0.6, "top_k": 20}
    params = SamplingParams.from_dict({"temperature": 0.1, "top_k": None, "max_tokens": None}, defaults)
    assert params == SamplingParams(temperature=0.1, top_k=20)
    assert SamplingParams.from_dict({}, {"max_tokens": None}).max_tokens is None
    with pytest.raises(RequestError, match="unknown sampling parameter 'temprature'") as caught:
        SamplingParams.from_dict({"temprature": 1})
    assert caught.value.hint == "did you mean 'temperature'?"
    assert caught.value.param == "temprature"
    with pytest.raises(RequestError, match="unknown") as caught:
        SamplingParams.from_dict({"z" * 10**6: 1})
    assert len(str(caught.value)) < 1000


def test_defaults_of_a_model():
    config = {
        "do_sample": False,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "max_new_tokens": 2048,
        "repetition_penalty": None,
        "eos_token_id": [1, 2],
        "transformers_version": "4.57.0",
    }
    defaults = default_sampling_params(config)
    assert defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 2048}
    assert default_sampling_params({"do_sample": False}) == {}
    with pytest.raises(
        ConfigError, match=r"^generation_config.json: temperature must be .* from 0 to 2, got -1"
    ):
        default_sampling_params({"temperature": -1})


def test_assignment_is_checked_like_construction() -> None:
    params = SamplingParams(max_tokens=5)
    params.max_tokens, params.stop, params.top_k = None, "end", -1
    assert (params.max_tokens, params.stop, params.top_k) == (None, ("end",), 0)
    assert SamplingParams.from_dict({"max_tokens": -1}, {"max_tokens": 5}).max_tokens is None
    with pytest.raises(RequestError, match="temperature must be a number from 0 to 2") as caught:
        params.temperature = float("nan")
    assert caught.value.param == "temperature"
    assert params.temperature == 1.0
    with pytest.raises(AttributeError):
        params.temprature = 0.5  # type: ignore[attr-defined]
