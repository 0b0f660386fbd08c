"""Real texts in token ids: Llama 3's tokenizer.model, and prompts with their answers."""

from __future__ import annotations

import base64
import gzip
import json

import pytest
from speculating import texts

MERGED = (b"he", b"ll", b"hell", b"llo", b" w")  # in the order of ranks: "hell" before "llo"
TASK = {
    "prompt": "def twice(x, xs):\n",
    "canonical_solution": "    return [x for x in xs] * 2\n",
    "entry_point": "twice",
}


@pytest.fixture
def folder(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)] + list(MERGED)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    with gzip.open(tmp_path / texts.HUMAN_EVAL, "wt") as file:
        file.write(json.dumps(TASK) + "\n")
    with gzip.open(tmp_path / texts.GSM8K, "wt") as file:
        file.write(json.dumps({"question": "How many?", "answer": "2*3=<<2*3=6>>6"}) + "\n")
    return tmp_path


def test_bytes_are_merged_by_rank_within_words(folder):
    encode = texts.reader(folder)
    assert encode("hello world") == [258, ord("o"), 260, *b"orld"]
    assert encode("h e") == [ord("h"), ord(" "), ord("e")]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("repeat", "```python\ndef twice(x, xs):\n    return [x for x in xs] * 2\n```\n"),
        ("rename", "```python\ndef twice(first_x, xs):\n    return [first_x for first_x in xs] * 2\n```\n"),
        ("code", "    return [x for x in xs] * 2\n"),
        ("math", " 2*3=<<2*3=6>>6"),
        ("plain", " 2*3=6"),
    ],
)
def test_answers(folder, kind, answer):
    (text,) = texts.texts(kind, folder, lambda text: list(text.encode()))
    assert bytes(text.answer).decode() == answer
