"""Rows with a grammar that verify drafts: the tokens and bits of rows without, whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from constrained import ANY, END, PARAMS, PROMPT, Propose, Run, complete, grammars, proposers, rows_by_kind
from numpy.typing import NDArray
from tiny import random_weights, tiny

from quire.backends.reference import ReferenceBackend
from quire.errors import RequestError
from quire.grammar.compile_job import llguidance_text
from quire.grammar.forced_runs import SURE
from quire.grammar.grammars import Matcher
from quire.program.caches import MAX_DRAFTED
from quire.runner.masks import GrammarState
from quire.types import Admission, Draft

PROGRAM = tiny("gemma3").program
WEIGHTS = random_weights(PROGRAM)
JSON = llguidance_text({"json": {"type": "object", "properties": {"name": {"enum": ["abc", "ab"]}}}})


def backend() -> ReferenceBackend:
    num_blocks = [128] * len(PROGRAM.cache_groups)
    return ReferenceBackend(PROGRAM, WEIGHTS, num_blocks=num_blocks, block_size=16)


@pytest.mark.parametrize("name", PARAMS)
def test_the_same_with_drafts_of_every_kind(name: str) -> None:
    rows = rows_by_kind(PROGRAM, backend, PARAMS[name], range(15))
    assert rows["beyond"] < rows["right"] < rows["wrong"] < rows["any"] <= rows["none"]
    assert rows["forced"] < rows["none"]


@dataclass
class Doomed:
    """A matcher that fails at one position, and its source; copies fail as well."""

    inner: Matcher
    fails_in: int

    def start(self, grammar: str) -> Doomed:
        return self.copy()

    def copy(self) -> Doomed:
        return Doomed(self.inner.copy(), self.fails_in)

    def advance(self, token_ids: Sequence[int]) -> None:
        self.fails_in -= len(token_ids)
        self.inner.advance(token_ids)

    def allowed(self) -> tuple[NDArray[np.uint32], bool]:
        if self.fails_in <= 0:
            raise RequestError("it grew too large")
        return self.inner.allowed()

    def draft(self) -> Draft:
        return self.inner.draft()


@pytest.mark.parametrize("length", range(1, 12))
def test_an_error_comes_when_its_position_is_reached(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted tokens may reach it before; they count as far as they are accepted."""
    grammar = llguidance_text({"regex": "(name: [12]{2} ){9}"})
    doomed = Doomed(grammars().start(grammar), length)
    monkeypatch.setattr("constrained.grammars", lambda: doomed)
    (expected,) = complete(PROGRAM, backend(), [Run(ANY, grammar)], [()], lambda run, own: ())
    assert (len(expected[0]), expected[2].message) == (length, "the grammar failed: it grew too large")
    for _, propose in proposers(length):
        assert complete(PROGRAM, backend(), [Run(ANY, grammar)], [expected[0]], propose) == [expected]


def masks(grammar: str, *drafted: int, ends: tuple[int, ...] = (END,)) -> list[list[int]]:
    """The tokens allowed at each position of a row that has masks."""
    text = llguidance_text({"regex": grammar})
    state = GrammarState(Admission(0, "r", 0, ANY, ends, len(PROMPT), grammar=text))
    state.compute(grammars(), PROMPT, drafted)
    assert state.num_taken == len(PROMPT)
    unpacked = [np.unpackbits(mask.view(np.uint8), bitorder="little") for mask in state.masks]
    return [np.flatnonzero(one).tolist() for one in unpacked]


A, B, C, AB, ABC, T = 10, 11, 12, 18, 19, 16


def test_masks_end_where_no_draft_may_follow() -> None:
    assert masks("abc?") == [[A, AB, ABC]]
    assert masks("abc?", A) == [[A, AB, ABC], [B]]
    assert masks("abc?", A, B, C) == [[A, AB, ABC], [B], [END, C], [END]]
    assert masks("abc?", A, C, B) == [[A, AB, ABC], [B]]  # not allowed
    assert masks("abc?", AB, END, C) == [[A, AB, ABC], [END, C]]  # the end of the output
    assert masks("abc?", ABC, T, T) == [[A, AB, ABC], [END]]
    assert masks("(ab)*", END) == [[END, A, AB]]


FORCED = dict(proposers(0))["forced"]


def test_a_row_tells_what_its_grammar_forces() -> None:
    """Nothing after an end token."""
    run = Run(ANY, llguidance_text({"regex": "(name: ){12}true"}))
    complete(PROGRAM, backend(), [run], [()], lambda run, own: FORCED(run, own)[:1])
    at = 0
    for result in run.sequence.results:
        at += len(result.token_ids)
        left = tuple(run.output[at:-1])
        assert result.drafts == ((Draft(left[:MAX_DRAFTED], "grammar", SURE),) if left else ())
    assert MAX_DRAFTED < at == len(run.output)
    assert run.output[-1] == END


def test_drafts_that_nobody_verifies_become_rare() -> None:
    """And are made again when one was; none if the runner is to make none."""
    run = Run(ANY, llguidance_text({"regex": "(name: ){30}true"}))

    def made(propose: Propose, **options: bool) -> list[int]:
        run.num_rows = 0
        complete(PROGRAM, backend(), [run], [()], propose, **options)
        return [i for i, result in enumerate(run.sequence.results) if result.drafts]

    assert made(lambda run, own: (END,)) == [0, 2, 6, 14, 30]
    late = made(lambda run, own: FORCED(run, own)[:1] if run.num_rows >= 30 else ())
    assert late == [0, 2, 6, 14, *range(30, len(run.sequence.results))]
    assert made(FORCED, drafts=False) == []
