"""Tokens that a grammar allows, for every kind of tokenizer, compared with the grammar of bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import small_tokenizers as small
from model_folders import tokenizer_of
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.grammar.compile_job import llguidance_text
from quire.grammar.forced_runs import SURE
from quire.grammar.grammars import Grammars, Matcher
from quire.text.tokenizer import Tokenizer
from quire.types import Draft

TEXTS = [
    "hello world",
    ' "hello"  hello\n',
    "gr\u00f6\u00dfe \u6771\u4eac\U0001f642 e\u0301",
    "<|im_end|></s><tool_call>",
    "\t\x00\x7f",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["\U0001f642\U0001f680", "\u6771", 3, None]},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": -50, "maximum": 999},
            "maxItems": 3,
        },
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
SMALL: dict[str, Callable[[Path], Path]] = {
    "byte level": small.byte_level,
    "byte fallback": small.byte_fallback,
}
PUBLISHED = ("gpt-2", "llama-2", "phi-3")


@pytest.fixture(scope="module", params=[*SMALL, *PUBLISHED])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param in SMALL:
        return tokenizer_of(SMALL[request.param](tmp_path_factory.mktemp("small")))
    return tokenizer_of(request.getfixturevalue("shared_data") / "tokenizers" / request.param)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    """Make a model's grammars with a padded vocabulary."""
    return Grammars(tokenizer, tokenizer.vocab_size + 37)


def allowed_by(matcher: Matcher) -> tuple[NDArray[np.bool_], bool]:
    """Return the tokens that may follow, and True if the output may end."""
    bits, may_end = matcher.allowed()
    return np.unpackbits(bits.view(np.uint8), bitorder="little").view(np.bool_), may_end


def walk(grammars: Grammars, structure: dict[str, Any], seed: int) -> list[int]:
    """Generate a random output, uniformly from the allowed tokens."""
    matcher, rng, ids = grammars.start(llguidance_text(structure)), random.Random(seed), list[int]()
    for _ in range(5000):
        allowed, may_end = allowed_by(matcher)
        choices = np.flatnonzero(allowed).tolist()
        if may_end and (not choices or rng.random() < 0.05):
            return ids
        ids.append(rng.choice(choices))
        matcher.advance(ids[-1:])
    raise AssertionError("it does not end")


def within(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text after a line break."""
    break_ids = tokenizer.encode("\n", add_special_tokens=False)
    return tokenizer.encode("\n" + text, add_special_tokens=False)[len(break_ids) :]


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_is_dictated_comes_byte_by_byte(
    tokenizer: Tokenizer, grammars: Grammars, text: str
) -> None:
    for structure in ({"choice": [text]}, {"choice": [text, "other"]}, {"json": {"const": text}}):
        ids = walk(grammars, structure, 1)
        assert not tokenizer.control_ids.intersection(ids)
        made = text_of(tokenizer, ids)
        assert (json.loads(made) if "json" in structure else made) in (text, "other")


def test_a_dictated_text_comes_in_the_tokenizers_own_tokens(tokenizer: Tokenizer, grammars: Grammars) -> None:
    for text in ("hello world hello", "hello"):
        assert walk(grammars, {"choice": [text]}, 0) == within(tokenizer, text)


def test_random_json_is_valid(tokenizer: Tokenizer, grammars: Grammars) -> None:
    for seed in range(12):
        ids = walk(grammars, {"json": SCHEMA}, seed)
        assert not tokenizer.control_ids.intersection(ids)
        jsonschema.validate(json.loads(text_of(tokenizer, ids)), SCHEMA)


def test_free_text_makes_no_control_token(tokenizer: Tokenizer, grammars: Grammars) -> None:
    allowed, may_end = allowed_by(grammars.start(llguidance_text({"regex": "(?s:.*)"})))
    assert may_end
    assert not allowed[sorted(tokenizer.control_ids)].any()
    assert not allowed[tokenizer.vocab_size :].any()
    valid = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.control_ids]
    assert allowed[valid].sum() > len(valid) * 0.5  # all that may begin a text in UTF-8


def test_control_tokens_follow_where_they_are_named(tokenizer: Tokenizer, grammars: Grammars) -> None:
    token_id, name = next((i, n) for i, n in tokenizer.control_tokens.items() if n[0] == "<")
    for named in (name, f"<[{token_id}]>"):
        matcher = grammars.start(f'start: "hello" {named} | "x"')
        assert not allowed_by(matcher)[0][token_id]
        matcher.advance(within(tokenizer, "hello"))
        allowed, may_end = allowed_by(matcher)
        assert np.flatnonzero(allowed).tolist() == [token_id]
        assert not may_end
        matcher.advance([token_id])
        allowed, may_end = allowed_by(matcher)
        assert may_end
        assert not allowed.any()


def test_a_model_may_lack_tokens_of_its_tokenizer(tokenizer: Tokenizer) -> None:
    fewer = tokenizer.vocab_size - 20
    ids = walk(Grammars(tokenizer, fewer), {"json": SCHEMA}, 5)
    assert max(ids) < fewer
    jsonschema.validate(json.loads(text_of(tokenizer, ids)), SCHEMA)


@pytest.mark.parametrize("beyond", range(0, 64, 13))
def test_the_bit_of_the_end_is_no_token(tokenizer: Tokenizer, beyond: int) -> None:
    """The mask ends with the vocabulary, whichever bit of the last word that is."""
    vocab_size = tokenizer.vocab_size // 32 * 32 + beyond
    matcher = Grammars(tokenizer, vocab_size).start(llguidance_text({"regex": "(hello)?"}))
    bits, may_end = matcher.allowed()
    assert may_end
    assert len(bits) == -(-vocab_size // 32)
    each, _ = allowed_by(matcher)
    assert each.any()
    assert not each[vocab_size:].any()


def test_copies_do_not_share_their_state(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = llguidance_text({"json": SCHEMA})
    one, two = grammars.start(grammar), grammars.start(grammar)
    before, _ = two.allowed()
    one.advance(within(tokenizer, "{"))
    assert not np.array_equal(one.allowed()[0], before)
    assert np.array_equal(two.allowed()[0], before)
    assert np.array_equal(grammars.start(grammar).allowed()[0], before)


def test_a_copy_goes_its_own_way(grammars: Grammars) -> None:
    """Also down a wrong one, which leaves what a new matcher would allow."""
    grammar, rng = llguidance_text({"json": SCHEMA}), random.Random(3)
    ids = walk(grammars, {"json": SCHEMA}, 3)
    matcher = grammars.start(grammar)
    for at, token_id in enumerate(ids):
        expected, may_end = allowed_by(matcher)
        copy = matcher.copy()
        for _ in range(6):
            allowed, _ = allowed_by(copy)
            if allowed.any():
                copy.advance([rng.choice(np.flatnonzero(allowed).tolist())])
        fresh = grammars.start(grammar)
        fresh.advance(ids[:at])
        for one in (matcher, fresh):
            found = allowed_by(one)
            assert np.array_equal(found[0], expected)
            assert found[1] == may_end
        matcher.advance([token_id])


def test_control_tokens_are_drafted(grammars: Grammars, tokenizer: Tokenizer) -> None:
    token_id = next(iter(tokenizer.control_tokens))
    for text in ("hello", "hello "):
        matcher = grammars.start(
            llguidance_text({"grammar": f'start: "x" {json.dumps(text)} <[{token_id}]> "1"'})
        )
        matcher.advance(within(tokenizer, "x"))
        drafted = matcher.draft().token_ids
        assert drafted[drafted.index(token_id) :][:1] == (token_id,)
        assert text_of(tokenizer, list(drafted[: drafted.index(token_id)])) == text


def test_a_forced_token_is_the_only_one_that_may_follow(grammars: Grammars) -> None:
    tight = {"json": SCHEMA | {"x-guidance": {"whitespace_flexible": False}}}
    for structure in (tight, {"json": SCHEMA}, {"choice": ["hello world"]}):
        matcher, num_sure = grammars.start(llguidance_text(structure)), 0
        for token_id in walk(grammars, structure, 4):
            draft = matcher.draft()
            if draft.match == SURE:
                assert np.flatnonzero(allowed_by(matcher)[0]).tolist() == [draft.token_ids[0]] == [token_id]
                num_sure += 1
            matcher.advance([token_id])
        assert num_sure >= 2
        assert matcher.draft() == Draft((), "grammar", 0)


@pytest.mark.parametrize(
    ("style", "most"), [({}, 8), ({"separators": (",", ":")}, 8), ({"indent": 2}, 24)], ids=repr
)
def test_runs_go_on_over_blanks(
    grammars: Grammars, tokenizer: Tokenizer, style: dict[str, Any], most: int
) -> None:
    """With those that the answer had before."""
    text = json.dumps({"first": {"second": 12, "third": ["a", "b"]}, "last": True}, **style)
    names = {"second": {"const": 12}, "third": {"type": "array", "items": {"enum": ["a", "b"]}}}
    first = {"type": "object", "properties": names, "required": ["second", "third"]}
    schema = {"properties": {"first": first, "last": {"const": True}}, "required": ["first", "last"]}
    for one in (first, schema):
        one |= {"type": "object", "additionalProperties": False}
    matcher, ids = grammars.start(llguidance_text({"json": schema})), within(tokenizer, text)
    at = num_rows = 0
    while at < len(ids):
        drafted = matcher.draft().token_ids
        same = [mine == other for mine, other in zip(drafted, ids[at:], strict=False)]
        count = min((*same, False).index(False) + 1, len(ids) - at)
        matcher.advance(ids[at : at + count])
        at, num_rows = at + count, num_rows + 1
    assert num_rows <= most


@pytest.mark.parametrize(
    ("structure", "given"),
    [
        ({"grammar": "start: nothing"}, ""),
        ({"regex": "a"}, "b"),
        ({"regex": "(.{1,1000}){1,1000}"}, "x" * 400),
    ],
)
def test_a_fault_is_reported(
    grammars: Grammars, tokenizer: Tokenizer, structure: dict[str, Any], given: str
) -> None:
    matcher = grammars.start(llguidance_text(structure))

    def go_on() -> None:
        for token_id in tokenizer.encode(given, add_special_tokens=False):
            matcher.advance([token_id])
            matcher.allowed()
        matcher.allowed()

    with pytest.raises(RequestError) as caught:
        go_on()
    assert "\n" not in str(caught.value)


def test_compiled_grammars_are_kept_within_bounds(grammars: Grammars, monkeypatch) -> None:
    monkeypatch.setattr("quire.grammar.grammars.MAX_GRAMMARS", 3)
    for i in range(10):
        grammars.start(llguidance_text({"regex": f"a{i}"}))
    assert len(grammars._compiled) == 3
    assert sum(map(len, grammars._compiled)) == grammars._num_characters
    monkeypatch.setattr("quire.grammar.grammars.MAX_CHARACTERS", 200)
    assert grammars.start(llguidance_text({"choice": ["y" * 300]})).allowed()[0].any()
    assert (len(grammars._compiled), grammars._num_characters) == (0, 0)


def test_the_test_suite_of_json_schema(shared_data: Path, tmp_path: Path) -> None:
    """Supported schemas accept no invalid instance and most valid ones; all others are refused.

    Valid instances that do not pass: properties in another order than the schema's, whole numbers written
    as 1.0, and strings that only an annotation of `format` calls wrong.
    """
    tokenizer = tokenizer_of(small.byte_level(tmp_path))
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    verdicts = {"accepted": 0, "rejected": 0, "refused": 0, "valid but rejected": 0}
    for path in sorted((shared_data / "json_schema" / "draft2020-12").glob("*.json")):
        for group in json.loads(path.read_text()):
            grammar = llguidance_text({"json": group["schema"]})
            if not compiles(grammars, grammar):
                verdicts["refused"] += 1
                continue
            for case in group["tests"]:
                text = json.dumps(case["data"], ensure_ascii=False)
                passes = accepts(grammars, grammar, tokenizer.encode(text, add_special_tokens=False))
                assert case["valid"] or not passes, (path.name, group["description"], case["description"])
                verdicts["accepted"] += passes
                verdicts["rejected"] += not case["valid"]
                verdicts["valid but rejected"] += case["valid"] and not passes
    assert verdicts["accepted"] > 300
    assert verdicts["rejected"] > 200
    assert verdicts["refused"] < 190
    assert verdicts["valid but rejected"] <= 22


def compiles(grammars: Grammars, grammar: str) -> bool:
    try:
        grammars.start(grammar).allowed()
    except RequestError:
        return False
    return True


def accepts(grammars: Grammars, grammar: str, ids: list[int]) -> bool:
    matcher = grammars.start(grammar)
    try:
        matcher.advance(ids)
        return matcher.allowed()[1]
    except RequestError:
        return False
