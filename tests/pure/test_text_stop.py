"""Stop strings across chunk boundaries, compared with a brute-force definition."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.text.stop import StopStrings

SMALL = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Find the first end of a match, and of the matches that end there the first listed: the definition."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def pending(text: str, stops: list[str]) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
    prefixes = (stop[:size] for stop in stops for size in range(1, len(stop)))
    return max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)


@given(text=SMALL, stops=STOPS, include=st.booleans())
@example(text="abab", stops=["bab", "ab"], include=False)
@example(text="aab", stops=["b", "ab"], include=False)
@example(text="aab", stops=["ab", "b"], include=True)
def test_all_ways_to_cut_a_text(text: str, stops: list[str], include: bool) -> None:
    shown, stop = expected(text, stops, include)
    cuts = range(1, min(len(text), 7))
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(cuts, k) for k in range(len(cuts) + 1)
    ):
        stream, given_text, seen, end = StopStrings(stops, include), "", "", None
        for start, until in itertools.pairwise((0, *chosen, len(text))):
            piece, end = stream.push(text[start:until])
            given_text, seen = given_text + piece, seen + text[start:until]
            if end is not None:
                break
            assert len(given_text) == len(seen) - pending(seen, stops), "holds back what it must, no more"
        if end is None:
            given_text += stream.flush()
        assert (given_text, end) == (shown, stop)


@given(
    text=st.text("ab<|>é🙂", max_size=60),
    stops=st.lists(st.text("ab<|>é🙂", min_size=1, max_size=9), max_size=5),
)
def test_one_character_at_a_time(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    given_text = "".join(stream.push(char)[0] for char in text) + stream.flush()
    assert (given_text, stream.matched) == expected(text, stops, False)


def test_nothing_follows_a_match() -> None:
    stream = StopStrings(["END"])
    assert stream.push("text EN") == ("text ", None)
    assert stream.push("D and more") == ("", "END")
    assert stream.push("more") == ("", "END")
    assert stream.flush() == ""


def test_a_match_that_fails_is_given_whole() -> None:
    stream = StopStrings(["<|im_end|>"])
    assert stream.push("a<|im_en") == ("a", None)
    assert stream.push("x") == ("<|im_enx", None)
    assert stream.push("<|im") == ("", None)
    assert stream.flush() == "<|im"


def test_matches_before_min_tokens_do_not_count() -> None:
    stream = StopStrings(["ab"])
    assert stream.push("xaba", ignore=True) == ("xab", None)
    assert stream.push("b!") == ("", "ab")


def test_an_ignored_match_may_begin_another() -> None:
    stream = StopStrings(["aba"])
    assert stream.push("aba", ignore=True) == ("ab", None)
    assert stream.push("ba") == ("", "aba")


@pytest.mark.parametrize("stop", ["aab", "abab", "aabaa", "abcabd"])
def test_a_stop_string_that_resembles_itself(stop: str) -> None:
    for lead in (stop[:size] for size in range(len(stop))):
        assert (
            "".join(StopStrings([stop]).push(lead + stop + "!")[0]) == expected(lead + stop, [stop], False)[0]
        )


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["a", ""])


def test_time_is_linear_for_the_worst_stop_string() -> None:
    stream, start = StopStrings(["a" * 5000 + "b", "a" * 4999 + "c"]), time.perf_counter()
    shown = "".join(stream.push("a" * 10)[0] for _ in range(5000))
    assert len(shown) == 45_000
    assert time.perf_counter() - start < 5
