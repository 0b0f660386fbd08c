"""Text against published tokenizers and chat templates."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from model_folders import tokenizer_of

from quire.errors import RequestError
from quire.text.characters import byte_of_token
from quire.text.chat_template import ChatTemplate
from quire.text.detokenize import Detokenizer
from quire.text.renderer import TemplateRenderer
from quire.text.tokenizer import Tokenizer, find_tokenizer
from quire.weights.folder import ModelFolder

PUBLISHED = ("tokenizers/llama-2", "tokenizers/gpt-2", "tokenizers/phi-3")
STORIES = "models/stories260K"
MARK = re.compile(r"<[|\uff5c][^|\uff5c<>]*[|\uff5c]>|\[/?[A-Z_]+\]|</?s>|</?[a-z_]+>|<[A-Z_]+>")
MIXED = "größe 東京 नमस्ते 👩‍👩‍👧 🏳️‍🌈 e\u0301 \u0e20\u0e32\u0e29\u0e32 \u1019\u103c\u1014\u103a\u1019\u102c"


@functools.cache
def load(folder: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return tokenizer_of(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    with closing(TemplateRenderer()) as made:
        yield made


@pytest.fixture(scope="module")
def cases(shared_data: Path) -> list[dict[str, Any]]:
    files = sorted((shared_data / "chat_templates" / "cases").glob("*.json"))
    return [json.loads(file.read_text()) for file in files]


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return "".join(detokenizer.push([token]) for token in output) + detokenizer.finish()


def mixes_bytes(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """True for a run of byte tokens that is not valid: there the library gives up the whole run."""
    if tokenizer.token_id("<0x00>") is None:
        return False
    spelled = tokenizer.token_strings(ids, skip_special_tokens=False)
    run = bytes(byte for byte in map(byte_of_token, spelled) if byte is not None)
    return "\ufffd" in run.decode(errors="replace")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_encodings(shared_data: Path, name: str) -> None:
    tokenizer, _ = load(shared_data / name)
    for case in json.loads((shared_data / name / "golden.json").read_text())["cases"]:
        ids = tokenizer.encode(case["text"], add_special_tokens=False, parse_special=True)
        assert ids == case["ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["decoded"]
        assert stream(tokenizer, [], ids, skip=False) == case["decoded"]
    source = next((shared_data / name).glob("*.gguf.inp")).read_text()
    expected = next((shared_data / name).glob("*.gguf.out")).read_text().splitlines()
    for text, line in zip(source.split("\n__ggml_vocab_test__\n"), expected, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(number) for number in line.split()]


@pytest.mark.parametrize("name", [STORIES, *PUBLISHED])
def test_no_text_makes_a_control_token(shared_data: Path, name: str) -> None:
    tokenizer, library = load(shared_data / name)
    marks = [library.id_to_token(token) for token in sorted(tokenizer.control_ids)]
    for left, right in itertools.product([*marks, "a", " ", "<", "<|"], repeat=2):
        ids = tokenizer.encode(left + right, add_special_tokens=False)
        assert not set(ids) & tokenizer.control_ids - {tokenizer.token_id("<unk>")}


def test_all_pairs_of_tokens_of_the_small_vocabulary(shared_data: Path) -> None:
    """All 262,144; the library is the reference but for the 32,768 of a valid and an invalid byte."""
    tokenizer, library = load(shared_data / STORIES)
    differ = 0
    for pair in itertools.product(range(tokenizer.vocab_size), repeat=2):
        ids = list(pair)
        whole = tokenizer.decode(ids)
        assert stream(tokenizer, [], ids, skip=True) == whole, ids
        if whole != library.decode(ids):
            differ += 1
            assert mixes_bytes(tokenizer, ids)
    assert differ == 2 * 128 * 128


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_and_a_sample_of_pairs_and_triples(shared_data: Path, name: str) -> None:
    tokenizer, library = load(shared_data / name)
    rng, size = random.Random(0), tokenizer.vocab_size
    singles = [[token] for token in range(size)]
    several = [[rng.randrange(size) for _ in range(rng.choice((2, 3)))] for _ in range(30_000)]
    partial = [token for token in range(size) if "\ufffd" in tokenizer.token_text(token)]
    halves = [[rng.choice(partial) for _ in range(rng.choice((2, 3, 4)))] for _ in range(10_000)]
    for ids in itertools.chain(singles, several, halves):
        skip = len(ids) != 2
        whole = tokenizer.decode(ids, skip)
        assert stream(tokenizer, [], ids, skip) == whole, ids
        assert whole == library.decode(ids, skip) or mixes_bytes(tokenizer, ids)


@pytest.mark.parametrize("name", PUBLISHED[:2])
def test_all_pairs_of_byte_tokens(shared_data: Path, name: str) -> None:
    tokenizer, library = load(shared_data / name)
    spelled = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    single = [spelled[bytes((byte,))] for byte in range(256)]
    for ids in map(list, itertools.product(single, repeat=2)):
        whole = tokenizer.decode(ids, False)
        assert stream(tokenizer, [], ids, False) == whole
        assert whole == library.decode(ids, False) or mixes_bytes(tokenizer, ids)


@pytest.mark.parametrize("name", [STORIES, *PUBLISHED])
def test_a_stream_behind_any_prompt(shared_data: Path, name: str) -> None:
    tokenizer, _ = load(shared_data / name)
    ids = tokenizer.encode("Once upon a time, " + MIXED)
    for cut in range(len(ids) + 1):
        prompt = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        assert prompt + stream(tokenizer, ids[:cut], ids[cut:], skip=True) == tokenizer.decode(ids)


def test_checkpoints_without_a_tokenizer(shared_data: Path) -> None:
    assert find_tokenizer(ModelFolder.at(shared_data / "models" / "tiny-random" / "llama")) is None


def test_published_chat_templates(cases: list[dict[str, Any]], renderer: TemplateRenderer) -> None:
    """All 27, and every marker that a template writes is trusted."""
    right = []
    for case in cases:
        context = dict(case["context"])
        special = {name: context.pop(name) for name in ("bos_token", "eos_token") if name in context}
        now = datetime.fromisoformat(case["now"])
        chat = ChatTemplate({"default": case["template"]}, special, renderer)
        rendered = chat.render_context(case["template"], context, now)
        assert rendered.text == case["expected"], case["name"]
        marks = sum(len(MARK.findall(segment.text)) for segment in rendered.segments if segment.trusted)
        assert marks == len(MARK.findall(rendered.text)), case["name"]
        if plain_text(context):
            tools, prompt = context.pop("tools", None), context.pop("add_generation_prompt", False)
            checked = chat.render(context.pop("messages"), tools, prompt, context, now)
            assert checked == rendered, case["name"]
        right.append(case["name"])
    assert len(right) == 27


def plain_text(context: dict[str, Any]) -> bool:
    """True if all messages are text, and arguments of calls are not text (they are made objects)."""
    calls = [call for message in context["messages"] for call in message.get("tool_calls") or []]
    return all(isinstance(message.get("content") or "", str) for message in context["messages"]) and not any(
        isinstance(call.get("function", call)["arguments"], str) for call in calls
    )


def with_markers(source: Path, marks: list[str], folder: Path) -> Tokenizer:
    """The tokenizer of `source` with these control tokens added."""
    data = json.loads((source / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    known = {entry["content"] for entry in data["added_tokens"]}
    for number, mark in enumerate(mark for mark in marks if mark not in known):
        data["added_tokens"].append({"id": 512 + number, "content": mark} | flags)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return tokenizer_of(folder)


def test_callers_text_in_published_templates(
    cases: list[dict[str, Any]], renderer: TemplateRenderer, shared_data: Path, tmp_path: Path
) -> None:
    tried = 0
    for case in cases:
        context = case["context"]
        special = {name: context[name] for name in ("bos_token", "eos_token") if name in context}
        written = MARK.findall(case["template"]) + MARK.findall(case["expected"])
        marks = sorted({*written, *special.values()})
        tokenizer = with_markers(shared_data / STORIES, marks, tmp_path)
        chat = ChatTemplate({"default": case["template"]}, special, renderer)
        tried += attack(chat, tokenizer, marks)
    assert tried >= 24  # the others refuse a conversation without a system message or a tool


def attack(chat: ChatTemplate, tokenizer: Tokenizer, marks: list[str]) -> bool:
    """Hostile messages give the control tokens of innocuous ones; False if the template takes neither."""

    def control(first: str, last: str) -> list[int]:
        roles = ("user", first), ("assistant", "y"), ("user", last)
        messages = [{"role": role, "content": content} for role, content in roles]
        ids = tokenizer.encode_segments(chat.render(messages).segments)
        return [token for token in ids if token in tokenizer.control_ids - {tokenizer.token_id("<unk>")}]

    try:
        innocuous = control("x", "x")
    except RequestError:
        return False
    halves = [half for mark in marks for half in (mark[: len(mark) // 2], mark[len(mark) // 2 :])]
    texts = st.lists(st.sampled_from([*marks, *halves, "x"]), max_size=4).map(
        lambda parts: f"x{''.join(parts)}x"
    )

    @settings(max_examples=12, deadline=None, database=None)
    @given(first=texts, last=texts)
    def hostile(first: str, last: str) -> None:
        assert control(first, last) == innocuous

    hostile()
    return True
