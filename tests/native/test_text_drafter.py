"""The drafter of texts against a search of all texts, over random requests that share and end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_text_index import ending, searched

from quire.backends.text_index import BOUNDARY
from quire.program.caches import MAX_DRAFTED
from quire.sampling_params import SamplingParams
from quire.speculate.store import Store
from quire.speculate.text_drafter import ALL_DRAFTED, LEAST_DRAFTED, TextDrafter
from quire.types import Draft, FinishReason, NewRequest, Output


def request(name: str, prompt: tuple[int, ...], n: int = 1, **fields: Any) -> NewRequest:
    return NewRequest(name, prompt, SamplingParams(n=n, temperature=1.0), **fields)


def output(
    name: str, tokens: tuple[int, ...], reason: FinishReason | None = None, sequence: int = 0
) -> Output:
    return Output(name, sequence, tokens, finish_reason=reason)


def answer(drafter: TextDrafter, name: str, tokens: tuple[int, ...], **fields: Any) -> None:
    """Run a request to its end."""
    drafter.add(request(name, (90, 91), **fields))
    drafter.observe([output(name, tokens), output(name, (), "stop")])


def drafts(drafter: TextDrafter, name: str, sequence: int = 0) -> tuple[Draft, ...]:
    (found,) = drafter.propose([(name, sequence)])
    return found


class Searching:
    """What TextDrafter does, by searching lists."""

    def __init__(self) -> None:
        self.texts: dict[tuple[str, int], list[int]] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.scopes: dict[str, tuple[str, str]] = {}
        self.stores: dict[tuple[str, str], list[int]] = {}

    def add(self, new: NewRequest) -> None:
        predicted = [*new.predicted_token_ids, BOUNDARY] if new.predicted_token_ids else []
        for sequence in range(new.params.n):
            self.texts[new.request_id, sequence] = [*predicted, *new.prompt_token_ids]
            self.outputs[new.request_id, sequence] = []
        self.scopes[new.request_id] = (new.cache_salt, new.adapter)

    def observe(self, one: Output) -> None:
        name = (one.request_id, one.sequence)
        self.texts[name] += one.token_ids
        self.outputs[name] += one.token_ids
        if one.finish_reason is not None:
            del self.texts[name]
            tokens = self.outputs.pop(name)
            if one.finish_reason in ("stop", "length") and tokens:
                self.stores.setdefault(self.scopes[one.request_id], []).extend([*tokens, BOUNDARY])

    def propose(self, name: tuple[str, int], most: int) -> tuple[Draft, ...]:
        last = ending(self.texts[name])
        own = searched(self.texts[name], last, most)
        earlier = searched(self.stores.get(self.scopes[name[0]], []), last, most)
        drafts = (Draft(own[1], "text", own[0]), Draft(earlier[1], "store", earlier[0]))
        return tuple(one for one in drafts if one.match > (own[0] if one.source == "store" else 0))


@given(st.integers(0, 1 << 32))
def test_random_requests_are_drafted_for_as_by_searching(seed: int) -> None:
    rng = random.Random(seed)
    drafter, searching = TextDrafter(most_places=1 << 20), Searching()

    def some(most: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(5), k=rng.randint(0, most)))

    for step in range(40):
        if rng.random() < 0.4:
            salt, adapter = rng.choice(["", "a"]), rng.choice(["", "a"])
            new = request(
                f"r{step}",
                (*some(20), 7),
                rng.choice([1, 1, 3]),
                cache_salt=salt,
                adapter=adapter,
                predicted_token_ids=some(8) if rng.random() < 0.3 else (),
            )
            drafter.add(new)
            searching.add(new)
        outputs = []
        for name in searching.texts:
            if rng.random() < 0.7:
                reason = rng.choice([None] * 8 + ["stop", "length", "abort", "error"])  # type: ignore[list-item]
                outputs.append(output(name[0], some(3), reason, name[1]))
        drafter.observe(outputs)
        for one in outputs:
            searching.observe(one)
        names = [name for name in searching.texts if rng.random() < 0.8]
        most = min(MAX_DRAFTED, max(LEAST_DRAFTED, ALL_DRAFTED // len(names))) if names else 0
        assert drafter.propose(names) == [searching.propose(name, most) for name in names]


def test_a_draft_is_what_followed_the_same_tokens() -> None:
    drafter = TextDrafter()
    drafter.add(request("a", (1, 2, 3, 4, 5, 6, 1)))
    drafter.observe([output("a", (2,))])
    assert drafts(drafter, "a") == (Draft((3, 4, 5, 6, 1, 2) * 5 + (3, 4), "text", 2),)
    drafter.observe([output("a", (9,))])
    assert drafts(drafter, "a") == ()


def test_a_prediction_is_drafted_from_and_is_not_part_of_the_prompt() -> None:
    drafter = TextDrafter()
    drafter.add(request("a", (5, 6, 3), predicted_token_ids=(1, 2, 3)))
    drafter.observe([output("a", (1,))])
    assert drafts(drafter, "a") == (Draft((2, 3), "text", 1),)  # not 5, which begins the prompt
    drafter.observe([output("a", (2, 3, 5))])
    assert drafts(drafter, "a") == (Draft((6, 3, 1, 2, 3, 5) * 5 + (6, 3), "text", 1),)  # not a match of 3, 5


def test_sequences_of_a_request_do_not_see_each_other() -> None:
    drafter = TextDrafter()
    drafter.add(request("a", (1, 2), n=2))
    drafter.observe([output("a", (8, 9, 8), sequence=0), output("a", (8,), sequence=1)])
    assert [found.token_ids[:2] for found in drafts(drafter, "a", 0)] == [(9, 8)]
    assert drafts(drafter, "a", 1) == ()


@pytest.mark.parametrize(
    "other", [{"cache_salt": "b"}, {"adapter": "b"}, {"cache_salt": "ab", "adapter": ""}]
)
def test_answers_are_found_only_in_their_scope(other: dict[str, str]) -> None:
    drafter = TextDrafter()
    mine = {"cache_salt": "a", "adapter": "a"}
    answer(drafter, "a", (1, 2, 3), **mine)
    answer(drafter, "b", (1, 8, 9), **mine | other)
    for name, fields, expected in (("x", mine, (2, 3)), ("y", mine | other, (8, 9))):
        drafter.add(request(name, (1,), **fields))
        assert drafts(drafter, name) == (Draft(expected, "store", 1),)
    drafter.add(request("z", (1,), cache_salt="c"))
    assert drafts(drafter, "z") == ()


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_aborted_answer_is_forgotten(reason: FinishReason) -> None:
    drafter = TextDrafter()
    drafter.add(request("a", (5, 6), n=2))
    drafter.add(request("waiting", (5,)))
    drafter.observe([output("a", (1, 2, 3)), output("waiting", (), "abort")])
    drafter.observe([output("a", (), reason, 0), output("a", (), reason, 1)])
    assert drafter.store.nbytes == len(drafter) == 0
    drafter.add(request("a", (1,)))  # the same name again
    assert drafts(drafter, "a") == ()


def test_nothing_but_a_bounded_store_is_kept() -> None:
    drafter, most_bytes = TextDrafter(Store(scope_tokens=64, most_bytes=3 * 64 * 28)), 0
    for i in range(200):
        answer(drafter, f"r{i}", tuple(range(i, i + 9)), cache_salt=str(i % 5))
        most_bytes = max(most_bytes, drafter.store.nbytes)
    assert len(drafter) == 0
    assert most_bytes == 3 * 64 * 28


def test_the_scope_unused_for_longest_is_dropped() -> None:
    drafter = TextDrafter(Store(scope_tokens=64, most_bytes=2 * 64 * 28))
    for salt in "abac":
        answer(drafter, salt, (1, 2, 3, 4), cache_salt=salt)
    for salt, found in (("a", True), ("b", False), ("c", True)):
        drafter.add(request(salt, (3,), cache_salt=salt))
        assert bool(drafts(drafter, salt)) is found


def test_nothing_is_kept_of_requests_for_vectors() -> None:
    drafter = TextDrafter()
    drafter.add(request("a", (1, 2, 1), pooling="mean"))
    drafter.observe([Output("a", 0, finish_reason="stop", vector=(1.0,))])
    assert drafter.store.nbytes == len(drafter) == 0
