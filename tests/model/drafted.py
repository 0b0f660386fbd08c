"""Sequences that are driven with what a draft model proposes, on any backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from driver import ALL, DrivenSequence, Driver
from tiny import CONFIGS, VOCAB, random_weights, tiny

from quire.backends.backend import Backend
from quire.backends.draft_model import DraftModel
from quire.backends.reference import ReferenceBackend
from quire.models import read_model
from quire.program import Program
from quire.sampling_params import SamplingParams
from quire.types import RowResult

BLOCKS, SLOTS, SIZE = 64, 6, 16
TEXTS = [np.random.default_rng(i).integers(0, VOCAB, n).tolist() for i, n in enumerate((70, 1, 23, 40))]
PLAIN = replace(ALL, prompt_logprobs=None)
PARAMS: Mapping[str, SamplingParams] = {
    "greedy": PLAIN,
    "drawn": SamplingParams(temperature=1.5, top_p=0.95, min_p=0.01, seed=4, logprobs=-1),
    "likely": SamplingParams(temperature=0.8, top_k=5, seed=9, logprobs=2),
    "penalized": SamplingParams(
        seed=4, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logprobs=0
    ),
    "constrained": SamplingParams(
        seed=4,
        max_tokens=99,
        min_tokens=20,
        stop_token_ids=[3],
        bad_words_token_ids=[[4, 7], [9]],
        logit_bias={5: 1.5},
    ),
    "allowed": SamplingParams(seed=1, allowed_token_ids=[30, 1, 4, 9], logprobs=1),
}


class Make(Protocol):
    """Makes a backend for a program with random weights, drafted for by another with its own."""

    def __call__(self, program: Program, draft: Program | None = None, **how: Any) -> Backend: ...


def on_reference(
    program: Program,
    draft: Program | None = None,
    *,
    max_tokens: int = 512,
    max_len: int = 256,
    num_blocks: int = BLOCKS,
) -> ReferenceBackend:
    model = None
    if draft is not None:
        model = DraftModel(draft, random_weights(draft), max_tokens, max_len)
    return ReferenceBackend(
        program,
        random_weights(program),
        num_blocks=[num_blocks] * len(program.cache_groups),
        block_size=SIZE,
        num_slots=SLOTS,
        draft=model,
    )


def proposed(result: RowResult) -> tuple[int, ...]:
    """What the draft model proposes after a row."""
    return next((draft.token_ids for draft in result.drafts if draft.source == "model"), ())


class Drafts:
    """Steps over sequences, each row of which verifies what was proposed after the one before it."""

    def __init__(self, program: Program, backend: Backend, num_blocks: int = BLOCKS) -> None:
        self.driver = Driver(program, backend, num_blocks)
        self.num_steps = self.num_drafted = self.num_accepted = 0
        self.next: dict[int, tuple[int, ...]] = {}  # drafts by slot

    def admit(
        self, slot: int, text: list[int], params: SamplingParams = PLAIN, **more: Any
    ) -> DrivenSequence:
        self.next[slot] = ()
        return self.driver.admit(slot, text, params, **more)

    def step(self, rows: list[tuple[DrivenSequence, int]], num_proposed: int = 0) -> tuple[RowResult, ...]:
        """Compute `count` known tokens of each sequence, and the drafts after the last ones."""
        given = []
        for sequence, count in rows:
            last = sequence.computed + count == len(sequence.tokens)
            given.append((sequence, count, self.next[sequence.slot] if last else ()))
        results = self.driver.step(*given, num_proposed=num_proposed)
        for (sequence, _, drafts), result in zip(given, results, strict=True):
            self.num_drafted += len(drafts)
            self.num_accepted += max(0, len(result.token_ids) - 1)
            self.next[sequence.slot] = proposed(result)
            assert len(proposed(result)) <= num_proposed
        self.num_steps += 1
        return results

    def run(
        self, sequences: list[DrivenSequence], length: int, num_proposed: int = 3, chunk: int = 999
    ) -> None:
        """Give every sequence this many tokens, or more."""
        while left := [one for one in sequences if len(one.tokens) < length]:
            self.step([(one, min(chunk, len(one.tokens) - one.computed)) for one in left], num_proposed)


def entries(sequence: DrivenSequence) -> list[Any]:
    """The log-probabilities of all tokens given, in order."""
    return [entry for result in sequence.results for entry in result.logprobs]


def expected(
    make: Make, program: Program, params: SamplingParams, length: int, **more: Any
) -> list[DrivenSequence]:
    """The same texts without any draft."""
    drafts = Drafts(program, make(program))
    sequences = [drafts.admit(slot, text, params, **more) for slot, text in enumerate(TEXTS)]
    drafts.run(sequences, length, 0)
    return sequences


def check_equal(found: list[DrivenSequence], wanted: list[DrivenSequence]) -> None:
    """Tokens and bits are the same, as far as both go."""
    for one, other in zip(found, wanted, strict=True):
        count = min(len(one.tokens), len(other.tokens))
        assert one.tokens[:count] == other.tokens[:count]
        pairs = list(zip(entries(one), entries(other), strict=False))
        assert all(a == b for a, b in pairs)


def check_same_outputs(make: Make, name: str, drafter: str, params: SamplingParams, **how: Any) -> Drafts:
    """A model's outputs are its own, whoever drafts for it and however its prompts are cut."""
    program, draft = tiny(name).program, tiny(drafter).program
    longest = {"context_variant": tiny(name).context_variant(110)}  # rope frequencies of its own
    wanted = expected(make, program, params, 110, **longest)
    for chunk in (999, 13):
        drafts = Drafts(program, make(program, draft, **how))
        sequences = [drafts.admit(slot, text, params, **longest) for slot, text in enumerate(TEXTS)]
        drafts.run(sequences, 100, 4, chunk)
        check_equal(sequences, wanted)
    return drafts


def check_itself(make: Make, name: str, params: SamplingParams) -> None:
    """A model that drafts for itself is always right, also across the ends of its blocks."""
    drafts = check_same_outputs(make, name, name, params)
    assert drafts.num_accepted == drafts.num_drafted > 150


def check_lag(make: Make, name: str) -> None:
    """Where it has not run, it computes what it lacks, some tokens a step, and is then right."""
    program = tiny(name).program
    drafts = Drafts(program, make(program, program, max_tokens=8))
    sequences = [drafts.admit(slot, text) for slot, text in enumerate(TEXTS[1:3])]
    drafts.run(sequences, 40, 0)
    assert drafts.num_drafted == 0
    counts = []
    for _ in range(20):
        results = drafts.step([(one, 1) for one in sequences], 2)
        counts.append([len(proposed(result)) for result in results])
    lag = [one for one in counts if 0 in one]
    assert 3 <= len(lag) < 20
    assert counts[-1] == [2, 2]
    assert drafts.num_accepted == drafts.num_drafted > 0
    check_equal(sequences, expected(make, program, PLAIN, 110)[1:3])


def check_no_memory(make: Make) -> None:
    """What it proposes follows from the tokens alone, not from what it guessed before, or when it ran."""
    program, draft = tiny("llama").program, tiny("qwen3").program
    right = [one.tokens for one in expected(make, program, PARAMS["drawn"], 91)]
    wanted = None
    for number in (3, 1, 0):
        drafts = Drafts(program, make(program, draft))
        sequences = [drafts.admit(slot, text, PARAMS["drawn"]) for slot, text in enumerate(TEXTS)]
        while left := [one for one in sequences if len(one.tokens) < 90]:
            for one, tokens in zip(sequences, right, strict=True):  # drafts of others
                drafts.next[one.slot] = tuple(tokens[len(one.tokens) : min(89, len(one.tokens) + 3)])
            drafts.step([(one, len(one.tokens) - one.computed) for one in left], number)
        drafts.next = dict.fromkeys(range(4), ())
        found = [*map(proposed, drafts.step([(one, 1) for one in sequences], 4))]
        assert wanted in (None, found)
        wanted = found


def check_order(make: Make) -> None:
    """A sequence that lacks much does not keep others from being drafted for."""
    program = tiny("llama").program
    drafts = Drafts(program, make(program, program, max_tokens=20))
    sequences = [drafts.admit(slot, TEXTS[slot]) for slot in (0, 2)]
    drafts.step([(sequences[0], 70), (sequences[1], 23)], 0)
    drafts.step([(sequences[0], 1), (sequences[1], 1)], 0)
    counts = [
        [len(proposed(result)) for result in drafts.step([(one, 1) for one in sequences], 2)] for _ in "123"
    ]
    assert counts == [[0, 0], [0, 2], [0, 2]]


def check_prefix(make: Make, known: bool) -> None:
    """Sequences that share cached blocks, whether the draft model knew them or not, are drafted for alike."""
    program = tiny("llama").program
    drafts = Drafts(program, make(program, program))
    first = drafts.admit(0, TEXTS[0])
    drafts.step([(first, 70)], 3 if known else 0)
    others = [drafts.admit(slot, TEXTS[0], start=64, shared=first) for slot in (1, 2)]
    results = drafts.step([(one, 6) for one in others], 3)
    assert [len(proposed(result)) for result in results] == ([3, 3] if known else [3, 0])
    drafts.run([*others, first], 100)
    assert drafts.num_accepted == drafts.num_drafted > 60
    assert first.tokens[:100] == others[0].tokens[:100] == others[1].tokens[:100]


def check_used_blocks(make: Make) -> None:
    """A block that other sequences had before is not taken for one that is computed."""
    program = tiny("llama").program
    drafts = Drafts(program, make(program, program, num_blocks=8), 8)
    blocks = list(drafts.driver.free[0])
    for text in (TEXTS[0], TEXTS[3], TEXTS[2]):
        sequence = drafts.admit(0, text)
        drafts.run([sequence], 110)
        drafts.driver.release(sequence)
        drafts.driver.free[0][:] = blocks
    assert drafts.num_accepted == drafts.num_drafted > 120


def check_replaced_blocks(make: Make) -> None:
    """Blocks whose contents were replaced have nothing of the draft model, which computes them anew."""
    program = tiny("llama").program
    backend = make(program, program)
    drafts = Drafts(program, backend)
    first, other = drafts.admit(0, TEXTS[0]), drafts.admit(1, [(t + 1) % VOCAB for t in TEXTS[0]])
    drafts.step([(first, 70), (other, 70)], 3)
    own, others = first.blocks[0][:4], other.blocks[0][:4]
    contents = backend.read_blocks(0, own)
    assert contents != backend.read_blocks(0, others)
    drafts.driver.release(other)
    backend.write_blocks(0, others, contents)
    assert backend.read_blocks(0, others) == contents
    again = drafts.admit(2, TEXTS[0], start=64, shared=other)
    drafts.num_drafted = drafts.num_accepted = 0
    drafts.run([again, first], 100)
    assert first.tokens[:100] == again.tokens[:100]
    assert drafts.num_accepted == drafts.num_drafted > 40


def check_vocabularies(make: Make) -> None:
    """Of a larger vocabulary only common tokens are proposed; a smaller one may lack some of the target's."""
    program = tiny("llama").program
    wanted = expected(make, program, PARAMS["drawn"], 90)
    for size in (VOCAB + 9, VOCAB - 9):
        draft = read_model({**CONFIGS["qwen3"], "vocab_size": size}).program
        drafts = Drafts(program, make(program, draft))
        sequences = [drafts.admit(slot, text, PARAMS["drawn"]) for slot, text in enumerate(TEXTS)]
        seen = set()
        while min(len(one.tokens) for one in sequences) < 90:
            drafts.step([(one, len(one.tokens) - one.computed) for one in sequences], 4)
            seen |= {token for tokens in drafts.next.values() for token in tokens}
        assert len(seen) > 15
        assert max(seen) < min(size, VOCAB)
        check_equal(sequences, wanted)


def check_longest(make: Make) -> None:
    """A draft model leaves alone the positions that it was not made for."""
    program = tiny("llama").program
    drafts = Drafts(program, make(program, program, max_len=50))
    sequence = drafts.admit(0, TEXTS[3][1:])
    drafts.run([sequence], 60, 4)
    known, lengths = 39, []
    for result in sequence.results:
        known += len(result.token_ids)
        lengths.append((len(proposed(result)), max(0, min(4, 50 - known + 1))))
    assert all(found == most for found, most in lengths)
    assert {most for _, most in lengths} >= {4, 1, 0}
    assert drafts.num_accepted == drafts.num_drafted


def check_window(make: Make) -> None:
    """Where blocks are gone that the draft model would have to compute, it proposes nothing more."""
    program = tiny("mistral").program  # a window of 20
    drafts = Drafts(program, make(program, program))
    sequences = [drafts.admit(slot, TEXTS[2]) for slot in (0, 1)]
    drafts.step([(one, 23) for one in sequences], 3)
    drafts.run(sequences[1:], 70, 0)
    assert proposed(drafts.step([(sequences[1], 1)], 3)[0]) == ()
    assert len(proposed(drafts.step([(sequences[0], 1)], 3)[0])) == 3
    drafts.run(sequences, 90)
    assert drafts.num_accepted == drafts.num_drafted > 30
    check_equal(sequences, [expected(make, program, PLAIN, 120)[2]] * 2)
