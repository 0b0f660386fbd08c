"""The index of texts against a search of every place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.backends.text_index import BOUNDARY, LONGEST_MATCH, TextIndex, continuations

ALL = 1 << 20  # places: no chain is cut
Found = tuple[int, tuple[int, ...]]


def ending(text: list[int]) -> list[int]:
    """The last tokens of a text, to a boundary."""
    last = text[-LONGEST_MATCH:]
    while BOUNDARY in last:
        last = last[last.index(BOUNDARY) + 1 :]
    return last


def searched(text: list[int], last: list[int], most: int) -> Found:
    """The longest match of an ending before a token of a text, the last of several, and what follows it."""
    best, best_end = 0, 0
    for end in range(1, len(text)):
        length = 0
        while length < min(len(last), end) and text[end - 1 - length] == last[-1 - length]:
            length += 1
        if text[end] != BOUNDARY and length and length >= best:
            best, best_end = length, end
    followed: list[int] = []
    while best and len(followed) < most:
        place = best_end + len(followed)
        token = text[place] if place < len(text) else followed[place - len(text)]
        if token == BOUNDARY:
            break
        followed.append(token)
    return best, tuple(followed)


def indexed(text: list[int], *, before: TextIndex | None = None, capacity: int = 0) -> TextIndex:
    index = TextIndex(before, capacity)
    index.append(text)
    return index


def found(text: TextIndex, most: int = 8) -> Found:
    ((match, token_ids, *none),) = continuations([(text, None)], most, ALL)
    assert none == [0, ()]
    return match, token_ids


def found_in(other: TextIndex, last: list[int]) -> Found:
    """What follows an ending in another text, if its match there is longer than that in its own."""
    ((match, token_ids, *longer),) = continuations([(indexed(last), other)], 8, ALL)
    assert (match, token_ids) == searched(last, ending(last), 8)
    return longer[0], longer[1]


tokens = st.integers(BOUNDARY, 3)
texts = st.one_of(
    st.lists(tokens, max_size=200),
    # with repetitions longer than the longest match
    st.tuples(st.lists(tokens, max_size=50), st.lists(st.integers(0, 200), max_size=60)).map(
        lambda pair: pair[0] + pair[1] * 3 + pair[0] + pair[1]
    ),
)


@settings(max_examples=500)
@given(texts, st.integers(0, 20), st.data())
def test_the_longest_match_is_found(text: list[int], most: int, data: st.DataObject) -> None:
    expected = searched(text, ending(text), most)
    assert found(indexed(text), most=most) == expected
    cut = data.draw(st.integers(0, len(text)))
    before = indexed(text[:cut])
    assert found(indexed(text[cut:], before=before), most=most) == expected


@given(texts, texts)
def test_a_shared_beginning_serves_several_texts(prompt: list[int], other: list[int]) -> None:
    before = indexed(prompt)
    first, second = indexed(other, before=before), TextIndex(before)
    for token in other[::-1]:  # in another order, one by one
        second.append([token])
    assert found(first) == searched(prompt + other, ending(prompt + other), 8)
    assert found(second) == searched(prompt + other[::-1], ending(prompt + other[::-1]), 8)
    assert len(first) == len(second) == len(other)


@settings(max_examples=300)
@given(st.lists(texts, max_size=6), texts, st.sampled_from([1, 2, 4, 16, 64, 128, 512]))
def test_a_bounded_text_keeps_its_last_tokens(
    answers: list[list[int]], last: list[int], capacity: int
) -> None:
    store = TextIndex(None, capacity)
    kept: list[int] = []
    for answer in answers:
        store.append_text(indexed(answer))
        kept = [*kept, *answer, BOUNDARY][-capacity:]
        assert len(store) == len(kept)
        expected = searched(kept, ending(last), 8)
        longer = expected[0] > searched(last, ending(last), 8)[0]
        assert found_in(store, last) == (expected if longer else (0, ()))


def test_a_bounded_text_is_bounded_and_goes_round() -> None:
    store, full = TextIndex(None, 256), 0
    for i in range(5_000):
        store.append_text(indexed([i % 7, i % 11, i, i + 1]))
        full = full or (store.nbytes if len(store) == 256 else 0)
    assert len(store) == 256
    assert store.nbytes == full == 256 * 28
    assert found_in(store, [4_999]) == (1, (5_000,))
    assert found_in(store, [4_900]) == (0, ())


def test_few_places_still_give_matches() -> None:
    text = indexed([1, 2, 3, 4, 5, 6, 7, 8, 9, 10] + [8, 11] * 50 + [1, 2, 3, 4, 5, 6, 7, 8])
    assert continuations([(text, None)], 4, 1) == [(0, (), 0, ())]  # the only place is the ending itself
    assert continuations([(text, None)], 4, 2) == [(8, (9, 10, 8, 11), 0, ())]


def test_an_answer_is_appended_without_its_prompt() -> None:
    prompt = indexed([1, 2, 3])
    store = TextIndex(None, 64)
    store.append_text(indexed([4, 5, 6], before=prompt))
    assert len(store) == 4
    assert found_in(store, [9, 5]) == (1, (6,))
    assert found_in(store, [1, 2]) == (0, ())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        TextIndex(None, 100)
    with pytest.raises(ValueError, match="keeps all"):
        TextIndex(TextIndex(), 64)
    assert continuations([], 4, 4) == []
    assert found(TextIndex()) == (0, ())
