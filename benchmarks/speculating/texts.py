"""Real texts in token ids, for models of random weights that are made to say them.

The folder has HumanEval.jsonl.gz and gsm8k_test.jsonl.gz. A tokenizer is a folder with a tokenizer.json, or
with a tokenizer.model of lines "base64 rank", as Llama 3 has it.
"""

from __future__ import annotations

import argparse
import base64
import functools
import gzip
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Of Llama 3: how a text is split before bytes are merged.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
Encode = Callable[[str], list[int]]


class Text(NamedTuple):
    """A prompt and its answer, in token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def _completion(task: dict[str, Any]) -> tuple[str, str]:
    return task["prompt"], task["canonical_solution"]


def _repeat(task: dict[str, Any]) -> tuple[str, str]:
    program = task["prompt"] + task["canonical_solution"]
    return f"Say this program again:\n```python\n{program}```\n", f"```python\n{program}```\n"


def _rename(task: dict[str, Any]) -> tuple[str, str]:
    """A change in several places of the program: the name of its first parameter."""
    program = task["prompt"] + task["canonical_solution"]
    signature = re.search(rf"def {re.escape(task['entry_point'])}\(\s*(\w+)", program)
    name = signature[1] if signature is not None else task["entry_point"]
    edited = re.sub(rf"\b{re.escape(name)}\b", f"first_{name}", program)
    asked = f"Rename `{name}` to `first_{name}`:\n```python\n{program}```\n"
    return asked, f"```python\n{edited}```\n"


def _problem(task: dict[str, Any]) -> tuple[str, str]:
    return f"Question: {task['question']}\nAnswer:", f" {task['answer']}"


def _plain_problem(task: dict[str, Any]) -> tuple[str, str]:
    """Without the notes for a calculator, <<3*4=12>>, which repeat what stands before them."""
    question, answer = _problem(task)
    return question, re.sub(r"<<.*?>>", "", answer)


HUMAN_EVAL, GSM8K = "HumanEval.jsonl.gz", "gsm8k_test.jsonl.gz"
KINDS: dict[str, tuple[str, Callable[[dict[str, Any]], tuple[str, str]], str]] = {
    "repeat": (HUMAN_EVAL, _repeat, "the answer repeats a given program"),
    "rename": (HUMAN_EVAL, _rename, "the same with its first parameter renamed"),
    "code": (HUMAN_EVAL, _completion, "completion of a program"),
    "math": (GSM8K, _problem, "grade-school problems, as published"),
    "plain": (GSM8K, _plain_problem, "the same without the notes for a calculator"),
}


def texts(kind: str, folder: Path, encode: Encode) -> Iterator[Text]:
    """Yield the texts of one of KINDS, in an order drawn once."""
    name, make, _ = KINDS[kind]
    with gzip.open(folder / name, "rt", encoding="utf-8") as lines:
        tasks = [json.loads(line) for line in lines]
    random.Random(0).shuffle(tasks)
    for task in tasks:
        prompt, answer = make(task)
        yield Text(tuple(encode(prompt)), tuple(encode(answer)))


def reader(folder: Path) -> Encode:
    """Return what encodes texts by the tokenizer in a folder."""
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    return _RankedBytes(folder / "tokenizer.model")


class _RankedBytes:
    """Merges bytes by rank, the lowest first, within pieces of a text."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Regex, pre_tokenizers

        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        self._ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        self._split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
        self._merged = functools.cache(self._merge)

    def __call__(self, text: str) -> list[int]:
        pieces = self._split.pre_tokenize_str(text)
        return [token for piece, _ in pieces for token in self._merged(piece)]

    def _merge(self, piece: str) -> list[int]:
        data, ranks = piece.encode(), self._ranks
        parts = [data] if data in ranks else [data[i : i + 1] for i in range(len(data))]
        while len(parts) > 1:
            pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
            best = min(pairs)
            if best == len(ranks):
                break
            at = pairs.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [ranks[part] for part in parts]


def add_options(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the options of the texts and their tokenizer."""
    words = "with HumanEval.jsonl.gz and gsm8k_test.jsonl.gz"
    parser.add_argument("--data", type=Path, required=required, metavar="FOLDER", help=words)
    words = "with the tokenizer.json, or Llama 3's tokenizer.model, that makes token ids of them"
    parser.add_argument("--tokenizer", type=Path, required=required, metavar="FOLDER", help=words)
