"""Requests and their arrival times: random prompts, traces and files; Poisson arrivals."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

# A prompt as text or token ids, or the messages of a chat
Content = str | list[int] | list[dict[str, Any]]

BLOCK_TOKENS = 512  # that one hash id stands for in Mooncake's traces
_COMMON = (
    "about after again air all along also always another answer any around ask away back because been "
    "before began being below between book both boy but call came can change children city close come "
    "could country cut day did different does down each earth eat end enough even every example eye face "
    "family far father feet few find first follow food form found four friend from girl give good got "
    "great group grow had hand hard has have head hear help here high him his home house how idea into "
    "its just keep kind know land large last later learn leave left letter life light like line list "
    "little live long look made make man many may mean men might mile miss more most mother mountain move "
    "much must name near need never new next night not now number off often old once one only open other "
    "our out over own page paper part people picture place plant play point put question quick read "
    "really right river run said same saw say school sea second see seem sentence set she should show "
    "side small some something song soon sound spell start state still stop story study such sun take "
    "talk tell than that their them then there these they thing think this those thought three through "
    "time together too took tree try turn two under until use very walk want was watch water way well "
    "went were what when where which while white who why will with without word work world would write "
    "year you young your "
)
WORDS = _COMMON.split()


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the load."""

    content: Content
    num_output_tokens: int  # at most
    at_s: float = 0.0  # when to send it, from the beginning of the run


@dataclass(frozen=True, slots=True)
class PromptVocabulary:
    """The vocabulary of random prompts: token ids, or words where the server takes only text.

    A text of n words has about `base_tokens` + n * `tokens_per_word` tokens, as the server counts them.
    """

    token_ids: Sequence[int] = ()
    tokens_per_word: float = 1.0
    base_tokens: float = 0.0

    def draw(self, parts: Iterable[tuple[int, str]]) -> Content:
        """Return a prompt of parts, each a number of tokens and the seed that they are drawn from."""
        drawn = [(count, random.Random(seed)) for count, seed in parts]
        if self.token_ids:
            return [token for count, dice in drawn for token in dice.choices(self.token_ids, k=count)]
        words: list[str] = []
        rest = -self.base_tokens
        for count, dice in drawn:
            rest += count
            wanted = max(round(rest / self.tokens_per_word), 0)
            words += dice.choices(WORDS, k=wanted)
            rest -= wanted * self.tokens_per_word
        return " ".join(words) or WORDS[0]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of random requests in tokens. They vary around their means by `range_ratio` of these."""

    num_prompt_tokens: int
    num_output_tokens: int
    range_ratio: float = 0.0
    num_prefix_tokens: int = 0  # of a shared prefix before each prompt
    num_prefixes: int = 1  # different ones


def random_requests(
    lengths: Lengths, words: PromptVocabulary, seed: int, salt: str = ""
) -> Iterator[Request]:
    """Yield requests without end. The seed determines their lengths, seed and salt their tokens."""
    dice = random.Random(seed)

    def length(mean: int) -> int:
        spread = int(mean * lengths.range_ratio)
        return max(mean + dice.randint(-spread, spread), 1)

    index = 0
    while True:
        prefix = f"prefix {seed} {salt} {dice.randrange(lengths.num_prefixes)}"
        prompt_length = length(lengths.num_prompt_tokens)
        parts = [(lengths.num_prefix_tokens, prefix), (prompt_length, f"prompt {seed} {salt} {index}")]
        yield Request(words.draw(parts), length(lengths.num_output_tokens))
        index += 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. `blocks` are ids of its 512-token blocks: equal ids, equal tokens."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...] = ()

    def parts(self, salt: str, index: int) -> list[tuple[int, str]]:
        """Return the parts of the prompt of request `index` for PromptVocabulary.draw."""
        if not self.blocks:
            return [(self.num_prompt_tokens, f"prompt {salt} {index}")]
        rest, parts = self.num_prompt_tokens, []
        for block in self.blocks:
            parts.append((min(BLOCK_TOKENS, rest), f"block {salt} {block}"))
            rest -= parts[-1][0]
        return parts


def read_trace(path: Path) -> list[Arrival]:
    """Return a trace in order of arrival, beginning at 0. A name ending in ".gz" is unpacked.

    The columns tell which format it is:
    - Azure's CSV with TIMESTAMP, ContextTokens and GeneratedTokens,
    - Mooncake's JSON lines {"timestamp" (ms), "input_length", "output_length", "hash_ids"},
    - JSON lines {"arrival_ms", "prompt_len", "output_len"}.
    """
    with _open(path) as file:
        if ".csv" in path.suffixes:
            found = [_of_csv(row) for row in csv.DictReader(file)]
        else:
            found = [_of_json(json.loads(line)) for line in file if line.strip()]
    found.sort(key=lambda arrival: arrival.at_s)
    return [replace(arrival, at_s=arrival.at_s - found[0].at_s) for arrival in found]


def _open(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _of_csv(row: dict[str, str]) -> Arrival:
    at_s = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
    return Arrival(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _of_json(entry: dict[str, Any]) -> Arrival:
    if "arrival_ms" in entry:
        return Arrival(entry["arrival_ms"] / 1e3, entry["prompt_len"], entry["output_len"])
    blocks = tuple(entry.get("hash_ids") or ())
    return Arrival(entry["timestamp"] / 1e3, entry["input_length"], entry["output_length"], blocks)


def trace_requests(
    trace: Iterable[Arrival], words: PromptVocabulary, salt: str, *, speed: float, longest: int | None
) -> Iterator[Request]:
    """Yield requests with the lengths of a trace, `speed` times as fast.

    Requests longer than `longest` tokens are shortened: the output to at most half of it, the prompt to the
    rest.
    """
    for index, arrival in enumerate(trace):
        if longest and arrival.num_prompt_tokens + arrival.num_output_tokens > longest:
            num_output = min(arrival.num_output_tokens, longest // 2)
            num_prompt = min(arrival.num_prompt_tokens, longest - num_output)
            arrival = replace(arrival, num_prompt_tokens=num_prompt, num_output_tokens=num_output)
        content = words.draw(arrival.parts(salt, index))
        yield Request(content, max(arrival.num_output_tokens, 1), arrival.at_s / speed)


def file_requests(path: Path, num_output_tokens: int) -> Iterator[Request]:
    """Yield the requests of a file: JSON lines, or one list of objects.

    An object has "prompt" (text or token ids), "messages", or ShareGPT's "conversations", of which the first
    turn is taken. "output_len" or "max_tokens" replace `num_output_tokens`.
    """
    text = path.read_text("utf-8")
    is_list = text.lstrip().startswith("[")
    entries = json.loads(text) if is_list else map(json.loads, filter(str.strip, text.split("\n")))
    for entry in entries:
        content = entry.get("prompt") or entry.get("messages") or _first_turn(entry)
        if content:
            yield Request(content, entry.get("output_len") or entry.get("max_tokens") or num_output_tokens)


def _first_turn(entry: dict[str, Any]) -> str:
    turns = entry.get("conversations") or [{}]
    return str(turns[0].get("value", ""))


def poisson(requests: Iterable[Request], rate: float, seed: int) -> Iterator[Request]:
    """Yield the requests at the moments of a Poisson process with `rate` arrivals a second.

    A list is scaled to take exactly its length over the rate, as vLLM does it: else the rate of 100 arrivals
    would vary by 10%.
    """
    dice, at_s = random.Random(f"arrivals {seed}"), 0.0
    scale = 1 / rate
    if isinstance(requests, list) and requests:
        gaps = random.Random(f"arrivals {seed}")
        scale *= len(requests) / sum(gaps.expovariate(1.0) for _ in requests)
    for request in requests:
        yield replace(request, at_s=at_s)
        at_s += scale * dice.expovariate(1.0)


def first(requests: Iterable[Request], count: int, until_s: float | None = None) -> list[Request]:
    """Return at most `count` of them, and none planned for later than `until_s`."""
    taken = []
    for request in islice(requests, count):
        if until_s is not None and request.at_s > until_s:
            break
        taken.append(request)
    return taken
