"""Text to tokens and back; no text becomes a control token."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers as small
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from model_folders import tokenizer_of

from quire.errors import ConfigError, RequestError
from quire.text.tokenizer import Tokenizer, find_tokenizer
from quire.weights.folder import ModelFolder

TEXTS = [
    "hello world",
    " hello",
    "größe 東京 नमस्ते",
    "👩‍👩‍👧 🙂",
    "e\u0301",
    "a\n\n\nb  c",
    "",
    "<",
    "<s",
    "tool_call",
]
MARKS = [*small.SPECIALS, *small.MARKUP, "<s>", "</s>", "<unk>", "[CLS]"]
FRAGMENTS = st.sampled_from(
    [*MARKS, "<|im_", "end|>", "<", "|>", "<tool_", "call>", "s>", " ", "a", "\n", "<s", "🙂"]
)


@pytest.fixture(scope="module", params=list(small.KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.KINDS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    return tokenizer_of(folder), library


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(small.byte_level(tmp_path_factory.mktemp("chatty")))


def unk(tokenizer: Tokenizer) -> set[int | None]:
    return {tokenizer.token_id("<unk>"), tokenizer.token_id("[UNK]")}


@pytest.mark.parametrize("text", TEXTS)
def test_text_without_control_tokens_is_encoded_as_by_the_library(pair, text: str) -> None:
    tokenizer, library = pair
    if "<" in text and library.token_to_id("<s>") == 1:
        text = text.replace("<", "")  # the merges that make `<s>` of text are gone on purpose
    for special in (True, False):
        expected = library.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, add_special_tokens=special) == expected
        assert tokenizer.decode(expected) == library.decode(expected)


@given(pieces=st.lists(FRAGMENTS, max_size=8))
def test_no_text_makes_a_control_token(pair, pieces: list[str]) -> None:
    tokenizer, _ = pair
    ids = tokenizer.encode("".join(pieces), add_special_tokens=False)
    assert not (set(ids) & tokenizer.control_ids) - unk(tokenizer)


def test_the_library_alone_would_make_them(pair) -> None:
    """A negative control of the test above."""
    tokenizer, library = pair
    marks = [mark for mark in MARKS if library.token_to_id(mark) is not None]
    assert marks
    for mark in marks:
        assert library.encode(mark, add_special_tokens=False).ids[-1] == library.token_to_id(mark)
        assert tokenizer.encode(mark, parse_special=True, add_special_tokens=False)[-1] == tokenizer.token_id(
            mark
        )
        assert tokenizer.token_id(mark) == library.token_to_id(mark)
        assert tokenizer.token_id(mark) in tokenizer.control_ids


@given(pieces=st.lists(FRAGMENTS, max_size=8))
def test_parsed_text_is_encoded_as_by_the_library(chatty, pieces: list[str], tmp_path_factory) -> None:
    library = _library(chatty, tmp_path_factory)
    text = "".join(pieces)
    assert chatty.encode(text, parse_special=True) == library.encode(text).ids


def _library(_: Tokenizer, factory: pytest.TempPathFactory, _cache: list = []) -> tokenizers.Tokenizer:  # noqa: B006
    if not _cache:
        path = small.byte_level(factory.mktemp("library")) / "tokenizer.json"
        _cache.append(tokenizers.Tokenizer.from_file(str(path)))
    return _cache[0]


@given(pieces=st.lists(st.tuples(FRAGMENTS, st.booleans()), max_size=8))
def test_only_control_tokens_wholly_in_trusted_text_count(chatty, pieces: list[tuple[str, bool]]) -> None:
    runs: list[str] = [""]
    for (text, trusted), before in zip(pieces, [False, *(trusted for _, trusted in pieces)], strict=False):
        runs = [*runs, ""] if trusted and not before else runs
        if trusted:
            runs[-1] += text
    parsed = [chatty.encode(run, parse_special=True) for run in runs]
    expected = [i for ids in parsed for i in ids if i in chatty.control_ids]
    ids = chatty.encode_segments(pieces)
    assert [i for i in ids if i in chatty.control_ids] == expected
    assert chatty.decode(ids, skip_special_tokens=False) == "".join(text for text, _ in pieces)


def test_segment_boundaries_do_not_affect_tokens(chatty) -> None:
    text = "hello to the world\n\nagain"
    cuts = [(char, index % 2 == 0) for index, char in enumerate(text)]
    assert chatty.encode_segments(cuts) == chatty.encode(text)


def test_runs_of_white_space_stay_one_token(chatty) -> None:
    """`\\n\\n` is an added token of this vocabulary, yet ordinary text."""
    assert chatty.token_id("\n\n") in chatty.encode("a\n\nb")
    assert chatty.token_id("\n\n") not in chatty.control_ids


def test_special_tokens_are_hidden_on_request_and_markup_is_not(chatty) -> None:
    ids = chatty.encode("<|im_start|>a<tool_call>", parse_special=True)
    assert chatty.decode(ids) == "a<tool_call>"
    assert chatty.decode(ids, skip_special_tokens=False) == "<|im_start|>a<tool_call>"


def test_names_and_sizes(chatty, tmp_path: Path) -> None:
    assert chatty.eos_token_id == chatty.token_id("<|im_end|>")
    assert chatty.bos_token_id is None
    assert chatty.special_ids == {chatty.token_id(name) for name in small.SPECIALS}
    llama = tokenizer_of(small.byte_fallback(tmp_path))
    assert (llama.bos_token_id, llama.eos_token_id) == (1, 2)
    assert llama.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("folder_of", list(small.KINDS.values()))
def test_ids_outside_of_the_vocabulary_are_no_text(folder_of, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(folder_of(tmp_path))
    size = tokenizer.vocab_size
    for wrong in (size, size + 100, 1 << 32, 1 << 70, -1):
        assert tokenizer.decode([wrong]) == tokenizer.token_text(wrong) == ""
        assert tokenizer.token_bytes(wrong) == b""


def test_bytes_of_tokens_concatenate_to_the_text(pair) -> None:
    tokenizer, _ = pair
    ids = tokenizer.encode("hello world 東京", add_special_tokens=False)
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert text.strip() == tokenizer.decode(ids, skip_special_tokens=False)


def test_beginning_of_text_by_configuration(tmp_path: Path) -> None:
    default = tokenizer_of(small.byte_fallback(tmp_path / "a"))
    forced = tokenizer_of(small.byte_fallback(tmp_path / "b", add_bos_token=True))
    without = tokenizer_of(small.byte_fallback(tmp_path / "c", add_bos_token=False))
    ids = default.encode("hello", add_special_tokens=False)
    assert default.encode("hello") == forced.encode("hello") == [1, *ids]
    assert without.encode("hello") == ids
    assert forced.encode("hello", add_special_tokens=False) == ids


def test_truncation_left_in_the_file_is_ignored(tmp_path: Path) -> None:
    assert len(tokenizer_of(small.byte_fallback(tmp_path)).encode("hello " * 50)) > 50


def test_lone_surrogates_are_refused(chatty) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        chatty.encode("a\ud800b")


def test_missing_and_broken_files(tmp_path: Path) -> None:
    assert find_tokenizer(ModelFolder.at(tmp_path)) is None
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        tokenizer_of(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConfigError, match="neither a file of SentencePiece nor ranks"):
        find_tokenizer(ModelFolder.at(tmp_path))
    for broken in ("{", "[]", "{}", '{"model": {"vocab": 3}}', "\xff", "[" * 100_000):
        (tmp_path / "tokenizer.json").write_text(broken, encoding="latin-1")
        with pytest.raises(ConfigError) as caught:
            tokenizer_of(tmp_path)
        assert caught.value.hint
    small.byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        tokenizer_of(tmp_path)


def test_of_control_tokens_that_begin_alike_the_longest_counts(tmp_path: Path) -> None:
    folder = small.byte_level(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"] += [small.added(10**6, "<|im_end|><|im_start|>"), small.added(10**6 + 1, "<|im")]
    small.write(folder, data)
    tokenizer = tokenizer_of(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("<|im_end|><|im_start|>", "<|im_end|><|im", "a<|im_start", "<|im_end|> <|im_start|>"):
        assert tokenizer.encode(text, parse_special=True) == library.encode(text).ids


def test_single_word_tokens_match_whole_words_of_trusted_text(tmp_path: Path) -> None:
    folder = small.byte_level(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"].append(small.added(10**6, "_im_", special=True, single_word=True))
    small.write(folder, data)
    tokenizer = tokenizer_of(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("a _im_ b", "a_im_b", "_im_", "x _im_y"):
        assert tokenizer.encode(text, parse_special=True) == library.encode(text).ids


SPECIAL = {"SpecialToken": {"id": "<s>", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def processor(single: list[Any], ids: list[int]) -> dict[str, Any]:
    """A post-processor that writes `single`, where "<s>" are the tokens `ids`."""
    named = {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": single, "pair": [TEXT, TEXT], "special_tokens": named}


# What is changed in tokenizer.json, and what the error says.
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "an id twice": ({"model.vocab": {"[UNK]": 0, "a": 1, "b": 1}}, "1 is the id of two tokens"),
    "a huge id": ({"model.vocab": {"[UNK]": 0, "a": 4_000_000_000}}, "4000000000 is not a token id"),
    "a negative id": ({"model.vocab": {"[UNK]": 0, "a": -1}}, "-1 is not a token id"),
    "a fraction": ({"model.vocab": {"[UNK]": 0, "a": 1.5}}, "1.5 is not a token id"),
    "a flag as id": ({"model.vocab": {"[UNK]": 0, "a": True}}, "True is not a token id"),
    "added twice": ({"added_tokens": [small.added(9, "<x>"), small.added(9, "<y>")]}, "9 is the id of two"),
    "added, huge": ({"added_tokens": [small.added(1 << 40, "<x>")]}, "is not a token id"),
    "added, text": ({"added_tokens": [small.added(1, "<x>") | {"id": "1"}]}, "'1' is not a token id"),
    "a token from nowhere": ({"post_processor": processor([SPECIAL, TEXT], [999_999])}, "not in the vocab"),
    "no text left": ({"post_processor": processor([], [1])}, "drops the text"),
    "a special token unknown": (
        {"post_processor": processor([SPECIAL, TEXT], [1]) | {"special_tokens": {}}},
        "cannot use",
    ),
    "a panic at once": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "Cannot parse precompiled_charsmap",
    ),
    "a panic when used": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size"),
    "a long name": ({"added_tokens": [small.added(9, "<x>" * 400)]}, "or one of more than 1,024 characters"),
    "many names": ({"added_tokens": [small.added(9, "")] * 100_000}, "more than 80,000 added tokens"),
    "an error that steers": ({"normalizer": {"type": "\x1b[2J"}}, "cannot use"),
    "an error of a megabyte": ({"normalizer": {"type": "N" * 10**6}}, "cannot use"),
}


@pytest.mark.parametrize("label", LIES)
def test_an_inconsistent_tokenizer_is_refused(
    tmp_path: Path, label: str, capfd: pytest.CaptureFixture[str]
) -> None:
    changes, message = LIES[label]
    path = small.words(tmp_path) / "tokenizer.json"
    data = json.loads(path.read_text())
    for name, value in changes.items():
        *outer, last = name.split(".")
        (data[outer[0]] if outer else data)[last] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message) as caught:
        tokenizer_of(tmp_path)
    assert caught.value.message.isprintable()
    assert len(str(caught.value)) < len(str(path)) + 600
    assert capfd.readouterr().err == ""  # no panic's backtrace beside it
    os.write(2, b"open")
    assert capfd.readouterr().err == "open"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": "\ud800"}, r"eos_token = '\\ud800' is not a text"),
        ({"bos_token": 7}, "bos_token = 7 is not a text"),
        ({"eos_token": {"content": ["</s>"]}}, "eos_token = .* is not a text"),
        ({"add_bos_token": "yes"}, "add_bos_token = 'yes' is neither true nor false"),
    ],
)
def test_a_malformed_tokenizer_config_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    small.words(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        tokenizer_of(tmp_path)


def test_a_text_that_cannot_be_encoded_is_refused_alone(tmp_path: Path) -> None:
    """This vocabulary has no token for unknown characters."""
    path = small.unigram(tmp_path) / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["unk_id"] = None
    path.write_text(json.dumps(data))
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.encode("hello") != []
    with pytest.raises(RequestError, match="cannot encode the text"):
        tokenizer.encode("\u4e16")


def test_an_encoding_is_never_random(tmp_path: Path) -> None:
    path = small.byte_level(tmp_path) / "tokenizer.json"
    plain = tokenizer_of(tmp_path).encode("the quick brown fox" * 9)
    data = json.loads(path.read_text())
    data["model"]["dropout"] = 0.5
    path.write_text(json.dumps(data))
    assert tokenizer_of(tmp_path).encode("the quick brown fox" * 9) == plain


def test_an_added_token_with_another_id_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = small.words(tmp_path) / "tokenizer.json"
    data = json.loads(path.read_text())
    data["added_tokens"].append(small.added(99, "<x>"))
    path.write_text(json.dumps(data))
    assert tokenizer_of(tmp_path).token_id("<x>") == 5
    assert "'<x>' has the id 5, not 99" in caplog.text


def test_tokens_that_only_the_configuration_adds(tmp_path: Path) -> None:
    """As transformers, which adds them when it loads a tokenizer: one of the vocabulary, and new ones."""
    folder = small.byte_level(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    size = len(data["model"]["vocab"]) + len(data["added_tokens"])
    the = data["model"]["vocab"]["the"]
    stated = {
        str(size + 1): {"content": "</tool>"},
        str(size): {"content": "<tool>", "rstrip": True, "special": True},
        str(the): {"content": "the"},
        str(size - 1): {"content": data["added_tokens"][-1]["content"], "special": True},  # known
        "0": None,
    }
    for entry in ({"content": "the", "id": 1}, None):
        stated["0"] = entry or {"content": "<|endoftext|>"}
        small.write(folder, data, {"added_tokens_decoder": stated})
        tokenizer = tokenizer_of(folder)
        ids = tokenizer.encode("<tool> \nthe</tool>", parse_special=True)
        assert ids == [size, the, size + 1]
        assert tokenizer.token_id("</tool>") == size + 1
        assert size in tokenizer.special_ids
        assert size - 1 not in tokenizer.special_ids
    assert not {size, size + 1} & set(tokenizer.encode("<tool></tool>"))
    for wrong in ({"x": {"content": "<a>"}}, {"9": {}}, {"9": "<a>"}, ["<a>"]):
        small.write(folder, data, {"added_tokens_decoder": wrong})
        with pytest.raises(ConfigError, match="tokenizer"):
            tokenizer_of(folder)
