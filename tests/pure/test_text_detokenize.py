"""Incremental detokenization: never half a character, and the pieces are the full decode."""

from __future__ import annotations

import itertools
import random

import pytest
import small_tokenizers as small
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from model_folders import tokenizer_of

from quire.text.detokenize import Detokenizer
from quire.text.tokenizer import Tokenizer

TEXTS = [
    "hello world",
    "größe naïve 東京 日本語",
    "नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽",
    "e\u0301 a\u0308\u0323 combining",
    "a replacement character: \N{REPLACEMENT CHARACTER}!",
]


@pytest.fixture(scope="module", params=list(small.KINDS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(small.KINDS[request.param](tmp_path_factory.mktemp(request.param)))


def pieces(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer, prompt, skip)
    return [*(stream.push([token]) for token in output), stream.finish()]


def test_all_pairs_of_tokens(tokenizer: Tokenizer) -> None:
    """About 160,000 pairs for the byte-level vocabulary, and 90,000 for the one with byte fallback."""
    for first, second in itertools.product(range(tokenizer.vocab_size), repeat=2):
        ids = [first, second]
        assert "".join(pieces(tokenizer, [], ids, False)) == tokenizer.decode(ids, False), ids


@given(data=st.data(), skip=st.booleans())
def test_pieces_are_the_full_decode_behind_a_prompt(tokenizer: Tokenizer, data, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=24))
    cut = data.draw(st.integers(0, len(ids)))
    whole, prompt = tokenizer.decode(ids, skip), tokenizer.decode(ids[:cut], skip)
    text = "".join(pieces(tokenizer, ids[:cut], ids[cut:], skip))
    visible = prompt.rstrip("\N{REPLACEMENT CHARACTER}")
    assert whole.endswith(text)
    begun = len(prompt) - (len(whole) - len(text))  # characters of the prompt that the output completes
    assert 0 <= begun <= len(prompt) - len(visible)
    assert begun <= 3
    in_one = Detokenizer(tokenizer, ids[:cut], skip)
    assert in_one.push(ids[cut:]) + in_one.finish() == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_every_character_arrives_whole_and_at_once(kind: str, text: str, tmp_path) -> None:
    tokenizer = tokenizer_of(small.KINDS[kind](tmp_path))
    ids = tokenizer.encode(text, add_special_tokens=False)
    given_text = pieces(tokenizer, [], ids)
    assert "".join(given_text) == text
    assert given_text[-1] == ""
    assert "".join(given_text).count("\N{REPLACEMENT CHARACTER}") == text.count("\N{REPLACEMENT CHARACTER}")
    # A character is given with its last byte: the bytes so far are never more than three ahead.
    sent = 0
    for index, piece in enumerate(given_text[:-1]):
        sent += len(piece.encode())
        have = sum(len(tokenizer.token_bytes(token)) for token in ids[: index + 1])
        assert 0 <= have - sent <= 3 + (kind == "byte_fallback")  # its leading space is dropped


def test_a_character_that_the_prompt_began_belongs_to_the_output(tmp_path) -> None:
    tokenizer = tokenizer_of(small.byte_fallback(tmp_path))
    euro = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert pieces(tokenizer, euro[:1], euro[1:]) == ["", "€", ""]
    assert pieces(tokenizer, euro[:2], [tokenizer.token_id("a")]) == ["\ufffd\ufffda", ""]


def test_leading_space_of_the_first_token(tmp_path) -> None:
    tokenizer = tokenizer_of(small.byte_fallback(tmp_path))
    hello = tokenizer.token_id("\u2581hello")
    assert pieces(tokenizer, [], [hello, hello]) == ["hello", " hello", ""]
    assert pieces(tokenizer, [1], [hello]) == ["hello", ""]  # a hidden token is no text
    assert pieces(tokenizer, [1], [hello], skip=False) == [" hello", ""]
    assert pieces(tokenizer, [hello], [hello]) == [" hello", ""]


def test_invalid_bytes_do_not_destroy_valid_characters(tmp_path) -> None:
    """Complete characters are kept where the library replaces the whole run of bytes."""
    folder = small.byte_fallback(tmp_path)
    tokenizer = tokenizer_of(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    newline, bad = tokenizer.token_id("<0x0A>"), tokenizer.token_id("<0xFF>")
    assert pieces(tokenizer, [], [newline, bad, newline]) == ["\n", "\ufffd", "\n", ""]
    assert tokenizer.decode([newline, bad, newline]) == "\n\ufffd\n"
    assert library.decode([newline, bad, newline]) == "\ufffd" * 3
    rng = random.Random(0)
    for _ in range(2000):  # wherever a run is wholly valid or wholly invalid, the two agree
        run = rng.choice(("é".encode(), "😀".encode(), b"\xff", b"\xe2\x82", b"\x80\x80", b"\xed\xa0\x80"))
        ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in run] + [tokenizer.token_id("a")]
        assert tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_work_is_linear(kind: str, tmp_path, monkeypatch) -> None:
    """A constant number of tokens is decoded for each new one, even if none completes a character."""
    tokenizer = tokenizer_of(small.KINDS[kind](tmp_path))
    bad = tokenizer.token_id("<0xFF>") or tokenizer.token_id("\u00ff")
    ids = [bad] * 3000 + tokenizer.encode("the quick brown 東京 🙂 fox " * 100, add_special_tokens=False)
    decoded, join = 0, tokenizer.join

    def counting(tokens: list[str]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return join(tokens)

    monkeypatch.setattr(tokenizer, "join", counting)
    assert len("".join(pieces(tokenizer, ids, ids))) > 3000
    assert decoded <= 4 * len(ids)
