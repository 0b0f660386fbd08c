"""Sequences with a grammar on a tiny model, whose 32 tokens spell JSON; with drafts of every kind."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

from driver import DrivenSequence, Driver
from tiny import VOCAB

from quire.backends.backend import Backend
from quire.grammar.compile_job import llguidance_text
from quire.grammar.grammars import Grammars
from quire.program import Program
from quire.runner.runner import Runner
from quire.sampling_params import SamplingParams
from quire.types import RowResult

END, CALL = 0, 1
TEXTS = ["", "", *'{}":, []', *"abcmnrtu", "ab", "abc", '":', '": ', '", "', '{"', *"12", "12"]
TEXTS += ["true", "name", "na", "me", "e"]
assert len(TEXTS) == VOCAB
MOST = 60  # tokens of an output
PROMPT = [11, 12, 3, 30, 10]
ANY = SamplingParams(temperature=1.2, seed=4, logprobs=3, max_tokens=MOST)
PARAMS = {
    "greedy": replace(ANY, temperature=0),
    "drawn": replace(ANY, temperature=2, top_p=0.98),
    "penalized": replace(ANY, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    "late": replace(ANY, min_tokens=9, stop_token_ids=[9], bad_words_token_ids=[[4, 24], [29]]),
    "narrow": replace(ANY, allowed_token_ids=[2, 3, 4, 5, 6, 8, 9, 10, 11, 18, 23, 25, END]),
}


class SmallTokenizer:
    """Takes the longest token that fits, and skips what has none."""

    vocab_size = VOCAB
    control_tokens: ClassVar = {END: "<|end|>", CALL: "<call>"}

    def token_bytes(self, token_id: int) -> bytes:
        return TEXTS[token_id].encode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            best = max(range(VOCAB), key=lambda i: len(TEXTS[i]) if text.startswith(TEXTS[i]) else 0)
            ids += [best] * text.startswith(TEXTS[best] or "\0")
            text = text[len(TEXTS[best]) or 1 :]
        return ids


@cache
def grammars() -> Grammars:
    made: Any = SmallTokenizer()
    return Grammars(made, VOCAB)


def value(rng: random.Random, size: int) -> dict[str, Any]:
    """A random schema whose instances the tokens can spell."""
    if size <= 1 or rng.random() < 0.2:
        return rng.choice(
            [
                {"enum": ["abc", "ab", "mama"]},
                {"const": rng.choice(["true", "name", 12, True])},
                {"type": "string", "pattern": "^[abc]{1,4}$"},
                {"type": "integer", "minimum": 1, "maximum": 22},
                {"enum": [True, 1]},
            ]
        )
    if rng.random() < 0.3:
        return {"type": "array", "items": value(rng, size // 2), "minItems": 1, "maxItems": 2}
    names = rng.sample(["name", "ab", "mute", "a"], rng.randint(1, 3))
    parts = {name: value(rng, size // 2) for name in names}
    required = rng.sample(names, rng.randint(0, len(names)))
    return {"type": "object", "properties": parts, "required": required, "additionalProperties": False}


def structure(seed: int) -> str:
    """A random grammar: schemas, an expression, a choice, and calls after free text."""
    rng = random.Random(seed)
    tight = {"whitespace_flexible": False} if rng.random() < 0.5 else {"whitespace_pattern": r"\x20"}
    schema = value(rng, 6) | {"x-guidance": tight}
    call = {"json_schema": schema, "name": "call"}
    lark = 'start: TEXT | TEXT <[1]> "name" @call\nTEXT: /[abc ]{0,6}/'
    kinds = [
        llguidance_text({"json": schema}),
        llguidance_text({"json": schema}),
        llguidance_text({"regex": rng.choice(["(ab|me)*", "(name: [12]{2} ){2}", "a{3}(true)?"])}),
        llguidance_text({"choice": ["name", "named", "true, true", "na"][: rng.randint(1, 4)]}),
        json.dumps({"grammars": [{"lark_grammar": lark}, call]}),
    ]
    return kinds[seed % len(kinds)]


@dataclass
class Run:
    """One sequence until its end: an end token, an error, or MOST tokens."""

    params: SamplingParams
    grammar: str
    sequence: DrivenSequence = field(init=False)
    num_rows: int = 0

    @property
    def output(self) -> list[int]:
        return self.sequence.tokens[len(PROMPT) :]

    @property
    def last(self) -> RowResult:
        return self.sequence.results[-1]

    @property
    def ended(self) -> bool:
        return self.last.error is not None or END in self.output or len(self.output) >= MOST

    def found(self) -> tuple[list[int], list[Any], Any]:
        """Tokens, all bits of their log-probabilities, and the error; without what came after the end."""
        most = (*self.output[: MOST - 1], END).index(END) + 1
        logprobs = [entry for result in self.sequence.results for entry in result.logprobs]
        return self.output[:most], logprobs[:most], self.last.error


# From a run, and the output of the same without drafts, to what the next row verifies.
Propose = Callable[[Run, Sequence[int]], tuple[int, ...]]


def complete(
    program: Program,
    backend: Backend,
    runs: list[Run],
    expected: Sequence[Sequence[int]],
    propose: Propose,
    **options: Any,
) -> list[Any]:
    """Run all together, each in a slot of its own; now and then one is preempted and admitted again.

    `options` are those of the runner.
    """
    runner: Any = Runner(backend, grammars, **options)
    driver, rng = Driver(program, runner, 8 * len(runs)), random.Random(0)
    for slot, run in enumerate(runs):
        run.sequence = driver.admit(slot, PROMPT, run.params, ends=(END, 99), grammar=run.grammar)
    driver.step(*((run.sequence, len(PROMPT)) for run in runs))
    while going := [(run, own) for run, own in zip(runs, expected, strict=True) if not run.ended]:
        rows = []
        for run, own in going:
            drafted = propose(run, own)
            if drafted and rng.random() < 0.05:
                resume(driver, run)
            rows.append((run.sequence, len(run.sequence.tokens) - run.sequence.computed, drafted))
            run.num_rows += 1
        driver.step(*rows)
    return [run.found() for run in runs]


def rows_by_kind(
    program: Program, backend: Callable[[], Backend], params: SamplingParams, seeds: range
) -> dict[str, int]:
    """Compare drafts of every kind with none; return how many rows each took ("none": without drafts)."""
    taken: dict[str, int] = {}

    def outputs(kind: str, expected: Sequence[Sequence[int]], propose: Propose) -> list[Any]:
        runs = [Run(params, structure(seed)) for seed in seeds]
        found = complete(program, backend(), runs, expected, propose)
        taken[kind] = sum(run.num_rows for run in runs)
        return found

    plain = outputs("none", [()] * len(seeds), lambda run, expected: ())
    for kind, propose in proposers(1):
        assert outputs(kind, [tokens for tokens, *_ in plain], propose) == plain, kind
    return taken


def verify_all(
    chances: Sequence[Sequence[float]], num_others: int, seconds: Any, most: int, *_: Any
) -> list[int]:
    """Choose all tokens of all drafts, in place of draft_lengths.choose_lengths, which looks at times."""
    lengths = []
    for row in chances:
        lengths.append(min(len(row), most))
        most -= lengths[-1]
    return lengths


def resume(driver: Driver, run: Run) -> None:
    """Release the slot and admit the sequence to it again, with all its tokens."""
    sequence = run.sequence
    driver.release(sequence)
    for group, blocks in sequence.blocks.items():
        driver.free[group] += blocks
        blocks.clear()
    driver.admitted.append(sequence.admission)
    sequence.computed = sequence.granted = 0
    sequence.fresh = True


def proposers(seed: int) -> Iterator[tuple[str, Propose]]:
    """Drafters of every kind."""
    rng = random.Random(seed)

    def right(run: Run, expected: Sequence[int]) -> tuple[int, ...]:
        at = len(run.output)
        return (*expected[at : at + rng.randint(0, 6)],)

    def beyond(run: Run, expected: Sequence[int]) -> tuple[int, ...]:
        return (*expected[len(run.output) :][:6], END, 3, END, 12)

    def wrong(run: Run, expected: Sequence[int]) -> tuple[int, ...]:
        return tuple(token if rng.random() < 0.7 else rng.randrange(VOCAB) for token in right(run, expected))

    def anything(run: Run, expected: Sequence[int]) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(0, 5)))

    def forced(run: Run, expected: Sequence[int]) -> tuple[int, ...]:
        return next((draft.token_ids for draft in run.last.drafts if draft.source == "grammar"), ())

    yield from {"right": right, "beyond": beyond, "wrong": wrong, "any": anything, "forced": forced}.items()
